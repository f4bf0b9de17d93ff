"""One file per training experiment; `regard_lab.training.names()` finds them by looking."""
