"""Σ g(γ·s − τ) = 1 on the lists of `candidates.py`: τ, the support and its statistics.

More Newton steps from the bound (`bounds.py`) give the exact τ. A row is solved only if its lists did not overflow and
F(bound) ≥ 1 (or bound ≤ max − 1), so that no key below the bound can have weight. Other rows are flagged for
`forward_threshold`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import statistics, tiles, visibility
from regard._backends.gpu.attention.sparse.bounds import to_scores
from regard._backends.gpu.attention.statistics import Sums
from regard._backends.gpu.attention.tau_estimate import newton_step
from regard._backends.gpu.attention.tiles import HIDDEN, LOG2E

ROWS = tl.constexpr(8)  # of a program of `solve_support`
FLAG_ROWS = tl.constexpr(1)  # rows per flag
CHUNK = tl.constexpr(16)  # entries that are weighed and stored together


@triton.jit
def solve_support(
    lists, counts, bounds, below, supports, failed, shifts, sums, stats, block0, rows, opt,
    C: tl.constexpr, CAP: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr,
    TOLERANCE: tl.constexpr, RESIDENT: tl.constexpr,
):  # fmt: skip
    """Stores τ, Σg′ and the statistics of ROWS rows, the support's (p, j) at the start of their lists, and its size.

    RESIDENT entries of a list stay in registers while τ is solved. A thread has one list, four neighbours the four of a
    row: a row's numbers are repeated four times, [4·ROWS].
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
    first, last = visibility.visible_range(b, h, i, opt, tiles.key_count(opt, b))
    n = visibility.count_keys(b, h, i, first, last, opt).to(C.ACC)
    place = visibility.positions(b, h, i, opt)
    empty = n == 0.0
    theta = tiles.load_theta(b, h, i, opt, C.ACC)
    thetas = tiles.column(theta, opt)
    a = tiles.row_factor(b, h, i, opt, C.ACC, C.LINEAR)
    gain = a * C.F.gain(theta)
    if C.F.order == 0:
        power = -tl.log2(C.F.weigh(a * 0.0 + 0.5, theta))
    else:
        power = a * 0.0 + C.F.order

    count = tl.load(counts + pid * (4 * ROWS) + c, mask=inside, other=0)
    first_entry = lists + pid * ROWS // BLOCK * (4 * CAP * BLOCK) + pid * ROWS % BLOCK * 4 + c
    longest = tl.max(count, 0)
    first_x, _ = load_entries(first_entry, count, 0, opt, RESIDENT, BLOCK)
    top = tl.max(first_x, 1)
    for start in range(RESIDENT, longest, RESIDENT):
        top = tl.maximum(top, tl.max(load_entries(first_entry, count, start, opt, RESIDENT, BLOCK)[0], 1))
    top = row_max(top)
    x = to_units(first_x, top, gain)

    bound = tl.load(bounds + row, mask=inside, other=0.0)
    tau = tl.maximum((bound - top) * gain, -1.0)
    own_gain = C.F.gain(theta)
    mass, slope_sum = evaluate(x, first_entry, count, longest, top, gain, tau, thetas, opt, C, BLOCK, RESIDENT)
    proved = ((mass >= 1.0) | ((tau <= -1.0) & (mass > 0.9))) & (row_max(count) < FULL) & (top > HIDDEN)
    tl.store(failed + row, tl.where(proved | empty, 0, 1), mask=inside)
    steps = 0
    while (tl.max(tl.where(inside & (mass - 1.0 > TOLERANCE), 1, 0), 0) > 0) & (steps < LIMIT):
        tau += tl.maximum(newton_step(mass, slope_sum / own_gain, power), 0.0)
        mass, slope_sum = evaluate(x, first_entry, count, longest, top, gain, tau, thetas, opt, C, BLOCK, RESIDENT)
        steps += 1
    tau += tl.maximum(
        newton_step(mass, slope_sum / own_gain, power), 0.0
    )  # the remaining |Σp − 1| matters to nearly one-hot rows
    tl.store(shifts + row, tl.where(empty, 0.0, top * gain + tau), mask=inside)
    tl.store(sums + row, tl.where(empty, 0.0, slope_sum), mask=inside)

    support = c * 0
    zero = mass * 0.0
    totals = (zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
    inverse = 1.0 / tl.where(mass > 0.0, mass, 1.0)
    home = first_entry - (c & 3)
    for start in range(0, longest, CHUNK):
        y, j = load_entries(first_entry, count, start, opt, CHUNK, BLOCK)
        t = tl.where(empty[:, None], 0.0, tiles.positive_part(to_units(y, top, gain) - tau[:, None]))
        kept = tl.where(t > 0.0, 1, 0)
        before, all_kept = offsets(tl.sum(kept, 1))
        at = tl.cumsum(kept, 1) - 1 + (support + before)[:, None]
        support += all_kept
        tl.debug_barrier()  # all threads have read this chunk; the stores below do not reach the next one
        p = (C.F.weigh(t, thetas) * inverse[:, None]).to(tl.int32, bitcast=True)
        to = home[:, None] + ((at >> 2) * (4 * BLOCK) + (at & 3))
        tl.store(to, p.to(tl.uint32, bitcast=True).to(tl.int64) | (tiles.wide(j) << 32), mask=t > 0.0)
        if C.NEED.top:
            valid = start + tl.arange(0, CHUNK)[None, :] < count[:, None]
            totals = add_statistics(totals, y, j, t, valid, top, a, place, first, thetas, C)
    tl.store(supports + pid * ROWS + c // 4, support)
    if C.NEED.top:
        slot = pid * ROWS + c // 4
        write_statistics(
            totals, top, tau, mass, n, empty, a, bound, below, slot, stats, row, rows, first, inside, theta, opt, C
        )


@triton.jit
def load_entries(first_entry, count, start, opt, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """(y, j), each [4·ROWS, SIZE]; y is HIDDEN where a list has ended. Beside a soft cap the lists hold products."""
    at = start + tl.arange(0, SIZE)[None, :]
    # the hint claims no wider contiguity, so that a thread gets one list
    pointers = tl.multiple_of(first_entry[:, None] + at * (4 * BLOCK), [8, 8])
    both = tl.load(pointers, mask=at < count[:, None], other=0xF1800000)  # −2¹⁰⁰, 0
    y = to_scores(both.to(tl.int32).to(tl.float32, bitcast=True), opt)
    return y, (both >> 32).to(tl.int32)


@triton.jit
def to_units(y, top, gain):
    """γ·(s − max)."""
    return (y - top[:, None]) * gain[:, None]


@triton.jit
def evaluate(
    x, first_entry, count, longest, top, gain, tau, thetas, opt, C: tl.constexpr, BLOCK: tl.constexpr,
    RESIDENT: tl.constexpr,
):  # fmt: skip
    """(F, Σg′) of a row at τ. x are the first entries; longer lists, which are rare, are loaded again."""
    mass, slope_sum = evaluate_entries(x, tau, thetas, C)
    for start in range(RESIDENT, longest, RESIDENT):
        more = to_units(load_entries(first_entry, count, start, opt, RESIDENT, BLOCK)[0], top, gain)
        more_mass, more_slope = evaluate_entries(more, tau, thetas, C)
        mass += more_mass
        slope_sum += more_slope
    return row_sum(mass), row_sum(slope_sum)


@triton.jit
def evaluate_entries(x, tau, thetas, C: tl.constexpr):
    """(Σ g, Σ g′) over the entries x of each list."""
    weight, slope = tiles.weigh_excess(tiles.positive_part(x - tau[:, None]), thetas, C)
    return tl.sum(weight, 1), tl.sum(slope, 1)


@triton.jit
def repeat_row(x):
    """x [ROWS] repeated for each of a row's four lists, [4·ROWS]."""
    return tl.reshape(tl.broadcast_to(x[:, None], [ROWS, 4]), [4 * ROWS])


@triton.jit
def row_sum(x):
    """Σ over a row's four lists, repeated for each."""
    return repeat_row(tl.sum(tl.reshape(x, [ROWS, 4]), 1))


@triton.jit
def row_max(x):
    """Maximum over a row's four lists, repeated for each."""
    return repeat_row(tl.max(tl.reshape(x, [ROWS, 4]), 1))


@triton.jit
def offsets(support):
    """(entries in the row's earlier lists, entries in all four)."""
    each = tl.reshape(support, [ROWS, 4])
    return tl.reshape(tl.cumsum(each, 1) - each, [4 * ROWS]), repeat_row(tl.sum(each, 1))


@triton.jit
def add_statistics(totals, y, j, t, valid, top, a, i, first, thetas, C: tl.constexpr):
    """totals + these entries; those of keys `below_max` exclude the maximum."""
    ties, su, log_u, square, slope, cross, distance, support, first_u, exp_sum, sum_y, sum_y2 = totals
    off = y - top[:, None]
    weight, slope_t = tiles.weigh_excess(t, thetas, C)
    u = tl.where(valid, weight, 0.0)
    below_max = valid & (off != 0.0)
    u_below = tl.where(below_max, u, 0.0)
    slope_below = tl.where(below_max & (t > 0.0), slope_t, 0.0)
    ties += tl.sum(tl.where(valid & (off == 0.0), 1.0, 0.0), 1)
    su += tl.sum(u_below, 1)
    log_u += tl.sum(u_below * statistics.log2_or_0(u_below), 1)
    square += tl.sum(u_below * u_below, 1)
    slope += tl.sum(slope_below, 1)
    cross += tl.sum(slope_below * slope_below, 1)
    distance += tl.sum(u * tl.abs(i[:, None] - j).to(C.ACC), 1)
    support += tl.sum(tl.where(u > 0.0, 1.0, 0.0), 1)
    first_u += tl.sum(tl.where(j == first[:, None], u, 0.0), 1)
    if C.NEED.lse:
        exp_sum += tl.sum(tl.where(below_max, tl.exp2(off * (a * LOG2E)[:, None]), 0.0), 1)
    if C.NEED.moments:
        sum_y += tl.sum(tl.where(valid, off, 0.0), 1)
        sum_y2 += tl.sum(tl.where(valid, off * off, 0.0), 1)
    return ties, su, log_u, square, slope, cross, distance, support, first_u, exp_sum, sum_y, sum_y2


@triton.jit
def write_statistics(
    totals, top, tau, z, n, empty, a, bound, below, slot, stats, row, rows, first, inside, theta, opt, C: tl.constexpr
):
    """Stores the statistics from the sums over the lists and, for keys that are not listed, `below`."""
    ties, su, log_u, square, slope, cross, distance, support, first_u, exp_sum, sum_y, sum_y2 = totals
    zero = z * 0.0
    lse = zero
    pivot = top
    mean = zero
    m2 = zero
    all_listed = bound == -float("inf")
    ties = row_sum(ties)
    if C.NEED.lse:
        factor = tl.exp2(tl.minimum((bound - top) * (a * LOG2E), 0.0))
        lse = top * a + tl.log(ties + row_sum(exp_sum) + tl.where(all_listed, 0.0, load_below(below, slot, 2) * factor))
    if C.NEED.moments:
        pivot = tl.where(all_listed, top, bound)
        mean = tl.where(all_listed, row_sum(sum_y), load_below(below, slot, 0))
        m2 = tl.where(all_listed, row_sum(sum_y2), load_below(below, slot, 1))
    t1 = tiles.positive_part(-tau)
    u1, d1 = C.F.weigh(t1, theta), C.F.slope(t1, theta)
    inverse = tl.where(empty, 0.0, 1.0 / tl.where(z == 0.0, 1.0, z))
    r = Sums(
        top, tau, z, ties, row_sum(su), zero, row_sum(log_u), row_sum(square), row_sum(slope), row_sum(cross), zero,
        row_sum(distance), row_sum(support), n, first, zero, pivot, mean, m2,
    )  # fmt: skip
    statistics.finish(
        stats, row, inside, empty, r, a, n, u1, u1, d1, d1 * d1, row_sum(first_u), zero, inverse, lse, opt, C, rows
    )


@triton.jit
def load_below(below, slot, WHICH: tl.constexpr):
    """One of the three sums that `list_candidates` stored in `below`."""
    return row_sum(tl.load(below + (slot * 3 + WHICH) * 4 + tl.arange(0, 4 * ROWS) % 4))


@triton.jit
def are_solved(failed, head, start, size, BM: tl.constexpr, ROWS: tl.constexpr):
    """True if all of these BM rows were solved from their lists; one flag covers ROWS rows."""
    groups = tl.cdiv(size, ROWS)
    at = start // ROWS + tl.arange(0, BM // ROWS)
    return tl.max(tl.load(failed + tiles.wide(head) * groups + at, mask=at < groups, other=0), 0) == 0


@triton.jit
def are_queries_solved(failed, opt, BM: tl.constexpr, ROWS: tl.constexpr):
    """True if the block of queries of this program (`key_loop.load_query_block`) was solved from its lists."""
    blocks = tl.cdiv(opt.queries, BM)
    pid = tl.program_id(0)
    return are_solved(failed, pid // blocks, (blocks - 1 - pid % blocks) * BM, opt.queries, BM, ROWS)
