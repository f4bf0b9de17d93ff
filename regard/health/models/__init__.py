"""Loads the model and the batches that a command line names."""
