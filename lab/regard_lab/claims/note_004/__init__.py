"""Claims of note 004, “Softmax in attention”."""
