"""Claims of note 003, “Why the scale factor”."""
