"""Philox-4x32-10: a counter-based random number for every (seed, row, key), the same on every backend.

    u(seed, row, key) = first word of philox(key = seed, counter = (key, row_low, row_high, 0)) · 2⁻³²;   keep if u ≥ p

The dropout of a call is thus a function of its seed alone: forward, backward, CPU, GPU and the reference agree.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85


def words(seed: int, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The first output word, uint32, of each (row, key); rows and keys broadcast."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c0, rows = np.broadcast_arrays(np.asarray(keys, np.uint64), np.asarray(rows, np.uint64))
    c1, c2, c3 = rows & low, rows >> shift, np.zeros_like(c0)
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        a, b = c0 * np.uint64(ROUND_A), c2 * np.uint64(ROUND_B)
        c0, c1, c2, c3 = (b >> shift) ^ c1 ^ np.uint64(k0), b & low, (a >> shift) ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + KEY_A) & 0xFFFFFFFF, (k1 + KEY_B) & 0xFFFFFFFF
    return c0.astype(np.uint32)


def threshold(dropout_p: float) -> int:
    """A key is kept where its word is at least this."""
    return min(int(dropout_p * 2**32), 2**32 - 1)


def keep(seed: Tensor, shape: tuple[int, ...], dropout_p: float, first: int = 0, total: int | None = None) -> Tensor:
    """The kept entries, bool, of weights of the given shape (…, queries, keys).

    The queries may be a block of `total`, beginning at `first`: rows are counted in the whole.
    """
    queries = shape[-2]
    lead = np.arange(int(np.prod(shape[:-2])), dtype=np.uint64)[:, None] * np.uint64(total or queries)
    rows = (lead + np.arange(first, first + queries, dtype=np.uint64)).reshape(-1, 1)
    drawn = words(int(seed), rows, np.arange(shape[-1], dtype=np.uint64)[None, :])
    return torch.from_numpy(drawn >= threshold(dropout_p)).reshape(shape)
