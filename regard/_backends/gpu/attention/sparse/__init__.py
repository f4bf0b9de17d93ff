"""Threshold maps on long rows: list the candidate keys once, then work on the lists."""
