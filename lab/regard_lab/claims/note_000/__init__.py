"""Claims of note 000, “Softmax and its derivative”."""
