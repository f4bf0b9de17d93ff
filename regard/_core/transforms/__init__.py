"""Fused attention under torch.func and forward mode: tangents, gradients, and derivatives of both."""
