"""Communication schemes: which tensors travel between ranks, and which stay."""
