"""Row kernels on a GPU: p = normaliser(scale · s) and its backward."""
