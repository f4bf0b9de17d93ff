"""Row kernels for Hopper that keep a whole row in shared memory and read it once."""
