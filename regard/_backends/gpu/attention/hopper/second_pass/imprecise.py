"""`forward_imprecise`: second pass for rows whose statistics lost precision in `forward_hopper`.

Sums exclude the row maximum and are centred on the first pass's mean c:

    H = log(t + w) − Σ'u·log u / (t + w),  w = Σ'u          Σ' is over the keys below the maximum, so w may be tiny
    var s = a²·(Σ(y − c)²/n − (Σ(y − c)/n)²)

A block without such a row ends at once. A bias rounds the scores here otherwise than among the products there, by more
than a small w bears, so that one sweep more finds the maximum that these scores have.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, statistics, tiles
from regard._backends.gpu.attention.forward.online import join_sink, sum_below_max
from regard._backends.gpu.attention.statistics import Sums
from regard._backends.gpu.attention.tiles import HIDDEN, LN2, LOG2E

TIE = tl.constexpr(2.0**-21)  # two kernels may round q·k differently; this close to the maximum is a tie


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
def load_imprecise(block, end, raw_sums, opt, C: tl.constexpr):
    """(rows, max y or +inf if precise) of a block of queries, or of a column of blocks."""
    blocks = tl.cdiv(opt.queries, C.BM)
    i = (blocks - 1 - block % blocks) * C.BM + tl.arange(0, C.BM)  # in the order of key_loop.load_query_block_at
    row = block // blocks * tiles.wide(opt.queries) + i
    return row, tl.load(raw_sums + row, mask=i < tl.where(block < end, opt.queries, 0), other=float("inf"))


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
