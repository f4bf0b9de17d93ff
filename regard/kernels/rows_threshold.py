"""Rows of the threshold family: p = value(max(y − τ, 0)) with Σp = 1, y = gain·(s − max); and their backward.

From a point τ the sums over the current support give the next one. F(τ) = Σ value is convex, so Newton's step never
passes the solution from the left. For value = t² two better ones: √F is a norm, so convex too, and Newton's step on it
is twice as long where F is large; the root of the quadratic on the current support is exact once the support is, but
may pass the solution: it then comes back from the right, never behind the last Newton step (`floor`).

The solution for some of the scores is a lower bound for all. So the few maxima of groups of scores are solved first;
the many then need one or two steps more, which is what a row costs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.kernels.rows_tiles import (
    finite,
    gather,
    highest,
    larger,
    load,
    load_scores,
    meet,
    number,
    parameter,
    place,
    publish,
    reciprocal,
    store,
    store_state,
    visible,
)

LIMIT = tl.constexpr(40)  # steps; rows of random scores take 3 to 8
SUMS = tl.constexpr(6)  # partial sums that a part publishes beside its maxima: three, in two buffers that take turns
FINE = tl.constexpr(1e-5)  # coarser solutions take Newton's steps alone: a step more, but no support to count
FOUND = tl.constexpr(4)  # numbers that `solve_rows` finds: max, τ, Σ value, Σ slope


@triton.jit
def maxima(x, GROUPS: tl.constexpr, VECTOR: tl.constexpr):
    """The largest score of each of GROUPS groups, [1, GROUPS]: of what a thread holds, so that nothing moves."""
    parts: tl.constexpr = x.shape[1] // (GROUPS * VECTOR)
    grouped = tl.reshape(x, [x.shape[0], parts, GROUPS, VECTOR])
    return tl.reduce(tl.reduce(grouped, 3, larger), 1, larger)


@triton.jit
def add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def sums_of(y, tau, theta, F: tl.constexpr):
    """value, slope and whether in the support at τ, of each score."""
    t = tl.maximum(y - tau, 0.0)
    return F.weigh(t, theta), F.slope(t, theta).to(y.dtype), (t > 0.0).to(y.dtype)


@triton.jit
def reduced(value, slope, count, TOLERANCE: tl.constexpr, F: tl.constexpr):
    """Σ value, Σ slope and the size of the support, each [1, 1], in one reduction: waiting is what it costs."""
    if F.order == 2 and TOLERANCE < FINE:
        total, slope, count = tl.reduce((value, slope, count), 1, add_three, keep_dims=True)
    else:
        total, slope = tl.reduce((value, slope), 1, add_two, keep_dims=True)
        count = total
    return total, slope, count


@triton.jit
def sums(y, tau, theta, TOLERANCE: tl.constexpr, F: tl.constexpr):
    value, slope, count = sums_of(y, tau, theta, F)
    return reduced(value, slope, count, TOLERANCE, F)


@triton.jit
def advance(tau, floor, total, slope, count, gain, TOLERANCE: tl.constexpr, F: tl.constexpr):
    """The next τ, and whether it differs enough to go on."""
    fall = slope / gain
    alive = fall > 0.0
    miss = total - 1.0
    fall = tl.where(alive, fall, 1.0)
    if F.order == 2:
        half = 0.5 * fall  # Σ t
        newton = (total - tl.sqrt(total)) / half
        move = newton
        if TOLERANCE < FINE:
            room = half * half - count * miss
            move = tl.where(room > 0.0, miss / (half + tl.sqrt(tl.maximum(room, 0.0))), newton)
    else:
        newton = miss / fall
        move = newton
    floor = tl.where(miss >= 0.0, tl.maximum(floor, tau + newton), floor)
    after = tl.maximum(tau + move, floor)
    far = (tl.abs(miss) > TOLERANCE) & (tl.abs(after - tau) > 0.5 * TOLERANCE * tl.abs(tau))
    return after, floor, (alive & far).to(tl.int32)


class Row(NamedTuple):
    """A program's scores: where they are, and y = factor·(x − top) of them where they are held, else None."""

    s: Any
    mask: Any
    rows: Any
    columns: Any
    R: Any
    N: Any
    mask_row: Any
    mask_column: Any
    y: Any


@triton.jit
def scores_of(row, top, factor, HAS_MASK: tl.constexpr, ACC: tl.constexpr, AGAIN: tl.constexpr):
    """y [1, COLUMNS], read again from the cache if AGAIN."""
    if AGAIN:
        tl.debug_barrier()  # or the compiler would hold on to what it read before
        x = load_scores(
            row.s, row.mask, row.rows, row.columns, row.R, row.N, row.mask_row, row.mask_column, HAS_MASK, ACC
        )
        y = (x - finite(top)) * factor
    else:
        y = row.y
    return y


@triton.jit
def solve(row, top, factor, tau, theta, gain, partial, counter, part, parts, TOLERANCE: tl.constexpr, F: tl.constexpr,
          PARTS: tl.constexpr, SHARED: tl.constexpr, HAS_MASK: tl.constexpr, ACC: tl.constexpr,
          AGAIN: tl.constexpr):  # fmt: skip
    """τ with Σ value = 1, and the sums there. SHARED: over all parts of the row, which meet at every step."""
    floor = tau * 0.0 - 1.0
    total, slope, count = sums(scores_of(row, top, factor, HAS_MASK, ACC, AGAIN), tau, theta, TOLERANCE, F)
    if SHARED:
        total, slope, count = share(total, slope, count, 0, partial, counter, part, parts, PARTS, F)
    after, floor, far = advance(tau, floor, total, slope, count, gain, TOLERANCE, F)
    step = 1
    while (tl.max(far) > 0) & (step < LIMIT):
        tau = after
        total, slope, count = sums(scores_of(row, top, factor, HAS_MASK, ACC, AGAIN), tau, theta, TOLERANCE, F)
        if SHARED:
            total, slope, count = share(total, slope, count, step, partial, counter, part, parts, PARTS, F)
        after, floor, far = advance(tau, floor, total, slope, count, gain, TOLERANCE, F)
        step += 1
    return tau, total, slope


@triton.jit
def share(total, slope, count, step, partial, counter, part, parts, PARTS: tl.constexpr, F: tl.constexpr):
    """The three sums over all parts. Steps take turns in two buffers, so that none is overwritten while read."""
    which = 3 * (step % 2)
    publish(partial, total, which, part, parts)
    publish(partial, slope, which + 1, part, parts)
    if F.order == 2:
        publish(partial, count, which + 2, part, parts)
    meet(counter, (step + 2) * parts)
    none = total * 0.0
    total = none + tl.sum(gather(partial, which, parts, 0.0, PARTS), 0)
    slope = none + tl.sum(gather(partial, which + 1, parts, 0.0, PARTS), 0)
    count = total
    if F.order == 2:
        count = none + tl.sum(gather(partial, which + 2, parts, 0.0, PARTS), 0)
    return total, slope, count


@triton.jit
def start(few, theta, gain, factor, partial, F: tl.constexpr):
    """The maximum of a few scores [1, n], and about the τ at which they alone would sum to 1."""
    top = alone(tl.reduce(few, 1, larger, keep_dims=True))
    held = Row(0, 0, 0, 0, 0, 0, 0, 0, (few - finite(top)) * factor)
    low = finite(top) * 0.0 - 1.0
    tau, _, _ = solve(
        held, top, factor, low, theta, gain, partial, partial, 0, 1, 1e-4, F, 1, False, False, few.dtype, False
    )
    return top, alone(tau)


@triton.jit
def gather_maxima(partial, parts, GROUPS: tl.constexpr, PARTS: tl.constexpr):
    """The maxima that the row's parts have published, [1, PARTS·GROUPS]."""
    which = tl.arange(0, PARTS * GROUPS)[None, :]
    return tl.load(partial + which, mask=which < parts * GROUPS, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def forward_threshold(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, TOLERANCE: tl.constexpr, AGAIN: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """One row or part per program (ROWS = 1): rows that step together all take as many steps as the slowest.

    AGAIN: the scores are read again, from the cache, at every step, so that no register holds them between.
    """
    ACC: tl.constexpr = state.dtype.element_ty
    rows, columns, row, part = place(parts, ROWS, COLUMNS)
    theta = parameter(theta, theta_rows, rows, R, HAS_THETA, ACC)
    gain = F.gain(theta) + theta * 0.0
    factor = number(scale, ACC) * gain
    x = load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, ACC)
    scratch = partial + row * (GROUPS + SUMS) * parts
    if STAGE == "meet" or STAGE == "publish":
        tl.store(scratch + part * GROUPS + tl.arange(0, GROUPS)[None, :], maxima(x, GROUPS, VECTOR))
    if STAGE == "meet":
        meet(counters + row, parts)
    if STAGE == "whole" or STAGE == "meet":
        if STAGE == "meet":
            top, tau = start(gather_maxima(scratch, parts, GROUPS, PARTS), theta, gain, factor, partial, F)
        elif GROUPS > 0:
            top, tau = start(maxima(x, GROUPS, VECTOR), theta, gain, factor, partial, F)
        else:
            top, tau = highest(x), tl.full([1, 1], -1.0, ACC)
        y = (x - finite(top)) * factor
        held = Row(s, mask, rows, columns, R, N, mask_row, mask_column, 0 if AGAIN else y)
        tau, total, slope = solve(
            held, top, factor, tau, theta, gain, scratch + GROUPS * parts, counters + row, part, parts, TOLERANCE, F,
            PARTS, STAGE == "meet", HAS_MASK, ACC, AGAIN,
        )  # fmt: skip
        y = scores_of(held, top, factor, HAS_MASK, ACC, AGAIN)
    if STAGE == "finish":  # solve_rows has been here
        found = partial + R * (GROUPS + SUMS) * parts + row * FOUND
        top, tau, total, slope = one(found, ACC), one(found + 1, ACC), one(found + 2, ACC), one(found + 3, ACC)
        y = (x - finite(top)) * factor
    if STAGE != "publish":
        inverse = tl.where(top < float("inf"), reciprocal(total), float("nan"))
        store(p, F.weigh(tl.maximum(y - tau, 0.0), theta) * inverse, rows, columns, R, N)
        frame = tl.where(top == float("-inf"), 0.0, finite(top) * factor + tau)
        store_state(state, frame, tl.where(top < float("inf"), slope, float("nan")), rows, part, R)


@triton.jit
def alone(x):
    """[1, 1] again from a scalar, so that no tile takes over the layout of what x was reduced from."""
    return tl.zeros([1, 1], x.dtype) + tl.sum(x)


@triton.jit
def one(pointer, ACC: tl.constexpr):
    return tl.zeros([1, 1], ACC) + tl.load(pointer)


@triton.jit
def solve_rows(
    s, mask, theta_rows, partial, R, N, parts, mask_row, mask_column, scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, TOLERANCE: tl.constexpr,
):  # fmt: skip
    """Between "publish" and "finish": one program per row reads it once per step of τ."""
    ACC: tl.constexpr = partial.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    rows = row + tl.arange(0, 1)[:, None]
    theta = parameter(theta, theta_rows, rows, R, HAS_THETA, ACC)
    gain = F.gain(theta) + theta * 0.0
    factor = number(scale, ACC) * gain
    few = gather_maxima(partial + row * (GROUPS + SUMS) * parts, parts, GROUPS, PARTS)
    top, tau = start(few, theta, gain, factor, partial, F)
    floor = tau * 0.0 - 1.0
    total, slope, count = read_sums(
        s, mask, rows, R, N, mask_row, mask_column, top, tau, theta, factor, TOLERANCE, F, COLUMNS, HAS_MASK, ACC
    )
    after, floor, far = advance(tau, floor, total, slope, count, gain, TOLERANCE, F)
    step = 1
    while (tl.max(far) > 0) & (step < LIMIT):
        tau = after
        total, slope, count = read_sums(
            s, mask, rows, R, N, mask_row, mask_column, top, tau, theta, factor, TOLERANCE, F, COLUMNS, HAS_MASK, ACC
        )
        after, floor, far = advance(tau, floor, total, slope, count, gain, TOLERANCE, F)
        step += 1
    found = partial + R * (GROUPS + SUMS) * parts + row * FOUND
    tl.store(found, tl.sum(top))
    tl.store(found + 1, tl.sum(tau))
    tl.store(found + 2, tl.sum(total))
    tl.store(found + 3, tl.sum(slope))


@triton.jit
def read_sums(s, mask, rows, R, N, mask_row, mask_column, top, tau, theta, factor, TOLERANCE: tl.constexpr,
              F: tl.constexpr, COLUMNS: tl.constexpr, HAS_MASK: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """`sums` over a whole row, piece by piece. What rounding loses is kept (Kahan): a million columns sum exactly."""
    total, slope, count = tau * 0.0, tau * 0.0, tau * 0.0
    lost_total, lost_slope = tau * 0.0, tau * 0.0
    for first in range(0, N, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)[None, :]
        x = load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, ACC)
        more_total, more_slope, more_count = sums((x - finite(top)) * factor, tau, theta, TOLERANCE, F)
        total, lost_total = add(total, lost_total, more_total)
        slope, lost_slope = add(slope, lost_slope, more_slope)
        count += more_count
    return total, slope, count


@triton.jit
def add(total, lost, more):
    more = more - lost
    after = total + more
    return after, (after - total) - more


@triton.jit
def slopes(row, state, scale, theta, F: tl.constexpr, HAS_MASK: tl.constexpr, ACC: tl.constexpr):
    """(g′, dp) of a tile, dp 0 where nobody is seen; `row.y` is dp."""
    above = load(row.y, row.rows, row.columns, row.R, row.N, 0.0, ACC)
    if F.slope_of_weight is not None:
        a = F.slope_of_weight(load(row.s, row.rows, row.columns, row.R, row.N, 0.0, ACC), theta)
    else:
        x = load_scores(
            row.s, row.mask, row.rows, row.columns, row.R, row.N, row.mask_row, row.mask_column, HAS_MASK, ACC
        )
        tau = tl.load(state + row.rows, mask=row.rows < row.R, other=0.0)
        a = F.slope(tl.maximum(x * scale * F.gain(theta) - tau, 0.0), theta)
    if HAS_MASK:
        seen = visible(row.mask, row.rows, row.columns, row.R, row.N, row.mask_row, row.mask_column)
        above = tl.where(seen, above, 0.0)
    return a.to(ACC), above


@triton.jit
def join_delta(weight, delta, state, partial, counters, rows, row, part, parts, R, PARTS: tl.constexpr,
               STAGE: tl.constexpr):  # fmt: skip
    """δ = Σ g′·dp / Σ g′ of the rows, from those sums of their parts."""
    if STAGE != "whole":
        partial += row * 2 * parts
        if STAGE != "finish":
            publish(partial, weight, 0, part, parts)
            publish(partial, delta, 1, part, parts)
        if STAGE == "meet":
            meet(counters + row, parts)
        if STAGE != "publish":
            weight = tl.zeros_like(weight) + tl.sum(gather(partial, 0, parts, 0.0, PARTS), 0)
            delta = tl.zeros_like(delta) + tl.sum(gather(partial, 1, parts, 0.0, PARTS), 0)
    z = tl.load(state + R + rows, mask=rows < R, other=0.0)
    return tl.where(z == z, delta / tl.where(weight == 0.0, 1.0, weight), z)  # a NaN row stays NaN


@triton.jit
def backward_threshold(
    dp, saved, ds, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, AGAIN: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """ds = scale·g′·(dp − δ) with δ = Σ g′·dp / Σ g′."""
    ACC: tl.constexpr = state.dtype.element_ty
    rows, columns, row, part = place(parts, ROWS, COLUMNS)
    theta = parameter(theta, theta_rows, rows, R, HAS_THETA, ACC)
    scale = number(scale, ACC)
    held = Row(saved, mask, rows, columns, R, N, mask_row, mask_column, dp)
    a, above = slopes(held, state, scale, theta, F, HAS_MASK, ACC)
    weight = tl.sum(a, 1, keep_dims=True)
    delta = tl.sum(a * above, 1, keep_dims=True)
    delta = join_delta(weight, delta, state, partial, counters, rows, row, part, parts, R, PARTS, STAGE)
    if STAGE != "publish":
        if AGAIN:
            tl.debug_barrier()
            a, above = slopes(held, state, scale, theta, F, HAS_MASK, ACC)
        store(ds, a * (above - delta) * scale, rows, columns, R, N)
