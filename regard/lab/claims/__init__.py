"""One folder per note, one file per claim; found by `regard.lab.run.claims`."""
