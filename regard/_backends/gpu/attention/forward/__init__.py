"""Forward kernels that run on every GPU: one sweep over the keys, and decoding. `launch` starts all of them."""
