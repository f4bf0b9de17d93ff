"""Models and batches for the commands, and the small language model of the demo."""
