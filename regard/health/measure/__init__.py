"""Measures attention calls: runs the batches, reads statistics and norms of each call, and merges them per head."""
