"""What the row kernels of every family share: reading a row, and writing one that is all the same."""

from __future__ import annotations

import torch

from regard._backends.cpu.jit.compile import real, tile, words

CHUNK = 4096  # summed in the working precision; chunks are added up in float64
INF, NAN = float("inf"), float("nan")


def load(s, x, mask, masked):
    """x ← s where visible, else −inf; returns the maximum, NaN if any visible score is.

    Scores are scaled after the maximum is subtracted: a scaled score can overflow, and rounds by its own size.
    """
    top = -INF
    if masked:
        for j in range(x.size):
            y = words.where(mask[j], tile.widen(s[j]), -INF)
            x[j] = y
            top = words.maximum(top, y)
    else:
        for j in range(x.size):
            y = tile.widen(s[j])
            x[j] = y
            top = words.maximum(top, y)
    return top


def read_loaded(s, x, mask, masked):
    """(scores, their maximum), not yet scaled."""
    top = load(s, x, mask, masked)
    return x, top


def read_direct(s, x, mask, masked):
    """The same without a copy, where the scores are stored in the working precision and all visible."""
    if masked:
        top = load(s, x, mask, masked)
        return x, top
    top = -INF
    for j in range(s.size):
        top = words.maximum(top, s[j])
    return s, top


def again_loaded(s, x, mask, masked):
    """The scores, where their maximum is known already."""
    load(s, x, mask, masked)
    return x


def again_direct(s, x, mask, masked):
    if masked:
        load(s, x, mask, masked)
        return x
    return s


def read_gradient_loaded(dp, g, mask, masked):
    load_gradient(dp, g, mask, masked)
    return g


def read_gradient_direct(dp, g, mask, masked):
    if masked:
        load_gradient(dp, g, mask, masked)
        return g
    return dp


def work_loaded(row, x):
    """Where intermediate values may lie: beside the result row, or in it."""
    return x


def work_direct(row, x):
    return row


def scale_loaded(row, x, high, low):
    """row ← (high + low)·x."""
    for j in range(row.size):
        row[j] = tile.narrow(x[j] * high + x[j] * low)


def scale_direct(row, x, high, low):
    for j in range(row.size):
        row[j] = row[j] * high + row[j] * low


def load_gradient(dp, g, mask, masked):
    """g ← dp where visible, else 0: what is hidden cannot leak, not even as NaN."""
    if masked:
        for j in range(g.size):
            g[j] = words.where(mask[j], tile.widen(dp[j]), 0.0)
    else:
        for j in range(g.size):
            g[j] = tile.widen(dp[j])


def fill(row, value):
    for j in range(row.size):
        row[j] = tile.narrow(real(value))


def nothing_or_nan(top):
    """What a row without a finite maximum consists of: 0 if it is empty (−inf), else NaN."""
    return 0.0 if top == -INF else NAN


def positions(x, bound, found):
    """Where x exceeds bound, as `bits` in `found`; returns how many."""
    size, whole = 0, x.size // tile.lanes * tile.lanes
    for j in range(0, whole, tile.lanes):
        size = words.compress_index(x, j, bound, found, size)
    for j in range(whole, x.size):
        found[size] = words.from_bits(tile.index(j))
        size += 1 if x[j] > bound else 0
    return size


def storage_tiles(dtype):
    """How rows of a dtype are read and written."""
    storage = {torch.bfloat16: "bfloat16", torch.float16: "float16"}.get(dtype)
    if storage is None:
        return dict(
            widen="same",
            narrow="same",
            read=read_direct,
            again=again_direct,
            read_gradient=read_gradient_direct,
            work=work_direct,
            scale=scale_direct,
        )
    return dict(
        widen=f"widen_{storage}",
        narrow=f"narrow_{storage}",
        read=read_loaded,
        again=again_loaded,
        read_gradient=read_gradient_loaded,
        work=work_loaded,
        scale=scale_loaded,
    )
