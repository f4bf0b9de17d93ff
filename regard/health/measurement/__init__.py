"""Measures a captured call: statistics, fidelity of the rebuilt output, norms of q, k and v."""
