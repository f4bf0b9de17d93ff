"""The parts of a `Monitor`: trends, log writers, trainer callbacks, the timed recorder."""
