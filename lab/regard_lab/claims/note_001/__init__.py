"""Claims of note 001, “Why divide by √d_k”."""
