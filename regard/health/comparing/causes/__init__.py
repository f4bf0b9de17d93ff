"""Causes of a difference, each tried: applied to A's tensors, it must give B's within rounding."""
