"""Claims of note 002, “Notes on softmax”."""
