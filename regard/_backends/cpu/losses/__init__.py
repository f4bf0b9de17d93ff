"""Fenchel–Young losses of rows on a CPU."""
