"""Rows of the pointwise and ratio families: p = f(s), or p = u/Z from one running shift; and their backward."""

import triton
import triton.language as tl

from regard.kernels.rows_tiles import (
    exponential,
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


@triton.jit
def shift_of(m, F: tl.constexpr):
    """What a ratio subtracts from scores whose maximum is m."""
    if F.shift == "none":
        return m * 0.0
    elif F.shift == "max0":
        return tl.maximum(m, 0.0)
    else:
        return m


@triton.jit
def forward_online(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, EXACT: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = state.dtype.element_ty
    rows, columns, part = place(counters, parts, ROWS, COLUMNS, STAGE)
    scale = number(scale, ACC)
    theta = parameter(theta, theta_rows, rows, R, HAS_THETA, ACC)
    x = load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, ACC)
    top = highest(x)  # [ROWS, 1], before the scale, so that the difference below is exact near the maximum
    seen = x > float("-inf")
    if F.family == "ratio":
        shift = shift_of(finite(top), F)
        e = exponential((x - shift) * scale, EXACT)
        c = tl.exp(-shift * scale)
        u = tl.where(seen, F.numerator(e, x * scale, c), 0.0)
        z = tl.sum(tl.where(seen, F.denominator(e, x * scale, c), 0.0), 1, keep_dims=True)
    else:
        shift = finite(top) * 0.0
        u = tl.where(seen, F.weigh(x * scale, theta), 0.0)
        z = shift
    fall = shift * 0.0 + 1.0
    if STAGE != "whole":
        if STAGE != "finish":
            publish(partial, top, 0, rows, part, parts, 2)
            publish(partial, z, 1, rows, part, parts, 2)
        if STAGE == "meet":
            meet(counters + 1 + tl.max(rows), parts)
        if STAGE != "publish":
            tops = gather(partial, 0, rows, parts, float("-inf"), 2, PARTS)
            sums = gather(partial, 1, rows, parts, 0.0, 2, PARTS)
            top = tl.max(tops, 1, keep_dims=True)
            if F.family == "ratio":
                common = shift_of(finite(top), F)
                fall = tl.exp((shift - common) * scale)
                z = tl.sum(sums * tl.exp((shift_of(finite(tops), F) - common) * scale), 1, keep_dims=True)
                shift = common
    if STAGE != "publish":
        if F.family == "ratio":
            z = tl.where(top == float("-inf"), 0.0, z + F.rest(tl.exp(-shift * scale)))
            inverse = reciprocal(z)
        else:
            inverse = fall
        inverse = tl.where(top < float("inf"), inverse, float("nan"))
        if EXACT and F.family == "ratio":  # what 1/z lost to rounding is put back
            lost = tl.where(z == 0.0, 0.0, tl.fma(-z, inverse, 1.0) * inverse)
            weight = tl.fma(u, inverse, u * lost) * fall
        else:
            weight = u * (inverse * fall)
        store(p, weight, rows, columns, R, N)
        store_state(state, shift * scale, z, rows, part, R)


@triton.jit
def backward_online(
    dp, saved, ds, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, EXACT: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """ds = scale·(a·dp − b·δ) with δ = Σ p·dp for ratios, δ = 0 for pointwise maps."""
    ACC: tl.constexpr = state.dtype.element_ty
    rows, columns, part = place(counters, parts, ROWS, COLUMNS, STAGE)
    scale = number(scale, ACC)
    theta = parameter(theta, theta_rows, rows, R, HAS_THETA, ACC)
    above = load(dp, rows, columns, R, N, 0.0, ACC)
    if F.slope_of_weight is not None:
        x = load(saved, rows, columns, R, N, 0.0, ACC)
        seen = columns < N
    else:
        x = load(saved, rows, columns, R, N, float("-inf"), ACC)
        seen = x != float("-inf")
    if HAS_MASK:
        shown = visible(mask, rows, columns, R, N, mask_row, mask_column)
        seen = seen & shown
        above = tl.where(shown, above, 0.0)
    if F.family == "ratio":
        z = tl.load(state + R + rows, mask=rows < R, other=0.0)
        inverse = reciprocal(z)
        if F.slope_of_weight is not None:
            p = x
            a = F.slope_of_weight(p, inverse)
            b = a
        else:
            m = tl.load(state + rows, mask=rows < R, other=0.0)
            x = x * scale
            e = exponential(x - m, EXACT)
            c = tl.exp(-m)
            p = tl.where(seen, F.numerator(e, x, c) * inverse, 0.0)
            a = tl.where(seen, F.numerator_slope(e, x, c) * inverse, 0.0)
            b = tl.where(seen, F.denominator_slope(e, x, c) * inverse, 0.0)
        delta = tl.sum(p * above, 1, keep_dims=True)
        if STAGE != "whole":
            if STAGE != "finish":
                publish(partial, delta, 0, rows, part, parts, 1)
            if STAGE == "meet":
                meet(counters + 1 + tl.max(rows), parts)
            if STAGE != "publish":
                delta = tl.sum(gather(partial, 0, rows, parts, 0.0, 1, PARTS), 1, keep_dims=True)
        below = (a * above - b * delta) * scale
    else:
        if F.slope_of_weight is not None:
            below = F.slope_of_weight(x, theta) * above * scale
        else:
            below = F.slope(x * scale, theta) * above * scale
    if STAGE != "publish":
        store(ds, tl.where(seen, below, 0.0), rows, columns, R, N)
