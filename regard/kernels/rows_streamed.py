"""Rows too long for the registers: read step by step, once from memory and then from the cache.

A program goes over its columns STEP at a time, once per use: the maximum, the sums, the weights. Nothing of the row is
held, so that many programs share a multiprocessor, and what they read last is still in its caches. COLUMNS is a
multiple of STEP.
"""

import triton
import triton.language as tl

from regard.kernels import rows_online, rows_threshold
from regard.kernels.rows_online import ending, join, load_both, shift_of, terms, weight_of
from regard.kernels.rows_threshold import Row, advance, alone, maxima, start, sums_of
from regard.kernels.rows_tiles import (
    finite,
    highest,
    larger,
    load_scores,
    number,
    parameter,
    reciprocal,
    store,
    store_state,
)


@triton.jit
def span(N, parts, COLUMNS: tl.constexpr):
    """This program's row [1, 1] and as int64, its part of it, and the columns where that begins and ends."""
    program = tl.program_id(0)
    part = program % parts
    row = (program // parts).to(tl.int64)
    begin = part * COLUMNS
    return row + tl.arange(0, 1)[:, None], row, part, begin, tl.minimum(begin + COLUMNS, N)


@triton.jit
def columns_at(first, STEP: tl.constexpr):
    return first + tl.arange(0, STEP)[None, :]


@triton.jit
def forward_streamed(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, EXACT: tl.constexpr, STEP: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """p of a pointwise or ratio map. Z is summed from quick exponentials, as their errors average out."""
    ACC: tl.constexpr = state.dtype.element_ty
    rows, row, part, begin, end = span(N, parts, COLUMNS)
    scale = number(scale, ACC)
    theta = parameter(theta, theta_rows, rows, R, HAS_THETA, ACC)
    tops = tl.full([1, STEP], float("-inf"), ACC)
    zs = tl.zeros([1, STEP], ACC)
    for first in range(begin, end, STEP):
        x = load_scores(s, mask, rows, columns_at(first, STEP), R, N, mask_row, mask_column, HAS_MASK, ACC)
        tops = larger(tops, x)
        if F.family == "pointwise" and STAGE != "publish":  # at once: only a row that becomes NaN is written again
            u, v = terms(x, number(0.0, ACC), scale, theta, F, EXACT)
            store(p, u, rows, columns_at(first, STEP), R, N)
        if F.family == "ratio" and F.shift == "none":
            u, v = terms(x, number(0.0, ACC), scale, theta, F, False)
            zs += v
    top = highest(tops)
    shift = shift_of(finite(top), F)
    if F.family == "ratio" and F.shift != "none":
        for first in range(begin, end, STEP):
            x = load_scores(s, mask, rows, columns_at(first, STEP), R, N, mask_row, mask_column, HAS_MASK, ACC)
            if EXACT:  # the difference first: p's exponentials do not share the error of shift·scale
                u, v = terms(x - shift, shift * 0.0, scale, theta, F, False)
            else:
                u, v = terms(x, shift, scale, theta, F, False)
            zs += v
    z = tl.sum(zs, 1, keep_dims=True)
    top, z, shift, _fall = join(top, z, shift, scale, partial, counters, row, part, parts, F, PARTS, STAGE, ACC)
    if STAGE != "publish":
        z, inverse = ending(top, z, shift, scale, F)
        store_state(state, shift * scale, tl.where(top < float("inf"), z, float("nan")), rows, part, R)
        if F.family == "pointwise":
            end = tl.where(tl.max(tl.where(top < float("inf"), 0, 1)) > 0, end, begin)
        for first in range(begin, end, STEP):
            columns = columns_at(first, STEP)
            x = load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, ACC)
            u, v = terms(x, shift, scale, theta, F, EXACT)
            store(p, weight_of(u, z, inverse, F, EXACT), rows, columns, R, N)


@triton.jit
def backward_streamed(
    dp, saved, ds, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, EXACT: tl.constexpr, STEP: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """ds of a ratio or threshold map (a pointwise one needs no sum): δ first, then ds = scale·(a·dp − b·δ)."""
    ACC: tl.constexpr = state.dtype.element_ty
    rows, row, part, begin, end = span(N, parts, COLUMNS)
    scale = number(scale, ACC)
    theta = parameter(theta, theta_rows, rows, R, HAS_THETA, ACC)
    m = tl.load(state + rows, mask=rows < R, other=0.0)
    inverse = reciprocal(tl.load(state + R + rows, mask=rows < R, other=0.0))
    deltas = tl.zeros([1, STEP], ACC)
    weights = tl.zeros([1, STEP], ACC)
    for first in range(begin, end, STEP):
        columns = columns_at(first, STEP)
        if F.family == "threshold":
            tile = Row(saved, mask, rows, columns, R, N, mask_row, mask_column, dp)
            a, above = rows_threshold.slopes(tile, state, scale, theta, F, HAS_MASK, ACC)
            weights += a
            deltas += a * above
        else:
            above, x, _ = load_both(dp, saved, mask, rows, columns, R, N, mask_row, mask_column, F, HAS_MASK, ACC)
            u, _, _ = rows_online.slopes(x, m, scale, inverse, F, EXACT)
            deltas += u * above
    delta = tl.sum(deltas, 1, keep_dims=True)
    if F.family == "threshold":
        weight = tl.sum(weights, 1, keep_dims=True)
        delta = rows_threshold.join_delta(
            weight, delta, state, partial, counters, rows, row, part, parts, R, PARTS, STAGE
        )
    else:
        if F.slope_of_weight is None:
            delta = delta * inverse
        delta = rows_online.join_delta(delta, partial, counters, row, part, parts, PARTS, STAGE)
    if STAGE != "publish":
        for first in range(begin, end, STEP):
            columns = columns_at(first, STEP)
            if F.family == "threshold":
                tile = Row(saved, mask, rows, columns, R, N, mask_row, mask_column, dp)
                a, above = rows_threshold.slopes(tile, state, scale, theta, F, HAS_MASK, ACC)
                below = a * (above - delta) * scale
            else:
                above, x, seen = load_both(
                    dp, saved, mask, rows, columns, R, N, mask_row, mask_column, F, HAS_MASK, ACC
                )
                _, a, b = rows_online.slopes(x, m, scale, inverse, F, EXACT)
                below = rows_online.downstream(a, b, above, delta, seen, scale, inverse, F, HAS_MASK)
            store(ds, below, rows, columns, R, N)


@triton.jit
def threshold_streamed(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, TOLERANCE: tl.constexpr, STEP: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """p of a threshold map, one program per row: every step of τ goes over the row once more."""
    ACC: tl.constexpr = state.dtype.element_ty
    rows, _, part, _, _ = span(N, parts, COLUMNS)
    theta = parameter(theta, theta_rows, rows, R, HAS_THETA, ACC)
    gain = F.gain(theta) + theta * 0.0
    factor = number(scale, ACC) * gain
    tops = tl.full([1, STEP], float("-inf"), ACC)
    for first in range(0, N, STEP):
        x = load_scores(s, mask, rows, columns_at(first, STEP), R, N, mask_row, mask_column, HAS_MASK, ACC)
        tops = larger(tops, x)
    top, tau = start(maxima(tops, GROUPS, VECTOR), theta, gain, factor, partial, F)
    shift = finite(top)
    floor = tau * 0.0 - 1.0
    total, slope = tau * 0.0, tau * 0.0
    far = 1
    step = 0
    after = tau
    while (far > 0) & (step < rows_threshold.LIMIT):
        tau = after
        totals, falls, counts = tl.zeros([1, STEP], ACC), tl.zeros([1, STEP], ACC), tl.zeros([1, STEP], ACC)
        for first in range(0, N, STEP):
            x = load_scores(s, mask, rows, columns_at(first, STEP), R, N, mask_row, mask_column, HAS_MASK, ACC)
            value, fall, count = sums_of((x - shift) * factor, tau, theta, F)
            totals += value
            falls += fall
            counts += count
        total, slope, count = rows_threshold.reduced(totals, falls, counts, TOLERANCE, F)
        total, slope, count = alone(total), alone(slope), alone(count)
        after, floor, more = advance(tau, floor, total, slope, count, gain, TOLERANCE, F)
        far = tl.max(more)
        step += 1
    inverse = tl.where(top < float("inf"), reciprocal(total), float("nan"))
    frame = tl.where(top == float("-inf"), 0.0, shift * factor + tau)
    store_state(state, frame, tl.where(top < float("inf"), slope, float("nan")), rows, part, R)
    for first in range(0, N, STEP):
        columns = columns_at(first, STEP)
        x = load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, ACC)
        weight = F.weigh(tl.maximum((x - shift) * factor - tau, 0.0), theta)
        store(p, weight * inverse, rows, columns, R, N)
