"""One folder per note, one file per claim; found by `regard_lab.run.claims`."""
