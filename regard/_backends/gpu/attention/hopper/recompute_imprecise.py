"""Rows that `forward_hopper` calls vague, summed again: without their maximum, and about their mean.

    H = log(t + w) − Σ'u·log u / (t + w),  w = Σ'u          from the lesser keys alone, so that w may be tiny
    var s = a²·(Σ(y − c)²/n − (Σ(y − c)/n)²)                 with c the mean that the first pass found

A block without such a row ends at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, statistics, tiles
from regard._backends.gpu.attention.online import join_sink, sum_below_max
from regard._backends.gpu.attention.statistics import Sums
from regard._backends.gpu.attention.tiles import LN2, LOG2E

NEAR = tl.constexpr(2.0**-21)  # two kernels may round q·k differently: this close to the maximum is a tie


@triton.jit
def tile(state, scene, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    su, sl, sq, ties, mean, m2, top, pivot = state
    _, _, y, seen, _ = key_loop.score_tile(scene, start, opt, C, EDGE)
    below = y < (top - NEAR * tl.abs(top))[:, None]
    su, sl, sq, ties = sum_below_max(su, sl, sq, ties, below, top, y, seen, scene, C)
    if C.NEED.moments:
        d = tl.where(seen, y - pivot[:, None], 0.0)
        mean += tiles.fold(d, C)
        m2 += tiles.fold(d * d, C)
    return su, sl, sq, ties, mean, m2, top, pivot


@triton.jit
def forward_lesser(q, k, v, k_blocks, v_blocks, rough, stats, rows, opt, C: tl.constexpr, MANY: tl.constexpr):
    """MANY blocks of queries to a program: by one load for all of them it finds where there is something to do."""
    blocks = tl.cdiv(opt.queries, C.BM)
    start = tl.program_id(0) * MANY
    end = tl.minimum(start + MANY, rows // opt.queries * blocks)
    place = tl.arange(0, MANY)
    _, tops = rough_of(start + place[:, None], end, rough, opt, C)
    least = tl.min(tops, 1)
    if tl.min(least, 0) < float("inf"):
        for block in range(start, end):
            if tl.min(tl.where(place == block - start, least, float("inf")), 0) < float("inf"):
                row, top = rough_of(block, end, rough, opt, C)
                look_again(block, row, top, q, k, v, k_blocks, v_blocks, rough, stats, tiles.wide(rows), opt, C)


@triton.jit
def rough_of(block, end, rough, opt, C: tl.constexpr):
    """The rows of a block, or of a column of them, and their first numbers: the maximum, or +inf if all is well."""
    blocks = tl.cdiv(opt.queries, C.BM)
    i = (blocks - 1 - block % blocks) * C.BM + tl.arange(0, C.BM)  # as sweeps.scene_at counts
    row = block // blocks * tiles.wide(opt.queries) + i
    return row, tl.load(rough + row, mask=i < tl.where(block < end, opt.queries, 0), other=float("inf"))


@triton.jit
def look_again(block, row, top, q, k, v, k_blocks, v_blocks, rough, stats, rows, opt, C: tl.constexpr):
    vague = top < float("inf")
    z = tl.load(rough + rows + row, mask=vague, other=1.0)
    distance = tl.load(rough + 2 * rows + row, mask=vague, other=0.0)
    pivot = tl.load(rough + 3 * rows + row, mask=vague, other=0.0)
    top = tl.where(vague, top, 0.0)
    scene, i0 = key_loop.load_query_block_at(block, q, k, v, k_blocks, v_blocks, opt, C)
    zero = tiles.zeros(C.BM, C.LANES, C.ACC)
    state = (zero, zero, zero, zero, zero, zero, top, pivot)
    su2, sl2, sq2, ties2, mean2, m22, _, _ = key_loop.sweep(state, scene, i0, opt, tile, C)
    su, sq, none = tl.sum(su2, 1), tl.sum(sq2, 1), z * 0.0
    one = none + 1.0
    b2 = scene.a * LOG2E
    r = Sums(
        top, top * b2, z, tl.sum(ties2, 1), su, su, tl.sum(sl2, 1), sq, su, sq, none, distance, none, none, scene.i,
        none, pivot, tl.sum(mean2, 1), tl.sum(m22, 1),
    )  # fmt: skip
    shift, rest, inverse, total = join_sink(r, scene, vague, opt, C)
    lse = shift * LN2 + tl.log(total)
    n = (scene.last - scene.first).to(C.ACC)
    first_u = tl.exp2(statistics.first_scores(scene, opt, C) * b2 - r.shift)
    statistics.finish(
        stats, row, vague, scene.i < 0, r, scene.a, n, one, one, one, one, first_u, rest, inverse, lse, opt, C, rows
    )
