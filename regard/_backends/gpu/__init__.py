"""Triton kernels: one body per family, filled with a normaliser's tile functions. Run on CUDA, or interpreted."""
