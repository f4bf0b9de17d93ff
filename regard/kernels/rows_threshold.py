"""Rows of the threshold family: p = value(max(y − τ, 0)) with Σp = 1, y = gain·(s − max); and their backward.

From a point τ the sums over the current support give the next one. F(τ) = Σ value is convex, so Newton's step never
passes the solution from the left. For value = t² two better ones: √F is a norm, so convex too, and Newton's step on it
is twice as long where F is large; the root of the quadratic on the current support is exact once the support is, but
may pass the solution: it then comes back from the right, never behind the last Newton step (`floor`).
"""

import triton
import triton.language as tl

from regard.kernels.rows_tiles import (
    finite,
    gather,
    highest,
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
COUNT = tl.constexpr(8)  # numbers that a part publishes: its maximum and τ, and two rounds of three sums in turn
FOUND = tl.constexpr(4)  # numbers that `solve_rows` finds: max, τ, Σ value, Σ slope


@triton.jit
def sums(y, tau, theta, F: tl.constexpr):
    """Σ value, Σ slope and the size of the support at τ, each [ROWS, 1]."""
    t = tl.maximum(y - tau, 0.0)
    total = tl.sum(F.weigh(t, theta), 1, keep_dims=True)
    slope = tl.sum(F.slope(t, theta).to(y.dtype), 1, keep_dims=True)
    count = total
    if F.order == 2:
        count = tl.sum((t > 0.0).to(y.dtype), 1, keep_dims=True)
    return total, slope, count


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
        room = half * half - count * miss
        move = tl.where(room > 0.0, miss / (half + tl.sqrt(tl.maximum(room, 0.0))), newton)
    else:
        newton = miss / fall
        move = newton
    floor = tl.where(miss >= 0.0, tl.maximum(floor, tau + newton), floor)
    after = tl.maximum(tau + move, floor)
    far = (tl.abs(miss) > TOLERANCE) & (tl.abs(after - tau) > 0.5 * TOLERANCE * tl.abs(tau))
    return after, floor, (alive & far).to(tl.int32)


@triton.jit
def solve(y, tau, theta, gain, partial, counter, row, part, parts, TOLERANCE: tl.constexpr, F: tl.constexpr,
          PARTS: tl.constexpr, SHARED: tl.constexpr):  # fmt: skip
    """τ with Σ value = 1, and the sums there. SHARED: over all parts of the row, which meet at every step."""
    floor = tau * 0.0 - 1.0
    total, slope, count = sums(y, tau, theta, F)
    if SHARED:
        total, slope, count = share(total, slope, count, 0, partial, counter, row, part, parts, PARTS, F)
    after, floor, far = advance(tau, floor, total, slope, count, gain, TOLERANCE, F)
    step = 1
    while (tl.max(far) > 0) & (step < LIMIT):
        tau = after
        total, slope, count = sums(y, tau, theta, F)
        if SHARED:
            total, slope, count = share(total, slope, count, step, partial, counter, row, part, parts, PARTS, F)
        after, floor, far = advance(tau, floor, total, slope, count, gain, TOLERANCE, F)
        step += 1
    return tau, total, slope


@triton.jit
def share(total, slope, count, step, partial, counter, row, part, parts, PARTS: tl.constexpr, F: tl.constexpr):
    """The three sums over all parts. Steps take turns in two buffers, so that none is overwritten while read."""
    which = 2 + 3 * (step % 2)
    publish(partial, total, which, row, part, parts, COUNT)
    publish(partial, slope, which + 1, row, part, parts, COUNT)
    if F.order == 2:
        publish(partial, count, which + 2, row, part, parts, COUNT)
    meet(counter, (step + 2) * parts)
    total = tl.sum(gather(partial, which, row, parts, 0.0, COUNT, PARTS), 1, keep_dims=True)
    slope = tl.sum(gather(partial, which + 1, row, parts, 0.0, COUNT, PARTS), 1, keep_dims=True)
    count = total
    if F.order == 2:
        count = tl.sum(gather(partial, which + 2, row, parts, 0.0, COUNT, PARTS), 1, keep_dims=True)
    return total, slope, count


@triton.jit
def start(partial, row, parts, factor, PARTS: tl.constexpr):
    """The row's maximum, and τ to start from: a part's own τ, where its own weights sum to 1, is a lower bound."""
    tops = gather(partial, 0, row, parts, float("-inf"), COUNT, PARTS)
    taus = gather(partial, 1, row, parts, -1.0, COUNT, PARTS)
    top = tl.max(tops, 1, keep_dims=True)
    bounds = tl.where(tops > float("-inf"), (finite(tops) - finite(top)) * factor + taus, -1.0)
    return top, tl.minimum(tl.maximum(tl.max(bounds, 1, keep_dims=True), -1.0), 0.0)


@triton.jit
def forward_threshold(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, TOLERANCE: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = state.dtype.element_ty
    rows, columns, part = place(counters, parts, ROWS, COLUMNS, STAGE)
    theta = parameter(theta, theta_rows, rows, R, HAS_THETA, ACC)
    gain = F.gain(theta) + theta * 0.0
    factor = number(scale, ACC) * gain
    x = load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, ACC)
    if STAGE == "finish":  # solve_rows has been here
        found = partial + R * COUNT * parts + rows * FOUND
        top, tau, total, slope = tl.load(found), tl.load(found + 1), tl.load(found + 2), tl.load(found + 3)
        y = (x - finite(top)) * factor
    else:
        counter = counters + 1 + tl.max(rows)
        top = highest(x)
        y = (x - finite(top)) * factor
        tau = tl.full([ROWS, 1], -1.0, ACC)
        tau, total, slope = solve(
            y, tau, theta, gain, partial, counter, rows, part, parts, TOLERANCE, F, PARTS, False
        )
        if STAGE != "whole":
            publish(partial, top, 0, rows, part, parts, COUNT)
            publish(partial, tau, 1, rows, part, parts, COUNT)
        if STAGE == "meet":
            meet(counter, parts)
            top, tau = start(partial, rows, parts, factor, PARTS)
            y = (x - finite(top)) * factor
            tau, total, slope = solve(
                y, tau, theta, gain, partial, counter, rows, part, parts, TOLERANCE, F, PARTS, True
            )
    if STAGE != "publish":
        inverse = reciprocal(total)
        inverse = tl.where(top < float("inf"), inverse, float("nan"))
        weight = F.weigh(tl.maximum(y - tau, 0.0), theta) * inverse
        store(p, weight, rows, columns, R, N)
        empty = top == float("-inf")
        frame = tl.where(empty, 0.0, finite(top) * factor + tau)
        store_state(state, frame, tl.where(top < float("inf"), slope, float("nan")), rows, part, R)


@triton.jit
def solve_rows(
    s, mask, theta_rows, partial, R, N, parts, mask_row, mask_column, scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, TOLERANCE: tl.constexpr,
):  # fmt: skip
    """Between "publish" and "finish": one program per row reads it as often as τ takes steps."""
    ACC: tl.constexpr = partial.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) + tl.zeros([1, 1], tl.int64)
    theta = parameter(theta, theta_rows, rows, R, HAS_THETA, ACC)
    gain = F.gain(theta) + theta * 0.0
    factor = number(scale, ACC) * gain
    top, tau = start(partial, rows, parts, factor, PARTS)
    floor = tau * 0.0 - 1.0
    after = tau
    total, slope, count = tau * 0.0, tau * 0.0, tau * 0.0
    far = tl.full([1, 1], 1, tl.int32)
    step = 0
    while (tl.max(far) > 0) & (step < LIMIT):
        tau = after
        total, slope, count = tau * 0.0, tau * 0.0, tau * 0.0
        lost_total, lost_slope = tau * 0.0, tau * 0.0
        for first in range(0, N, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)[None, :]
            x = load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, ACC)
            more_total, more_slope, more_count = sums((x - finite(top)) * factor, tau, theta, F)
            total, lost_total = add(total, lost_total, more_total)
            slope, lost_slope = add(slope, lost_slope, more_slope)
            count += more_count
        after, floor, far = advance(tau, floor, total, slope, count, gain, TOLERANCE, F)
        step += 1
    found = partial + R * COUNT * parts + rows * FOUND
    tl.store(found, top)
    tl.store(found + 1, tau)
    tl.store(found + 2, total)
    tl.store(found + 3, slope)


@triton.jit
def add(total, lost, more):
    """total + more, and what rounding lost (Kahan): a million columns sum as exactly as a thousand."""
    more = more - lost
    after = total + more
    return after, (after - total) - more


@triton.jit
def backward_threshold(
    dp, saved, ds, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """ds = scale·g′·(dp − δ) with δ = Σ g′·dp / Σ g′."""
    ACC: tl.constexpr = state.dtype.element_ty
    rows, columns, part = place(counters, parts, ROWS, COLUMNS, STAGE)
    theta = parameter(theta, theta_rows, rows, R, HAS_THETA, ACC)
    scale = number(scale, ACC)
    above = load(dp, rows, columns, R, N, 0.0, ACC)
    if F.slope_of_weight is not None:
        a = F.slope_of_weight(load(saved, rows, columns, R, N, 0.0, ACC), theta)
    else:
        x = load_scores(saved, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, ACC)
        tau = tl.load(state + rows, mask=rows < R, other=0.0)
        a = F.slope(tl.maximum(x * scale * F.gain(theta) - tau, 0.0), theta)
    if HAS_MASK:
        above = tl.where(visible(mask, rows, columns, R, N, mask_row, mask_column), above, 0.0)
    a = a.to(ACC)
    weight = tl.sum(a, 1, keep_dims=True)
    delta = tl.sum(a * above, 1, keep_dims=True)
    if STAGE != "whole":
        if STAGE != "finish":
            publish(partial, weight, 0, rows, part, parts, 2)
            publish(partial, delta, 1, rows, part, parts, 2)
        if STAGE == "meet":
            meet(counters + 1 + tl.max(rows), parts)
        if STAGE != "publish":
            weight = tl.sum(gather(partial, 0, rows, parts, 0.0, 2, PARTS), 1, keep_dims=True)
            delta = tl.sum(gather(partial, 1, rows, parts, 0.0, 2, PARTS), 1, keep_dims=True)
    if STAGE != "publish":
        z = tl.load(state + R + rows, mask=rows < R, other=0.0)
        delta = tl.where(z == z, delta / tl.where(weight == 0.0, 1.0, weight), z)  # a NaN row stays NaN
        store(ds, a * (above - delta) * scale, rows, columns, R, N)
