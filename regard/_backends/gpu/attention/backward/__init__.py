"""Backward kernels: dq, dk, dv and the gradient of a bias."""
