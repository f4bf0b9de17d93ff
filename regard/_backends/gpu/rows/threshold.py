"""Rows of the threshold family: p = value(max(y − τ, 0)) with Σp = 1, y = gain·(s − max); and their backward."""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.rows.solver import LIMIT, Row, advance, maxima, read_again, scores_of, solve, start, sums
from regard._backends.gpu.rows.tiles import (
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

SUMS = tl.constexpr(6)  # partial sums that a part publishes beside its maxima: three, in two buffers that take turns
FOUND = tl.constexpr(4)  # numbers that `solve_rows` finds: max, τ, Σ value, Σ slope


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

    AGAIN: "all" scores, the second "half" of them or "none" are read again, from the cache, at every step.
    """
    ACC: tl.constexpr = state.dtype.element_ty
    HALVES: tl.constexpr = 2 if AGAIN == "half" else 1
    rows, columns, row, part = place(parts, ROWS, COLUMNS // HALVES)
    others = columns + COLUMNS // HALVES
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
            few = maxima(x, GROUPS, VECTOR)
            if AGAIN == "half":
                y = load_scores(s, mask, rows, others, R, N, mask_row, mask_column, HAS_MASK, ACC)
                few = larger(few, maxima(y, GROUPS, VECTOR))
            top, tau = start(few, theta, gain, factor, partial, F)
        else:
            top, tau = highest(x), tl.full([1, 1], -1.0, ACC)
        y = (x - finite(top)) * factor
        held = Row(s, mask, rows, columns, R, N, mask_row, mask_column, 0 if AGAIN == "all" else y, others)
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
        if AGAIN == "half":
            y = read_again(held, others, top, factor, HAS_MASK, ACC)
            store(p, F.weigh(tl.maximum(y - tau, 0.0), theta) * inverse, rows, others, R, N)
        shift = tl.where(top == float("-inf"), 0.0, finite(top) * factor + tau)
        store_state(state, shift, tl.where(top < float("inf"), slope, float("nan")), rows, part, R)


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
    held = Row(saved, mask, rows, columns, R, N, mask_row, mask_column, dp, 0)
    a, above = slopes(held, state, scale, theta, F, HAS_MASK, ACC)
    weight = tl.sum(a, 1, keep_dims=True)
    delta = tl.sum(a * above, 1, keep_dims=True)
    delta = join_delta(weight, delta, state, partial, counters, rows, row, part, parts, R, PARTS, STAGE)
    if STAGE != "publish":
        if AGAIN:
            tl.debug_barrier()
            a, above = slopes(held, state, scale, theta, F, HAS_MASK, ACC)
        store(ds, a * (above - delta) * scale, rows, columns, R, N)
