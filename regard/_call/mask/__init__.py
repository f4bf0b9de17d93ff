"""Masks and biases of one call: their parts, the `attn_mask` argument, packed batches.

A new kind of mask is a part in `parts.py` and a class method in `mask.py`. GPU kernels read the interval in
`_backends/gpu/attention/visibility.py` (Triton) and `hopper/spans.py` (Gluon).
"""
