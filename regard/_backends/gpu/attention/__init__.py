"""Fused attention on a GPU: forward, statistics, decoding and partial rows."""
