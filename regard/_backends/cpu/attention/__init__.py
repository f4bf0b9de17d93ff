"""Fused attention on a CPU: blocks of queries, BLAS products, compiled row kernels."""
