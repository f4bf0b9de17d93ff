"""Σ g(γ·s − τ) = 1 on the lists of `candidates.py`: a first level, then τ, the support and its statistics.

The first level comes from some of the row's keys: a guess at their own τ (`survey.py`), F there, one step of Newton's.
F^(1/k) is convex, so the step never passes their τ, which lies below that of all keys. With the lists at hand τ is
exact, by more such steps. Two proofs are asked of a row: that its lists are whole, and that F(level) ≥ 1 (or
level ≤ max − 1), so that no key below the level can have weight. Rows that fail are left to `forward_threshold`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels import statistics, survey, sweeps, tiles
from regard.kernels.statistics import Sums
from regard.kernels.tiles import HIDDEN, LOG2E

ROWS = tl.constexpr(4)  # that succeed or fail together


@triton.jit
def first_level(q, k, level, opt, C: tl.constexpr, CAP: tl.constexpr, STRIDE: tl.constexpr):
    """level_i ≤ τ_i, in units of y: −∞ takes every key, +∞ says that the lists would be too long."""
    scene, i0 = sweeps.scene_of(q, k, k, k, k, opt, C)
    _, inner, outer = sweeps.key_blocks(i0, opt, tiles.key_count(opt, scene.b), C.BM, C.BN)
    many = (outer - inner) // C.BN
    found = tiles.full(C.BM, float("inf"), C.ACC)
    if scene.highest - scene.lowest <= 4 * (CAP - 8):
        found = -found
    elif many >= 4:
        one = tiles.full(C.BM, 0.0, C.ACC)
        two = one
        for part in range(4):
            tile = sweeps.look(scene, inner + many * (2 * part + 1) // 8 * C.BN, opt, C, False)
            one += tl.sum(tile[2], 1)
            two += tl.sum(tile[2] * tile[2], 1)
        mean = one / (4 * C.BN)
        sigma = tl.sqrt(tl.maximum(two / (4 * C.BN) - mean * mean, 1e-12))
        gain = scene.a * C.F.gain(scene.theta)
        power = survey.power(scene, C)
        n = (tl.cdiv(many, STRIDE) * C.BN).to(C.ACC)  # of which F is taken
        root = survey.tail(n, sigma * gain, power)
        # how far τ strays: by its own few keys, about 0.31/k, and by what the sample tells of mean and deviation
        stray = tl.sqrt(0.1 / (power * power) + (1.0 + 0.5 * root * root) / (4 * C.BN))
        upper = mean + (root - 0.5 * stray) * sigma
        lower = mean + (root - 2.5 * stray) * sigma
        lanes = tiles.zeros(C.BM, C.LANES, C.ACC)
        f0 = lanes
        f1 = lanes
        g0 = lanes
        g1 = lanes
        for start in tl.range(inner, outer, C.BN * STRIDE):
            tile = sweeps.look(scene, start, opt, C, False)
            a0, b0 = survey.measured(tile[2], lower * gain, scene, C)
            a1, b1 = survey.measured(tile[2], upper * gain, scene, C)
            f0, g0, f1, g1 = f0 + a0, g0 + b0, f1 + a1, g1 + b1
        f0, f1, g0, g1 = tl.sum(f0, 1), tl.sum(f1, 1), tl.sum(g0, 1), tl.sum(g1, 1)
        low = tl.where(f0 > 0.0, lower + step(f0, g0, power) / gain, lower - 2.0 * sigma)
        high = tl.where(f1 > 0.0, upper + step(f1, g1, power) / gain, low)
        place = tl.maximum(low, high) - 1e-3 / gain
        # were the scores normal, would the lists overflow?
        most = survey.tail((scene.last - scene.first).to(C.ACC) / (4.0 * CAP), sigma, sigma * 0.0)
        found = tl.where(place < mean + most * sigma, found, place)
    row = (tiles.wide(scene.b) * opt.heads + scene.h) * opt.queries + scene.i
    tl.store(level + row, found, mask=scene.i < opt.queries)


@triton.jit
def step(mass, fall, power):
    """Newton's step on the norm F^(1/k), convex as F is: never beyond the root, from either side."""
    some = (mass > 0.0) & (fall > 0.0)
    root = tl.exp2(tl.log2(tl.where(some, mass, 1.0)) / power)
    return tl.where(some, power * mass * (1.0 - 1.0 / root) / tl.where(some, fall, 1.0), 0.0)


@triton.jit
def settle(
    lists, counts, level, below, found, failed, frames, sums, stats, block0, rows, opt,
    C: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr, CLOSE: tl.constexpr,
):  # fmt: skip
    """τ and Σg′ of a few rows and their statistics; the support's (p, j) at the head of the lists, its size."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(opt.queries, BLOCK)
    block = block0 + pid * ROWS // BLOCK
    i = (blocks - 1 - block % blocks) * BLOCK + pid * ROWS % BLOCK + tl.arange(0, ROWS)
    h = block // blocks % opt.heads
    b = block // blocks // opt.heads
    held = pid * ROWS + tl.arange(0, ROWS)  # the lists of a chunk have fewer than 2³¹ entries
    c = tl.arange(0, 4)
    count = tl.load(counts + held[:, None] * 4 + c[None, :], mask=(i < opt.queries)[:, None], other=0)
    longest = tl.max(tl.max(count, 1), 0)
    place = (b, h, i, held)
    if longest <= CAP // 2:
        settle_rows(lists, count, level, below, found, failed, frames, sums, stats, place, rows, opt,
                    C, CAP, CAP // 2, LIMIT, CLOSE)  # fmt: skip
    else:
        settle_rows(lists, count, level, below, found, failed, frames, sums, stats, place, rows, opt,
                    C, CAP, CAP, LIMIT, CLOSE)  # fmt: skip


@triton.jit
def measure(x, tau, theta, C: tl.constexpr):
    """(F, |F′|) at τ."""
    t = tiles.positive_part(x - tau[:, None, None])
    fall = tl.sum(tl.sum(tl.where(t > 0.0, C.F.slope(t, theta), 0.0), 2), 1) / C.F.gain(theta)
    return tl.sum(tl.sum(C.F.weigh(t, theta), 2), 1), fall


@triton.jit
def settle_rows(
    lists, count, level, below, found, failed, frames, sums, stats, place, rows, opt,
    C: tl.constexpr, CAP: tl.constexpr, SLOTS: tl.constexpr, LIMIT: tl.constexpr, CLOSE: tl.constexpr,
):  # fmt: skip
    b, h, i, held = place
    inside = i < opt.queries
    row = (tiles.wide(b) * opt.heads + h) * opt.queries + i
    first, last = tiles.interval(i, opt, tiles.key_count(opt, b))
    n = tl.maximum(last - first, 0).to(C.ACC)
    dead = n == 0.0
    theta = tiles.number(opt.theta, C.ACC)
    a = tiles.row_factor(b, h, i, opt, C.ACC, C.LINEAR)
    gain = a * C.F.gain(theta)
    if C.F.order == 0:
        power = -tl.log2(C.F.weigh(a * 0.0 + 0.5, theta))
    else:
        power = a * 0.0 + C.F.order

    quarter, slot = tl.arange(0, 4)[None, :, None], tl.arange(0, SLOTS)[None, None, :]
    here = held[:, None, None] * (8 * CAP) + (quarter * CAP + slot) * 2
    there = slot < count[:, :, None]  # [R, 4, SLOTS]
    y = tl.load(lists + here, mask=there, other=HIDDEN)
    top = tl.max(tl.max(y, 2), 1)
    x = (y - top[:, None, None]) * gain[:, None, None]

    bound = tl.load(level + row, mask=inside, other=0.0)
    tau = tl.maximum((bound - top) * gain, -1.0)
    mass, fall = measure(x, tau, theta, C)
    proved = ((mass >= 1.0) | ((tau <= -1.0) & (mass > 0.9))) & (tl.max(count, 1) < CAP - 1) & (top > HIDDEN)
    good = tl.min(tl.where(proved | dead | (inside == 0), 1, 0), 0)
    turns = 0
    while (tl.max(tl.where(inside & (mass - 1.0 > CLOSE), 1, 0), 0) > 0) & (turns < LIMIT):
        tau += tl.maximum(step(mass, fall, power), 0.0)
        mass, fall = measure(x, tau, theta, C)
        turns += 1
    tau += tl.maximum(step(mass, fall, power), 0.0)  # what is left of |Σp − 1| matters to rows that are nearly one-hot
    tl.store(frames + row, tl.where(dead, 0.0, top * gain + tau), mask=inside)
    tl.store(sums + row, tl.where(dead, 0.0, fall * C.F.gain(theta)), mask=inside)
    start = tl.min(i, 0)
    group = (tiles.wide(b) * opt.heads + h) * tl.cdiv(opt.queries, ROWS) + start // ROWS
    tl.store(failed + group, 1 - good, mask=start < opt.queries)
    t = tl.where(there, tiles.positive_part(x - tau[:, None, None]), 0.0)
    kept = tl.where(t > 0.0, 1, 0)
    before = tl.sum(kept, 2)
    before = tl.cumsum(before, 1) - before  # in the lists to the left
    at = tl.cumsum(kept, 2) - 1 + before[:, :, None]
    many = tl.sum(tl.sum(kept, 2), 1)
    j = tl.load(lists + here + 1, mask=there, other=0.0).to(tl.int32, bitcast=True)
    tl.debug_barrier()  # every thread has read its part of the lists
    to = held[:, None, None] * (8 * CAP) + 2 * at
    p = C.F.weigh(t, theta) / tl.where(mass > 0.0, mass, 1.0)[:, None, None]
    tl.store(lists + to, p, mask=t > 0.0)
    tl.store(lists + to + 1, j.to(tl.float32, bitcast=True), mask=t > 0.0)
    tl.store(found + held, many)
    if C.NEED.top:
        report(y, j, there, top, tau, mass, n, dead, a, bound, below, held, stats, row, rows, i, first, inside,
               theta, opt, C)  # fmt: skip


@triton.jit
def total(x):
    """Σ over the lists, [R, 4, SLOTS] → [R]."""
    return tl.sum(tl.sum(x, 2), 1)


@triton.jit
def report(
    y, j, there, top, tau, z, n, dead, a, bound, below, held, stats, row, rows, i, first, inside, theta, opt,
    C: tl.constexpr,
):  # fmt: skip
    """The statistics of the row from its lists; what the keys below the level add to them comes in `below`."""
    above = top[:, None, None]
    t = tiles.positive_part((y - above) * (a * C.F.gain(theta))[:, None, None] - tau[:, None, None])
    u = tl.where(there, C.F.weigh(t, theta), 0.0)
    lesser = there & (y != above)
    under = tl.where(lesser, u, 0.0)
    lower = tl.where(lesser & (t > 0.0), C.F.slope(t, theta), 0.0)
    ties = total(tl.where(there & (y == above), 1.0, 0.0))
    far = total(u * tl.abs(i[:, None, None] - j).to(C.ACC))
    first_u = total(tl.where(j == first[:, None, None], u, 0.0))
    zero = z * 0.0
    lse = zero
    pivot = top
    mean = zero
    m2 = zero
    all_here = bound == -float("inf")
    if C.NEED.lse:
        rest = total(tl.where(lesser, tl.exp2((y - above) * (a * LOG2E)[:, None, None]), 0.0))
        drop = tl.exp2(tl.minimum((bound - top) * (a * LOG2E), 0.0))
        rest += tl.where(all_here, 0.0, below_of(below, held, 2) * drop)
        lse = top * a + tl.log(ties + rest)
    if C.NEED.moments:
        off = tl.where(there, y - above, 0.0)
        pivot = tl.where(all_here, top, bound)
        mean = tl.where(all_here, total(off), below_of(below, held, 0))
        m2 = tl.where(all_here, total(off * off), below_of(below, held, 1))
    t1 = tiles.positive_part(-tau)
    u1, d1 = C.F.weigh(t1, theta), C.F.slope(t1, theta)
    log_u = total(under * statistics.log2_or_0(under))
    inverse = tl.where(dead, 0.0, 1.0 / tl.where(z == 0.0, 1.0, z))
    r = Sums(top, tau, z, ties, total(under), zero, log_u, total(under * under), total(lower), total(lower * lower),
             zero, far, total(tl.where(u > 0.0, 1.0, 0.0)), n, first, zero, pivot, mean, m2)  # fmt: skip
    statistics.finish(stats, row, inside, dead, r, a, n, u1, u1, d1, d1 * d1, first_u, zero, inverse, lse, opt, C, rows)


@triton.jit
def below_of(below, held, WHICH: tl.constexpr):
    """One of the three sums over all keys that `candidates` left, four parts to a row."""
    c = tl.arange(0, 4)
    return tl.sum(tl.load(below + (held[:, None] * 3 + WHICH) * 4 + c[None, :]), 1)


@triton.jit
def last_level(frames, sums, level, rows, opt, C: tl.constexpr, SIZE: tl.constexpr):
    """τ of every row in units of y; +∞ where no key has weight."""
    row = tiles.wide(tl.program_id(0)) * SIZE + tl.arange(0, SIZE)
    there = row < rows
    i = (row % opt.queries).to(tl.int32)
    h = (row // opt.queries % opt.heads).to(tl.int32)
    b = (row // opt.queries // opt.heads).to(tl.int32)
    a = tiles.row_factor(b, h, i, opt, C.ACC, C.LINEAR)
    tau = tl.load(frames + row, mask=there, other=0.0) / (a * C.F.gain(tiles.number(opt.theta, C.ACC)))
    alive = tl.load(sums + row, mask=there, other=0.0) != 0.0
    tl.store(level + row, tl.where(alive, tau, float("inf")), mask=there)


@triton.jit
def steepness(slope, rows, opt, C: tl.constexpr, SIZE: tl.constexpr):
    """a·log2 e of every row."""
    row = tiles.wide(tl.program_id(0)) * SIZE + tl.arange(0, SIZE)
    i = (row % opt.queries).to(tl.int32)
    h = (row // opt.queries % opt.heads).to(tl.int32)
    b = tl.minimum(row, rows - 1) // opt.queries // opt.heads
    a = tiles.row_factor(b.to(tl.int32), h, i, opt, C.ACC, C.LINEAR)
    tl.store(slope + row, a * LOG2E, mask=row < rows)


@triton.jit
def served(failed, head, start, size, BM: tl.constexpr, ROWS: tl.constexpr):
    """Have the lists served all of these BM rows, flagged ROWS at a time?"""
    groups = tl.cdiv(size, ROWS)
    at = start // ROWS + tl.arange(0, BM // ROWS)
    return tl.max(tl.load(failed + tiles.wide(head) * groups + at, mask=at < groups, other=0), 0) == 0
