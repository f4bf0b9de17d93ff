"""Row kernels on a CPU, one module per family of normalisers."""
