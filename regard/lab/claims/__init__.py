"""One file per claim of the notes; `regard.lab.names()` finds them by looking."""
