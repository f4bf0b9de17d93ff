"""Reads and writes rows for the row kernels of every family."""

from __future__ import annotations

from regard._backends.cpu.jit.compile import prim, real, tile

CHUNK = 4096  # summed in the working precision; chunks are added up in float64
INF, NAN = float("inf"), float("nan")


def load(s, x, mask, masked):
    """x ← s where visible, else −inf; returns the maximum, NaN if any visible score is.

    Scores are scaled after the maximum is subtracted: a scaled score can overflow, and rounds by its own size.
    """
    top = -INF
    if masked:
        for j in range(x.size):
            y = prim.where(mask[j], s[j], -INF)
            x[j] = y
            top = prim.maximum(top, y)
    else:
        for j in range(x.size):
            y = s[j]
            x[j] = y
            top = prim.maximum(top, y)
    return top


def read(s, x, mask, masked):
    """(scores, their maximum): s itself, or x loaded from it under a mask."""
    if masked:
        top = load(s, x, mask, masked)
        return x, top
    top = -INF
    for j in range(s.size):
        top = prim.maximum(top, s[j])
    return s, top


def read_again(s, x, mask, masked):
    """The scores, where their maximum is known already."""
    if masked:
        load(s, x, mask, masked)
        return x
    return s


def read_gradient(dp, g, mask, masked):
    """dp where visible, else 0: what is hidden cannot leak, not even as NaN."""
    if not masked:
        return dp
    for j in range(g.size):
        g[j] = prim.where(mask[j], dp[j], 0.0)
    return g


def scale_row(row, high, low):
    """row ← (high + low)·row."""
    for j in range(row.size):
        row[j] = row[j] * high + row[j] * low


def fill(row, value):
    for j in range(row.size):
        row[j] = real(value)


def weightless_value(top):
    """What a row without a finite maximum consists of: 0 if it is empty (−inf), else NaN."""
    return 0.0 if top == -INF else NAN


def find_above(x, bound, found):
    """found ← the indices, as bits, where x exceeds bound; returns how many."""
    size, whole = 0, x.size // tile.lanes * tile.lanes
    for j in range(0, whole, tile.lanes):
        size = prim.compress_index(x, j, bound, found, size)
    for j in range(whole, x.size):
        found[size] = prim.from_bits(tile.index(j))
        size += 1 if x[j] > bound else 0
    return size
