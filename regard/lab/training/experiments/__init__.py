"""One file per training experiment; `regard.lab.training.names()` finds them by looking."""
