"""The two families of fused kernels: numba on a CPU, Triton and Gluon on a GPU."""
