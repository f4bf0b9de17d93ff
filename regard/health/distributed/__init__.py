"""A model on the ranks of a torch.distributed group: its batches shared out (`rounds`), or its sequence (`pieces`)."""
