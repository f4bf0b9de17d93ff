"""What the row kernels of every family share: reading a row, and writing one that is all the same."""

from __future__ import annotations

from regard.cpu._compile import real, tile, words

CHUNK = 4096  # summed in the working precision; chunks are added up in float64
INF, NAN = float("inf"), float("nan")


def load(s, x, scale, mask, masked):
    """x ← scale·s where visible, else −inf; returns the maximum, NaN if any visible score is."""
    top = -INF
    if masked:
        for j in range(x.size):
            y = tile.widen(s[j]) * scale if mask[j] else -INF
            x[j] = y
            top = words.maximum(top, y)
    else:
        for j in range(x.size):
            y = tile.widen(s[j]) * scale
            x[j] = y
            top = words.maximum(top, y)
    return top


def load_gradient(dp, g, mask, masked):
    """g ← dp where visible, else 0: what is hidden cannot leak, not even as NaN."""
    if masked:
        for j in range(g.size):
            g[j] = tile.widen(dp[j]) if mask[j] else 0.0
    else:
        for j in range(g.size):
            g[j] = tile.widen(dp[j])


def fill(row, value):
    for j in range(row.size):
        row[j] = tile.narrow(real(value))


def nothing_or_nan(top):
    """What a row without a finite maximum consists of: 0 if it is empty (−inf), else NaN."""
    return 0.0 if top == -INF else NAN
