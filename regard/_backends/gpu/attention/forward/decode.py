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
from regard._backends.gpu.attention.forward.online import add_tile, finish_block, initial_shift, rescale
from regard._backends.gpu.attention.limits import find_option
from regard._backends.gpu.attention.statistics import Sums
from regard._backends.gpu.attention.tiles import HIDDEN, LOG2E, Config
from regard._backends.gpu.launcher import launch
from regard._call.problem import Problem

QUERIES = 32  # at most
KEYS = 2048  # at least
PROGRAMS = 2048  # to split the keys over: eight waves of two on each SM of an H200
SHORTEST = 512  # keys of one part
PARTS = 128
FIELDS = tl.constexpr(len(Sums._fields))  # numbers that a part keeps of a row


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
    sums = torch.empty(FIELDS.value, parts, rows, **like)
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
    lowest, earliest, latest, highest = visibility.block_range(first, last, b, g, 0, i, opt, n, C)
    d = tl.arange(0, C.BD)
    where = q.ptr + tiles.wide(b) * q.stride[0] + tiles.wide(h)[:, None] * q.stride[1]
    where += tiles.wide(i)[:, None] * q.stride[2] + d[None, :] * q.stride[3]
    queries = tl.load(where, mask=inside[:, None] & (d[None, :] < C.D), other=0.0)  # [M, D]
    a = tiles.row_factor(b, h, i, opt, C.ACC, C.LINEAR)
    block = key_loop.QueryBlock(
        queries, k, v, k_blocks, v_blocks, b, g * opt.group, h, 0, i, first, last,
        tl.maximum(lowest, lo), tl.minimum(highest, hi), tl.maximum(earliest, lo), tl.minimum(latest, hi),
        visibility.positions(b, h, i, opt), scores.load_row_bias(b, h, i, opt, C.ACC), a,
        tiles.load_theta(b, h, i, opt, C.ACC), 0,
    )  # fmt: skip
    state = tiles.zeros(C.BM, C.BE, C.ACC), statistics.empty_sums(initial_shift(F, C), C)
    acc, r = key_loop.sweep(state, block, 0, opt, add_tile, C)
    r = statistics.sum_lanes(r)
    if F.exponential and C.NEED.shares:
        r = Sums(
            r.top, r.shift, r.u + r.ties, r.ties, r.u, r.v, r.log_u, r.square, r.slope, r.cross, r.lse, r.distance,
            r.support, r.n, r.first, r.first_y, r.pivot, r.mean, r.m2,
        )  # fmt: skip
    row = (tiles.wide(b) * opt.heads + h) * opt.queries + i
    rows = tl.num_programs(0) // (heads * blocks * parts) * tiles.wide(opt.heads) * opt.queries
    e = tl.arange(0, C.BE)
    place = (part * rows + row)[:, None] * C.E + e[None, :]
    tl.store(part_o + place, acc, mask=inside[:, None] & (e[None, :] < C.E))
    sums += part * rows + row
    store_part(sums, parts * rows, r, inside, C)


@triton.jit
def forward_merge(q, k, part_o, sums, o, shifts, zs, stats, opt, length, parts, PARTS: tl.constexpr, C: tl.constexpr):
    """Merge the parts of one row and finish it."""
    F: tl.constexpr = C.F
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
    part = tl.arange(0, PARTS)
    there = part < parts
    r = load_parts(sums + part * rows + row, parts * rows, there, C)
    e = tl.arange(0, C.BE)
    place = (part * rows + row)[:, None] * C.E + e[None, :]
    acc = tl.load(part_o + place, mask=there[:, None] & (e[None, :] < C.E), other=0.0)  # [PARTS, E]
    pivot, spread = merge_moments(r, part, length, first, last, C)
    top = tl.max(r.top, 0) + tl.zeros([1], C.ACC)
    acc, r = rescale(acc, r, top, a, b2, theta, C)
    su, sv, square = tl.sum(r.u, 0), tl.sum(r.v, 0), tl.sum(r.square, 0)
    slope, cross = tl.sum(r.slope, 0), tl.sum(r.cross, 0)
    if F.exponential:  # u′ = v′ = u
        sv, slope, cross = su, su, square
    r = Sums(
        top, r.shift, tl.sum(r.z, 0), tl.sum(r.ties, 0), su, sv, tl.sum(r.log_u, 0), square, slope, cross,
        tl.sum(r.lse, 0), tl.sum(r.distance, 0), tl.sum(r.support, 0), tl.sum(r.n, 0), first, a, pivot, pivot * 0.0,
        spread,
    )  # fmt: skip
    finish_block(tl.sum(acc, 0)[None, :], r, block, i0, o, shifts, zs, stats, opt, C)


@triton.constexpr_function
def list_wanted(NEED):
    """Which of the `Sums` a part stores, in their order."""
    shares, slope, moments = NEED.shares, NEED.slope, NEED.moments
    weights = shares, shares, slope, NEED.log_u, NEED.square, slope, slope, NEED.lse, NEED.distance, NEED.support
    return True, True, True, *weights, False, False, False, moments, moments, moments


@triton.jit
def store_part(where, step, r, inside, C: tl.constexpr):
    """Store the sums of a part, `step` numbers apart, as `load_parts` reads them."""
    NEED: tl.constexpr = C.NEED
    WANTED: tl.constexpr = list_wanted(NEED)
    for at in tl.static_range(FIELDS):
        if WANTED[at]:
            tl.store(where + at * step, r[at], mask=inside)


@triton.jit
def load_parts(where, step, there, C: tl.constexpr):
    """Load the sums of every part of a row: top and shift [PARTS], the others [PARTS, 1]; 0 where nobody asked."""
    NEED: tl.constexpr = C.NEED
    WANTED: tl.constexpr = list_wanted(NEED)
    hidden: tl.constexpr = HIDDEN
    found = tl.load(where, mask=there, other=hidden), tl.load(where + step, mask=there, other=hidden)
    for at in tl.static_range(2, FIELDS):
        if WANTED[at]:
            found = found + (tl.load(where + at * step, mask=there, other=0.0)[:, None],)  # noqa: RUF005
        else:
            found = found + (tl.zeros([where.shape[0], 1], where.dtype.element_ty),)  # noqa: RUF005
    return Sums(*found)  # type: ignore[call-arg]


@triton.jit
def merge_moments(r, part, length, first, last, C: tl.constexpr):
    """Return (mean of y, Σ (y − mean)²) of a row, each [1], from its parts' sums around their own pivots."""
    mean = tl.zeros([1], C.ACC)
    spread = tl.zeros([1], C.ACC)
    if C.NEED.moments:
        n = tl.minimum(last, (part + 1) * length) - tl.maximum(first, part * length)  # [PARTS]
        n = tl.maximum(n, 0).to(C.ACC)[:, None]
        some = n > 0.0
        each = tl.where(some, n, 1.0)
        centre = tl.where(some, r.pivot + r.mean / each, 0.0)
        mean = tl.sum(n * centre, 0) / tl.maximum(tl.sum(n, 0), 1.0)
        away = tl.where(some, centre - mean[None, :], 0.0)
        spread = tl.sum(tl.where(some, r.m2 - r.mean * (r.mean / each), 0.0) + n * away * away, 0)
    return mean, spread
