"""One file per claim of the notes, each defining `claim`; found by `regard.lab.run.claims`."""
