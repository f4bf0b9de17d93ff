"""Forward of few queries over many keys: programs share the keys, and their partial rows are merged.

    forward_split   the rows of one key head (its query heads times the queries) over one range of keys: Σu·v and sums
    forward_merge   one row: its parts rescaled to their common shift and added; o, row state, statistics

Such a call costs the reading of k and v, so every sum excludes the maximum, softmax's too: no key is read twice,
however sharp a row is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, scores, statistics, tiles, visibility
from regard._backends.gpu.attention.forward.decode_parts import FIELDS, load_parts, merge_moments, store_part
from regard._backends.gpu.attention.forward.online import (
    find_shift,
    initial_shift,
    join_sink,
    rescale_sums,
    slopes,
    terms,
)
from regard._backends.gpu.attention.limits import find_option
from regard._backends.gpu.attention.statistics import Sums
from regard._backends.gpu.attention.tiles import LN2, LOG2E, Config
from regard._backends.gpu.launcher import launch
from regard._core.problem import Problem

QUERIES = 16  # at most
KEYS = 2048  # at least
PROGRAMS = 2048  # to split the keys over: eight waves of two on each SM of an H200
SHORTEST = 512  # keys of one part
PARTS = 128


def supports(p: Problem) -> str | None:
    """Say why a call is not one of few queries over many keys, or None."""
    if p.q.shape[2] > QUERIES:
        return f"{p.q.shape[2]} queries ({QUERIES} at most)"
    if p.k.shape[2] < KEYS:
        return f"{p.k.shape[2]} keys ({KEYS} at least)"
    if p.first_query or p.first_key or p.queries is not None:
        return "a part of a sequence"
    return find_option(p, "bias", "mask", "relative")


def rows_per_program(p: Problem) -> int:
    """Return the rows of a program: the query heads of a key head times the queries, 16 to 64."""
    return min(max(triton.next_power_of_2(p.q.shape[1] // p.k.shape[1] * p.q.shape[2]), 16), 64)


def forward(p: Problem, inputs: tuple, blocks: tuple, outputs: tuple, opt, C: Config, how: dict) -> None:
    """Fill `outputs`, (view of o, shift, z, stats). inputs: views of q, k, v; blocks: descriptors of k and v."""
    (b, h, m, _), (_, g, n, _) = p.q.shape, p.k.shape
    rows = b * h * m
    heads = b * g * triton.cdiv(h // g * m, C.BM)
    parts = max(1, min(triton.cdiv(PROGRAMS, heads), n // SHORTEST, PARTS))
    length = triton.cdiv(triton.cdiv(n, parts), C.BN) * C.BN
    parts = triton.cdiv(n, length)
    like = dict(dtype=p.accumulator, device=p.q.device)
    part_o = torch.empty(parts, rows, C.E, **like)
    sums = torch.empty(FIELDS, parts, rows, **like)
    launch(None, forward_split, heads * parts, (*inputs, *blocks, part_o, sums, opt, length, parts), (C,), **how)
    padded = triton.next_power_of_2(parts)
    row = C._replace(BM=1, LANES=1)
    arguments = *inputs[:2], part_o, sums, *outputs, opt, length, parts
    launch(None, forward_merge, rows, arguments, (padded, row), num_warps=4)


@triton.jit
def forward_split(q, k, v, k_blocks, v_blocks, part_o, sums, opt, length, parts, C: tl.constexpr):
    """Sum the rows of one key head over one range of keys."""
    F: tl.constexpr = C.F
    many = opt.group * opt.queries
    blocks = tl.cdiv(many, C.BM)
    pid = tl.program_id(0)
    part = pid // blocks % parts
    heads = opt.heads // opt.group
    g = pid // blocks // parts % heads
    b = pid // blocks // parts // heads
    packed = pid % blocks * C.BM + tl.arange(0, C.BM)  # [M]: the query heads of g, and within a head the queries
    inside = packed < many
    h = g * opt.group + tl.where(inside, packed // opt.queries, 0)
    i = tl.where(inside, packed % opt.queries, opt.queries)
    n = tiles.key_count(opt, b)
    lo = part * length
    hi = tl.minimum(lo + length, n)
    first, last = visibility.visible_range(b, h, i, opt, n)
    if C.RAGGED:
        some = inside & (first < last)
        lowest = tl.min(tl.where(some, first, opt.keys), 0)
        highest = tl.max(tl.where(some, last, 0), 0)
        latest = tl.max(tl.where(inside, first, 0), 0)
        least = tl.min(tl.where(inside, last, opt.keys), 0)
    else:
        lowest, least = tiles.window_range(0, opt, n)
        latest, highest = tiles.window_range(opt.queries - 1, opt, n)
    lowest = tl.maximum(lowest, lo)
    highest = tl.minimum(highest, hi)
    d = tl.arange(0, C.BD)
    where = q.ptr + tiles.wide(b) * q.stride[0] + tiles.wide(h)[:, None] * q.stride[1]
    where += tiles.wide(i)[:, None] * q.stride[2] + d[None, :] * q.stride[3]
    queries = tl.load(where, mask=inside[:, None] & (d[None, :] < C.D), other=0.0)  # [M, D]
    a = tiles.row_factor(b, h, i, opt, C.ACC, C.LINEAR)
    block = key_loop.QueryBlock(
        queries, k, v, k_blocks, v_blocks, b, g * opt.group, h, 0, i, first, last, lowest, highest, latest, least,
        visibility.positions(b, h, i, opt), scores.load_row_bias(b, h, i, opt, C.ACC), a,
        tiles.load_theta(b, h, i, opt, C.ACC), 0,
    )  # fmt: skip
    state = tiles.zeros(C.BM, C.BE, C.ACC), statistics.empty_sums(initial_shift(F, C), C)
    begin = lowest // C.BN * C.BN
    inner = tl.cdiv(tl.maximum(latest, lo), C.BN) * C.BN
    outer = tl.minimum(least, hi) // C.BN * C.BN
    if (opt.left is not None) or C.RAGGED:
        for start in tl.range(begin, tl.minimum(inner, highest), C.BN):
            state = add_tile(state, block, start, opt, C, True)
    for start in tl.range(inner, outer, C.BN):
        state = add_tile(state, block, start, opt, C, False)
    for start in tl.range(tl.maximum(inner, outer), highest, C.BN):
        state = add_tile(state, block, start, opt, C, True)
    acc, r = state
    r = statistics.sum_lanes(r)
    z = r.u + r.ties if F.exponential and C.NEED.shares else r.z
    row = (tiles.wide(b) * opt.heads + h) * opt.queries + i
    rows = tl.num_programs(0) // (heads * blocks * parts) * tiles.wide(opt.heads) * opt.queries
    e = tl.arange(0, C.BE)
    place = (part * rows + row)[:, None] * C.E + e[None, :]
    tl.store(part_o + place, acc, mask=inside[:, None] & (e[None, :] < C.E))
    sums += part * rows + row
    store_part(sums, parts * rows, r, z, inside, C)


@triton.jit
def add_tile(state, block, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Add one key block; the sums are rescaled only where a maximum rose, which is seldom after the first blocks."""
    acc, r = state
    F: tl.constexpr = C.F
    NEED: tl.constexpr = C.NEED
    a, theta = block.a, block.theta
    b2 = a * LOG2E
    _, _, y, visible, j = key_loop.score_tile(block, start, opt, C, EDGE)  # [M, N]
    if NEED.top or (F.family == "ratio" and F.shift != "none"):
        top = tl.maximum(r.top, tiles.fold_max(y, C))
        if tl.max(tl.where(top > r.top, 1, 0), 0) > 0:
            shift = find_shift(top, b2, F)
            if F.family == "ratio":
                acc = acc * tl.exp2(r.shift - shift)[:, None]
            r = rescale_sums(r, top, shift, a, b2, theta, F)
    u, v, power = terms(y, a[:, None], b2[:, None], r.shift[:, None], tiles.column(theta, opt), F)
    u = tl.where(visible, u, 0.0)
    z, ties, su, sv, sl, sq, ss, sx = r.z, r.ties, r.u, r.v, r.log_u, r.square, r.slope, r.cross
    se, far = r.lse, r.distance
    if not (F.exponential and NEED.shares):  # there Z is Σ' u and the maximum's ties
        z += tiles.fold(tl.where(visible, v, 0.0), C)
    if NEED.shares:
        below = y != r.top[:, None]
        under = tl.where(below, u, 0.0)
        su += tiles.fold(under, C)
        ties += tiles.fold(tl.where(visible, tl.where(below, 0.0, 1.0), 0.0).to(C.ACC), C)
        if NEED.log_u:
            log_u = tl.where(visible, power, 0.0) if F.exponential else statistics.log2_or_0(under)
            sl += tiles.fold(under * log_u, C)
        if NEED.square:
            sq += tiles.fold(statistics.square(under, F), C)
        if NEED.slope:
            d, cross = slopes(y, a[:, None], b2[:, None], r.shift[:, None], u, tiles.column(theta, opt), F)
            sv += tiles.fold(tl.where(visible & below, v, 0.0), C)
            ss += tiles.fold(tl.where(visible & below, d, 0.0), C)
            sx += tiles.fold(tl.where(visible & below, cross, 0.0), C)
        if NEED.lse:
            se += tiles.fold(tl.where(visible & below, tl.exp2((y - r.top[:, None]) * b2[:, None]), 0.0), C)
        if NEED.distance:
            far += statistics.sum_distances(u, block.position, j, start, su, False, C)
    weighs = statistics.find_support(u, y, a, visible, C)
    support, n, first, first_y, pivot, mean, m2 = statistics.update_counts(r, y, visible, j, r.top, weighs, C)
    r = Sums(
        r.top, r.shift, z, ties, su, sv, sl, sq, ss, sx, se, far, support, n, first, first_y, pivot, mean, m2
    )  # fmt: skip
    values = key_loop.load_values(block, start, visible, opt, C, EDGE)
    if (F.shift == "none") and (values.dtype == tl.float16):  # u may exceed what float16 holds
        acc = tl.dot(u, values.to(tl.float32), acc, input_precision="tf32x3", out_dtype=C.ACC)
    else:
        acc = tiles.dot(u.to(values.dtype), values, acc, C)
    return acc, r


@triton.jit
def forward_merge(q, k, part_o, sums, o, shifts, zs, stats, opt, length, parts, PARTS: tl.constexpr, C: tl.constexpr):
    """Merge the parts of one row and finish it."""
    F: tl.constexpr = C.F
    NEED: tl.constexpr = C.NEED
    row = tiles.wide(tl.program_id(0))
    rows = tiles.wide(tl.num_programs(0))
    i0 = (row % opt.queries).to(tl.int32)
    h = (row // opt.queries % opt.heads).to(tl.int32)
    b = (row // opt.queries // opt.heads).to(tl.int32)
    i = i0 + tl.arange(0, 1)  # [1]
    first, last = visibility.visible_range(b, h, i, opt, tiles.key_count(opt, b))
    a = tiles.row_factor(b, h, i, opt, C.ACC, C.LINEAR)
    b2 = a * LOG2E
    theta = tiles.load_theta(b, h, i, opt, C.ACC)
    queries = tiles.load_block(q, b, h, i0, 0, opt.queries, 1, C.D, C.BD, False)
    bias = scores.load_row_bias(b, h, i, opt, C.ACC)
    position = visibility.positions(b, h, i, opt)
    block = key_loop.QueryBlock(
        queries, k, k, 0, 0, b, h, h, 0, i, first, last, 0, 0, 0, 0, position, bias, a, theta, 0
    )  # fmt: skip
    inside = i < opt.queries

    part = tl.arange(0, PARTS)
    there = part < parts
    r = load_parts(sums + part * rows + row, parts * rows, there, C)
    top = tl.max(r.top, 0) + tl.zeros([1], C.ACC)
    shift = find_shift(top, b2, F)
    e = tl.arange(0, C.BE)
    place = (part * rows + row)[:, None] * C.E + e[None, :]
    acc = tl.load(part_o + place, mask=there[:, None] & (e[None, :] < C.E), other=0.0)  # [PARTS, E]
    if F.family == "ratio":
        acc = acc * tl.exp2(r.shift - shift)[:, None]
    acc = tl.sum(acc, 0)[None, :]
    pivot, spread = merge_moments(r, part, length, first, last, C)
    r = rescale_sums(r, top, shift, a, b2, theta, F)
    r = Sums(
        top, shift, tl.sum(r.z, 0), tl.sum(r.ties, 0), tl.sum(r.u, 0), tl.sum(r.v, 0), tl.sum(r.log_u, 0),
        tl.sum(r.square, 0), tl.sum(r.slope, 0), tl.sum(r.cross, 0), tl.sum(r.lse, 0), tl.sum(r.distance, 0),
        tl.sum(r.support, 0), tl.sum(r.n, 0), first, a, pivot, pivot * 0.0, spread,
    )  # fmt: skip

    visible_keys = tl.maximum(last - first, 0).to(C.ACC)
    empty = visible_keys == 0.0
    shift, rest, inverse, z = join_sink(r, block, inside, opt, C)
    inverse = tl.where(empty, 0.0, inverse)
    tiles.store_block(o, b, h, i0, opt.queries, tl.where(empty[:, None], 0.0, acc * inverse[:, None]), 1, C.E, C.BE)
    natural = shift * LN2
    place = row + tl.arange(0, 1)
    tl.store(shifts + place, tl.where(empty, 0.0, natural))
    tl.store(zs + place, tl.where(empty, 0.0, z * tl.exp2(shift - natural * LOG2E)))  # as forward_online has it
    if NEED.top:
        u1, v1, _ = terms(top, a, b2, r.shift, theta, F)
        d1, x1 = slopes(top, a, b2, r.shift, u1, theta, F)
        lse = top * a + tl.log(r.ties + r.lse)
        if F.exponential:  # u′ = v′ = u
            lse = natural + tl.log(z)
            r = Sums(
                r.top, r.shift, r.z, r.ties, r.u, r.u, r.log_u, r.square, r.u, r.square, r.lse, r.distance, r.support,
                r.n, r.first, r.first_y, r.pivot, r.mean, r.m2,
            )  # fmt: skip
        first_u = r.z * 0.0
        if NEED.first:
            first_u, _, _ = terms(statistics.first_scores(block, opt, C), a, b2, r.shift, theta, F)
        statistics.finish(
            stats, place, inside, empty, r, a, visible_keys, u1, v1, d1, x1, first_u, rest, inverse, lse, opt, C
        )
