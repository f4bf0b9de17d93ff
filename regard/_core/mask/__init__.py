"""Masks and biases of one call: their parts, the `attn_mask` argument, packed batches."""
