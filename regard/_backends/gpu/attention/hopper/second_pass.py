"""Kernels that run after `forward_hopper`, on what it leaves: raw sums, and rows that lost precision or overflowed.

    forward_statistics   finishes the raw sums, one thread per row, and marks imprecise rows
    forward_imprecise    sums the imprecise rows again, without v
    forward_overflow     computes blocks with a row that overflowed the fixed shift, as `forward_online` does

A row is imprecise if a difference has lost its digits:

    Σu − 1         of a nearly one-hot row: small beside 1
    Σ(y − ȳ)²      small beside n·ȳ²

Then the sums exclude the row maximum and are centred on the first pass's mean c:

    H = log(t + w) − Σ'u·log u / (t + w),  w = Σ'u          Σ' is over the keys below the maximum, so w may be tiny
    var s = a²·(Σ(y − c)²/n − (Σ(y − c)/n)²)

A bias rounds the scores here otherwise than among the products there, by more than a small w bears, so that one sweep
more finds the maximum that these scores have. Z of a row that overflowed is NaN. A block without such a row ends at
once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, statistics, tiles
from regard._backends.gpu.attention.forward.online import find_shift, forward_block, join_sink, sum_below_max
from regard._backends.gpu.attention.hopper.spans import find_plane, find_row
from regard._backends.gpu.attention.statistics import Sums
from regard._backends.gpu.attention.tiles import HIDDEN, LN2, LOG2E

ROWS = 128  # of a program of `forward_statistics`
TIE = tl.constexpr(2.0**-21)  # two kernels may round q·k differently; this close to the maximum is a tie


class RowIndex(NamedTuple):
    """Batch, head and position of rows: what `online.join_sink` reads."""

    b: Any
    h: Any
    i: Any


@triton.jit
def forward_statistics(raw_sums, stats, rows, spans, opt, C: tl.constexpr, N: tl.constexpr, SAME: tl.constexpr):
    """Stores the statistics of N rows per program.

    raw_sums [8, rows]: max y, Z, Σu·|i − j|, Σy, Σy², Σu·log₂u, Σu², first y, in the shift of the maximum.
    For `forward_imprecise`, max y becomes +inf in precise rows, and Σy becomes Σy/n in the others, in its units of y:
    the SAME, or y times the scale.
    """
    F: tl.constexpr = C.F
    row = tl.program_id(0) * tl.cast(N, tl.int64) + tl.arange(0, N)
    rows = tiles.wide(rows)
    inside = row < rows
    i = (row % opt.queries).to(tl.int32)
    head = (row // opt.queries).to(tl.int32)
    index = RowIndex(head // opt.heads, head % opt.heads, i)
    if spans is None:
        first, last = tiles.window_range(i, opt, tiles.key_count(opt, index.b))
    else:
        where = find_row(spans, index.b, index.h, i)
        first = tl.load(where, mask=inside, other=0)
        last = tl.load(where + find_plane(spans), mask=inside, other=0)
    n = tl.maximum(last - first, 0).to(tl.float32)
    empty = n == 0.0
    a = tiles.row_factor(index.b, index.h, i, opt, tl.float32, C.LINEAR)
    b2 = a * LOG2E
    top = tl.load(raw_sums + row, mask=inside, other=0.0)
    z = tl.load(raw_sums + rows + row, mask=inside, other=1.0)
    zero = z * 0.0
    one = zero + 1.0
    distance, mean, m2, log_u, square, first_u = zero, zero, zero, zero, zero, zero
    shift = find_shift(top, b2, F)
    if C.NEED.distance:
        distance = tl.load(raw_sums + 2 * rows + row, mask=inside, other=0.0)
    if C.NEED.moments:
        mean = tl.load(raw_sums + 3 * rows + row, mask=inside, other=0.0)
        m2 = tl.load(raw_sums + 4 * rows + row, mask=inside, other=0.0)
    if C.NEED.log_u:
        log_u = tl.load(raw_sums + 5 * rows + row, mask=inside, other=0.0)
    if C.NEED.square:
        square = statistics.at_least_0(tl.load(raw_sums + 6 * rows + row, mask=inside, other=1.0) - 1.0)
    if C.NEED.first:
        first_u = tl.exp2((tl.load(raw_sums + 7 * rows + row, mask=inside, other=0.0) - top) * b2)
    su = z - 1.0
    r = Sums(
        top, shift, z, one, su, su, log_u, square, su, square, zero, distance, zero, zero, i, zero, zero, mean, m2
    )  # fmt: skip
    outer, rest, inverse, total = join_sink(r, index, inside, opt, C)
    lse = outer * LN2 + tl.log(total)
    statistics.finish(stats, row, inside, empty, r, a, n, one, one, one, one, first_u, rest, inverse, lse, opt, C, rows)
    imprecise = (empty == 0) & (su < 0.0156)
    if C.NEED.moments:
        mean_y = mean / tl.maximum(n, 1.0)
        spread = m2 - mean * mean_y
        precise = mean * mean_y <= 256.0 * spread
        imprecise = imprecise | ((precise == 0) & (empty == 0) & (z == z))
        if C.LINEAR and not SAME:
            mean_y = mean_y * tiles.number(opt.scale, tl.float32)
        tl.store(raw_sums + 3 * rows + row, mean_y, mask=inside & imprecise)
    if C.LINEAR and not SAME:
        top = top * tiles.number(opt.scale, tl.float32)
    tl.store(raw_sums + row, tl.where(imprecise, top, float("inf")), mask=inside)


@triton.jit
def has_bias(opt):
    """True if the call has a bias per key or by relative position."""
    return (opt.key_bias.ptr is not None) or (opt.relative.ptr is not None)


@triton.jit
def max_tile(top, scene, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Raises the maximum by one key tile, as `key_loop.sweep` calls it."""
    _, _, y, _, _ = key_loop.score_tile(scene, start, opt, C, EDGE)
    return tl.maximum(top, tiles.fold_max(y, C))


@triton.jit
def sum_tile(state, scene, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Adds one key tile to the sums, as `key_loop.sweep` calls it."""
    su, sl, sq, ties, mean, m2, top, pivot = state
    _, _, y, seen, _ = key_loop.score_tile(scene, start, opt, C, EDGE)
    if has_bias(opt):
        below = y != top[:, None]
    else:
        margin = TIE * tl.abs(top)
        if opt.cap is not None:
            margin += 8 * TIE * tiles.number(opt.cap, C.ACC)
        below = y < (top - margin)[:, None]
    su, sl, sq, ties = sum_below_max(su, sl, sq, ties, below, top, y, seen, scene, C)
    if C.NEED.moments:
        d = tl.where(seen, y - pivot[:, None], 0.0)
        mean += tiles.fold(d, C)
        m2 += tiles.fold(d * d, C)
    return su, sl, sq, ties, mean, m2, top, pivot


@triton.jit
def forward_imprecise(q, k, v, k_blocks, v_blocks, raw_sums, stats, rows, opt, C: tl.constexpr, BLOCKS: tl.constexpr):
    """Recomputes the imprecise rows of BLOCKS blocks of queries per program, which one load finds."""
    blocks = tl.cdiv(opt.queries, C.BM)
    start = tl.program_id(0) * BLOCKS
    end = tl.minimum(start + BLOCKS, rows // opt.queries * blocks)
    which = tl.arange(0, BLOCKS)
    _, tops = load_imprecise(start + which[:, None], end, raw_sums, opt, C)
    least = tl.min(tops, 1)
    if tl.min(least, 0) < float("inf"):
        for block in range(start, end):
            if tl.min(tl.where(which == block - start, least, float("inf")), 0) < float("inf"):
                row, top = load_imprecise(block, end, raw_sums, opt, C)
                recompute_block(block, row, top, q, k, v, k_blocks, v_blocks, raw_sums, stats, tiles.wide(rows), opt, C)


@triton.jit
def find_rows(block, end, opt, C: tl.constexpr):
    """(rows, those that exist) of a block of queries, or of a column of blocks, before block `end`."""
    blocks = tl.cdiv(opt.queries, C.BM)
    i = (blocks - 1 - block % blocks) * C.BM + tl.arange(0, C.BM)  # in the order of key_loop.load_query_block_at
    return block // blocks * tiles.wide(opt.queries) + i, i < tl.where(block < end, opt.queries, 0)


@triton.jit
def load_imprecise(block, end, raw_sums, opt, C: tl.constexpr):
    """(rows, max y or +inf if precise) of a block of queries, or of a column of blocks."""
    row, exists = find_rows(block, end, opt, C)
    return row, tl.load(raw_sums + row, mask=exists, other=float("inf"))


@triton.jit
def recompute_block(block, row, top, q, k, v, k_blocks, v_blocks, raw_sums, stats, rows, opt, C: tl.constexpr):
    """Sums one block of queries again and stores the statistics of its imprecise rows."""
    imprecise = top < float("inf")
    z = tl.load(raw_sums + rows + row, mask=imprecise, other=1.0)
    distance = tl.load(raw_sums + 2 * rows + row, mask=imprecise, other=0.0)
    pivot = tl.load(raw_sums + 3 * rows + row, mask=imprecise, other=0.0)
    top = tl.where(imprecise, top, 0.0)
    scene, i0 = key_loop.load_query_block_at(block, q, k, v, k_blocks, v_blocks, opt, C)
    if has_bias(opt):
        top = key_loop.sweep(tiles.full(C.BM, HIDDEN, C.ACC), scene, i0, opt, max_tile, C)
    zero = tiles.zeros(C.BM, C.LANES, C.ACC)
    state = (zero, zero, zero, zero, zero, zero, top, pivot)
    su2, sl2, sq2, ties2, mean2, m22, _, _ = key_loop.sweep(state, scene, i0, opt, sum_tile, C)
    su, sq, none = tl.sum(su2, 1), tl.sum(sq2, 1), z * 0.0
    one = none + 1.0
    b2 = scene.a * LOG2E
    r = Sums(
        top, top * b2, z, tl.sum(ties2, 1), su, su, tl.sum(sl2, 1), sq, su, sq, none, distance, none, none, scene.i,
        none, pivot, tl.sum(mean2, 1), tl.sum(m22, 1),
    )  # fmt: skip
    shift, rest, inverse, total = join_sink(r, scene, imprecise, opt, C)
    lse = shift * LN2 + tl.log(total)
    n = (scene.last - scene.first).to(C.ACC)
    first_u = tl.exp2(statistics.first_scores(scene, opt, C) * b2 - r.shift)
    statistics.finish(
        stats, row, imprecise, scene.i < 0, r, scene.a, n, one, one, one, one, first_u, rest, inverse, lse, opt, C, rows
    )


@triton.jit
def forward_overflow(
    q, k, v, k_blocks, v_blocks, o, shifts, sums, stats, rows, opt, C: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Recomputes the blocks of queries with an overflow, BLOCKS blocks per program, which one load finds."""
    start = tl.program_id(0) * BLOCKS
    end = tl.minimum(start + BLOCKS, rows // opt.queries * tl.cdiv(opt.queries, C.BM))
    if has_overflow(start + tl.arange(0, BLOCKS)[:, None], end, sums, opt, C):
        for block in range(start, end):
            if has_overflow(block, end, sums, opt, C):
                forward_block(block, q, k, v, k_blocks, v_blocks, o, shifts, sums, stats, opt, C, tiles.wide(rows))


@triton.jit
def has_overflow(block, end, sums, opt, C: tl.constexpr):
    """True if Z of any row is NaN, in a block of queries or in a column of blocks."""
    row, exists = find_rows(block, end, opt, C)
    z = tl.load(sums + row, mask=exists, other=0.0)
    return tl.max(tl.ravel(tl.where(z == z, 0, 1)), 0) > 0
