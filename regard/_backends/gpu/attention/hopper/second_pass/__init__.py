"""Kernels that run after `forward_hopper`: statistics, imprecise rows, rows that overflowed."""
