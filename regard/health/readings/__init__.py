"""Per-head readings: moments and histograms that merge over batches and ranks."""
