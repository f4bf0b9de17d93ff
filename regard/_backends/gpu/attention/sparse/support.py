"""Σ g(γ·s − τ) = 1 on the lists of `candidates.py`: τ, the support and its statistics.

With the lists at hand τ is exact, by more of the steps that gave the first level (`levels.py`). Two proofs are asked of
a row: that its lists are whole, and that F(level) ≥ 1 (or level ≤ max − 1), so that no key below the level can have
weight. Rows that fail are left to `forward_threshold`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import statistics, tiles
from regard._backends.gpu.attention.sparse.bounds import step
from regard._backends.gpu.attention.statistics import Sums
from regard._backends.gpu.attention.tiles import HIDDEN, LOG2E

ROWS = tl.constexpr(8)  # of a program of `settle`
FLAGGED = tl.constexpr(1)  # rows that succeed or fail together
SLOTS = tl.constexpr(32)  # entries of a list that are at hand while τ is sought
PART = tl.constexpr(16)  # that are weighed and stored together


@triton.jit
def settle(
    lists, counts, level, below, found, failed, shifts, sums, stats, block0, rows, opt,
    C: tl.constexpr, CAP: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr,
    CLOSE: tl.constexpr,
):  # fmt: skip
    """τ and Σg′ of a few rows and their statistics; the support's (p, j) at the head of the lists, its size.

    A thread has one list, four neighbours the four of a row: row numbers stand in all four, [LISTS].
    """
    pid = tl.program_id(0)
    c = tl.arange(0, 4 * ROWS)
    blocks = tl.cdiv(opt.queries, BLOCK)
    block = block0 + pid * ROWS // BLOCK
    i = (blocks - 1 - block % blocks) * BLOCK + pid * ROWS % BLOCK + c // 4
    h = block // blocks % opt.heads
    b = block // blocks // opt.heads
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

    count = tl.load(counts + pid * (4 * ROWS) + c, mask=inside, other=0)
    where = lists + pid * ROWS // BLOCK * (4 * CAP * BLOCK) + pid * ROWS % BLOCK * 4 + c
    longest = tl.max(count, 0)
    near, _ = entries(where, count, 0, SLOTS, BLOCK)
    top = tl.max(near, 1)
    for start in range(SLOTS, longest, SLOTS):
        top = tl.maximum(top, tl.max(entries(where, count, start, SLOTS, BLOCK)[0], 1))
    top = highest_of(top)
    x = scaled(near, top, gain)

    bound = tl.load(level + row, mask=inside, other=0.0)
    tau = tl.maximum((bound - top) * gain, -1.0)
    mass, fall = measure(x, where, count, longest, top, gain, tau, theta, C, BLOCK)
    proved = ((mass >= 1.0) | ((tau <= -1.0) & (mass > 0.9))) & (highest_of(count) < FULL) & (top > HIDDEN)
    tl.store(failed + row, tl.where(proved | dead, 0, 1), mask=inside)
    turns = 0
    while (tl.max(tl.where(inside & (mass - 1.0 > CLOSE), 1, 0), 0) > 0) & (turns < LIMIT):
        tau += tl.maximum(step(mass, fall, power), 0.0)
        mass, fall = measure(x, where, count, longest, top, gain, tau, theta, C, BLOCK)
        turns += 1
    tau += tl.maximum(step(mass, fall, power), 0.0)  # what is left of |Σp − 1| matters to rows that are nearly one-hot
    tl.store(shifts + row, tl.where(dead, 0.0, top * gain + tau), mask=inside)
    tl.store(sums + row, tl.where(dead, 0.0, fall * C.F.gain(theta)), mask=inside)

    many = c * 0
    zero = mass * 0.0
    tally = (zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
    inverse = 1.0 / tl.where(mass > 0.0, mass, 1.0)
    home = where - (c & 3)
    for start in range(0, longest, PART):
        y, j = entries(where, count, start, PART, BLOCK)
        t = tiles.positive_part(scaled(y, top, gain) - tau[:, None])
        kept = tl.where(t > 0.0, 1, 0)
        before, all_kept = places(tl.sum(kept, 1))
        at = tl.cumsum(kept, 1) - 1 + (many + before)[:, None]
        many += all_kept
        tl.debug_barrier()  # every thread has read its part of the lists; none of the next part is overwritten
        p = (C.F.weigh(t, theta) * inverse[:, None]).to(tl.int32, bitcast=True)
        to = home[:, None] + ((at >> 2) * (4 * BLOCK) + (at & 3))
        tl.store(to, p.to(tl.uint32, bitcast=True).to(tl.int64) | (tiles.wide(j) << 32), mask=t > 0.0)
        if C.NEED.top:
            there = start + tl.arange(0, PART)[None, :] < count[:, None]
            tally = counted(tally, y, j, t, there, top, a, i, first, theta, C)
    tl.store(found + pid * ROWS + c // 4, many)
    if C.NEED.top:
        report(tally, top, tau, mass, n, dead, a, bound, below, pid * ROWS + c // 4, stats, row, rows, first, inside,
               theta, opt, C)  # fmt: skip


@triton.jit
def entries(where, count, start, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """(y, j), each [LISTS, SIZE]; y is HIDDEN where a list has ended."""
    at = start + tl.arange(0, SIZE)[None, :]
    here = tl.multiple_of(where[:, None] + at * (4 * BLOCK), [8, 8])  # said to be no more: one list to a thread
    both = tl.load(here, mask=at < count[:, None], other=0xF1800000)  # −2¹⁰⁰, 0
    return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32)


@triton.jit
def scaled(y, top, gain):
    """γ·(s − max)."""
    return (y - top[:, None]) * gain[:, None]


@triton.jit
def measure(x, where, count, longest, top, gain, tau, theta, C: tl.constexpr, BLOCK: tl.constexpr):
    """(F, |F′|) at τ. The first entries are at hand; a list is seldom longer."""
    mass, fall = measured(x, tau, theta, C)
    for start in range(SLOTS, longest, SLOTS):
        more = scaled(entries(where, count, start, SLOTS, BLOCK)[0], top, gain)
        more_mass, more_fall = measured(more, tau, theta, C)
        mass += more_mass
        fall += more_fall
    return sum_of(mass), sum_of(fall) / C.F.gain(theta)


@triton.jit
def measured(x, tau, theta, C: tl.constexpr):
    t = tiles.positive_part(x - tau[:, None])
    slope = C.F.slope(t, theta)
    if C.F.order == 0:
        slope = tl.where(t > 0.0, slope, 0.0)
    return tl.sum(C.F.weigh(t, theta), 1), tl.sum(slope, 1)


@triton.jit
def spread(x):
    """A number per row in each of its four lists, [ROWS] → [LISTS]."""
    return tl.reshape(tl.broadcast_to(x[:, None], [ROWS, 4]), [4 * ROWS])


@triton.jit
def sum_of(x):
    """Σ over a row's four lists, in each of them."""
    return spread(tl.sum(tl.reshape(x, [ROWS, 4]), 1))


@triton.jit
def highest_of(x):
    return spread(tl.max(tl.reshape(x, [ROWS, 4]), 1))


@triton.jit
def places(many):
    """(how many the row's lists to the left have, how many all four have)."""
    each = tl.reshape(many, [ROWS, 4])
    return tl.reshape(tl.cumsum(each, 1) - each, [4 * ROWS]), spread(tl.sum(each, 1))


@triton.jit
def counted(tally, y, j, t, there, top, a, i, first, theta, C: tl.constexpr):
    """The sums that statistics take, with these entries; the maximum stays out of those of `lesser` keys."""
    ties, su, log_u, square, slope, cross, far, support, opening, rest, one, two = tally
    off = y - top[:, None]
    u = tl.where(there, C.F.weigh(t, theta), 0.0)
    lesser = there & (off != 0.0)
    under = tl.where(lesser, u, 0.0)
    lower = tl.where(lesser & (t > 0.0), C.F.slope(t, theta), 0.0)
    ties += tl.sum(tl.where(there & (off == 0.0), 1.0, 0.0), 1)
    su += tl.sum(under, 1)
    log_u += tl.sum(under * statistics.log2_or_0(under), 1)
    square += tl.sum(under * under, 1)
    slope += tl.sum(lower, 1)
    cross += tl.sum(lower * lower, 1)
    far += tl.sum(u * tl.abs(i[:, None] - j).to(C.ACC), 1)
    support += tl.sum(tl.where(u > 0.0, 1.0, 0.0), 1)
    opening += tl.sum(tl.where(j == first[:, None], u, 0.0), 1)
    if C.NEED.lse:
        rest += tl.sum(tl.where(lesser, tl.exp2(off * (a * LOG2E)[:, None]), 0.0), 1)
    if C.NEED.moments:
        one += tl.sum(tl.where(there, off, 0.0), 1)
        two += tl.sum(tl.where(there, off * off, 0.0), 1)
    return ties, su, log_u, square, slope, cross, far, support, opening, rest, one, two


@triton.jit
def report(
    tally, top, tau, z, n, dead, a, bound, below, held, stats, row, rows, first, inside, theta, opt, C: tl.constexpr
):
    """The statistics of the rows from the sums over their lists; what keys below the level add comes in `below`."""
    ties, su, log_u, square, slope, cross, far, support, opening, rest, one, two = tally
    zero = z * 0.0
    lse = zero
    pivot = top
    mean = zero
    m2 = zero
    all_here = bound == -float("inf")
    ties = sum_of(ties)
    if C.NEED.lse:
        drop = tl.exp2(tl.minimum((bound - top) * (a * LOG2E), 0.0))
        lse = top * a + tl.log(ties + sum_of(rest) + tl.where(all_here, 0.0, below_of(below, held, 2) * drop))
    if C.NEED.moments:
        pivot = tl.where(all_here, top, bound)
        mean = tl.where(all_here, sum_of(one), below_of(below, held, 0))
        m2 = tl.where(all_here, sum_of(two), below_of(below, held, 1))
    t1 = tiles.positive_part(-tau)
    u1, d1 = C.F.weigh(t1, theta), C.F.slope(t1, theta)
    inverse = tl.where(dead, 0.0, 1.0 / tl.where(z == 0.0, 1.0, z))
    r = Sums(top, tau, z, ties, sum_of(su), zero, sum_of(log_u), sum_of(square), sum_of(slope), sum_of(cross), zero,
             sum_of(far), sum_of(support), n, first, zero, pivot, mean, m2)  # fmt: skip
    statistics.finish(
        stats, row, inside, dead, r, a, n, u1, u1, d1, d1 * d1, sum_of(opening), zero, inverse, lse, opt, C, rows
    )


@triton.jit
def below_of(below, held, WHICH: tl.constexpr):
    """One of the three sums over all keys that `candidates` left, a part for each list."""
    return sum_of(tl.load(below + (held * 3 + WHICH) * 4 + tl.arange(0, 4 * ROWS) % 4))


@triton.jit
def served(failed, head, start, size, BM: tl.constexpr, ROWS: tl.constexpr):
    """Have the lists served all of these BM rows, flagged ROWS at a time?"""
    groups = tl.cdiv(size, ROWS)
    at = start // ROWS + tl.arange(0, BM // ROWS)
    return tl.max(tl.load(failed + tiles.wide(head) * groups + at, mask=at < groups, other=0), 0) == 0


@triton.jit
def queries_served(failed, opt, BM: tl.constexpr, ROWS: tl.constexpr):
    """The same of the block of queries that `sweeps.scene_of` gives this program."""
    blocks = tl.cdiv(opt.queries, BM)
    pid = tl.program_id(0)
    return served(failed, pid // blocks, (blocks - 1 - pid % blocks) * BM, opt.queries, BM, ROWS)
