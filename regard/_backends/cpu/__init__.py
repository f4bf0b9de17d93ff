"""The CPU path: kernels written as templates, compiled by numba for each normaliser, kept on disk."""
