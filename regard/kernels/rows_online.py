"""Rows of the pointwise and ratio families: p = f(s), or p = u/Z from one running shift; and their backward."""

import triton
import triton.language as tl

from regard.kernels.rows_tiles import (
    exponential,
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
    prefetch,
    publish,
    reciprocal,
    store,
    store_state,
    visible,
)


@triton.jit
def shift_of(m, F: tl.constexpr):
    """What a map subtracts from scores whose maximum is m."""
    if F.shift == "max":
        return m
    elif F.shift == "max0":
        return tl.maximum(m, 0.0)
    else:
        return m * 0.0


@triton.jit
def terms(x, shift, scale, theta, F: tl.constexpr):
    """(u, v) of scores, 0 where they are −inf."""
    if F.family == "ratio":
        e = exponential(x, shift, scale)
        c = tl.exp(-shift * scale)
        u = F.numerator(e, x * scale, c)
        v = F.denominator(e, x * scale, c)
        if not F.exponential:  # an exponential is 0 there by itself
            u = tl.where(x > float("-inf"), u, 0.0)
            v = tl.where(x > float("-inf"), v, 0.0)
    else:
        u = tl.where(x > float("-inf"), F.weigh(x * scale, theta), 0.0)
        v = u
    return u, v


@triton.jit
def join(top, z, shift, scale, partial, counters, row, part, parts, F: tl.constexpr, PARTS: tl.constexpr,
         STAGE: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """(top, z, shift) of the whole row from those of a part, and what the part's terms are multiplied by."""
    fall = z * 0.0 + 1.0
    if STAGE != "whole":
        partial += row * 2 * parts
        if STAGE != "finish":
            publish(partial, top, 0, part, parts)
            publish(partial, z, 1, part, parts)
        if STAGE == "meet":
            meet(counters + row, parts)
        if STAGE != "publish":
            tops = gather(partial, 0, parts, float("-inf"), PARTS)
            sums = gather(partial, 1, parts, 0.0, PARTS)
            own = top
            top = tl.zeros([1, 1], ACC) + tl.reduce(tops, 0, larger)
            if F.family == "ratio":  # to the row's common shift; a part that sees nothing has none, and weighs 0
                common = shift_of(finite(top), F)
                falls = tl.exp((shift_of(finite(tops), F) - tl.sum(common)) * tl.sum(scale))
                fall = tl.exp((shift - common) * scale)
                z = tl.zeros([1, 1], ACC) + tl.sum(tl.where(tops == float("-inf"), 0.0, sums * falls), 0)
                fall = tl.where(own == float("-inf"), 0.0, fall)
                shift = common
    return top, z, shift, fall


@triton.jit
def ending(top, z, shift, scale, F: tl.constexpr):
    """(Z, 1/Z) with the silent term; 1/Z is NaN for a row that becomes NaN."""
    if F.family == "ratio":
        z = tl.where(top == float("-inf"), 0.0, z + F.rest(tl.exp(-shift * scale)))
        inverse = reciprocal(z)
    else:
        inverse = z + 1.0
    return z, tl.where(top < float("inf"), inverse, float("nan"))


@triton.jit
def forward_online(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, AGAIN: tl.constexpr, AHEAD: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """AGAIN: the tile is read again, from the cache, for each of its uses, so that no register holds it between."""
    ACC: tl.constexpr = state.dtype.element_ty
    rows, columns, row, part = place(parts, ROWS, COLUMNS)
    scale = number(scale, ACC)
    theta = parameter(theta, theta_rows, rows, R, HAS_THETA, ACC)
    x = load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, ACC)
    if AHEAD > 0:
        prefetch(s, R, N, parts, COLUMNS, AHEAD)
    top = highest(x)  # [ROWS, 1], of the bare scores: their difference from it is exact where weights are large
    shift = shift_of(finite(top), F)
    z = finite(top) * 0.0
    if AGAIN and F.family == "ratio":
        tl.debug_barrier()
        x = load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, ACC)
    u, v = terms(x, shift, scale, theta, F)
    if F.family == "ratio":
        z = tl.sum(v, 1, keep_dims=True)
    top, z, shift, fall = join(top, z, shift, scale, partial, counters, row, part, parts, F, PARTS, STAGE, ACC)
    if STAGE != "publish":
        if AGAIN:
            tl.debug_barrier()
            x = load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, ACC)
            u, v = terms(x, shift, scale, theta, F)
        z, inverse = ending(top, z, shift, scale, F)
        if STAGE != "whole" and not AGAIN:
            u = u * fall
        store(p, u * inverse, rows, columns, R, N)
        store_state(state, shift * scale, tl.where(top < float("inf"), z, float("nan")), rows, part, R)


@triton.jit
def load_both(dp, saved, mask, rows, columns, R, N, mask_row, mask_column, F: tl.constexpr, HAS_MASK: tl.constexpr,
              ACC: tl.constexpr):  # fmt: skip
    """(dp, p or s, who is seen); dp is 0 where nobody is."""
    above = load(dp, rows, columns, R, N, 0.0, ACC)
    if F.slope_of_weight is not None:
        x = load(saved, rows, columns, R, N, 0.0, ACC)
        seen = columns < N
        if HAS_MASK:
            seen = visible(mask, rows, columns, R, N, mask_row, mask_column)
            above = tl.where(seen, above, 0.0)
    else:
        x = load_scores(saved, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, ACC)
        seen = x != float("-inf")
        if HAS_MASK or F.shift == "none":
            x = tl.where(seen, x, 0.0)
            above = tl.where(seen, above, 0.0)
        else:  # exp(s − m) is 0 of a score as low as this, and so are its slopes
            x = tl.maximum(x, -1e30, propagate_nan=tl.PropagateNan.ALL)
    return above, x, seen


@triton.jit
def slopes(x, m, scale, inverse, F: tl.constexpr):
    """(p, a, b) of a ratio, from p; or all three times Z, from s."""
    if F.slope_of_weight is not None:
        p = x
        a = F.slope_of_weight(p, inverse)
        b = a
    else:
        x = x * scale
        e = exponential(x, m, 1.0)
        c = tl.exp(-m)
        p = F.numerator(e, x, c)
        a = F.numerator_slope(e, x, c)
        b = F.denominator_slope(e, x, c)
    return p, a, b


@triton.jit
def downstream(a, b, above, delta, seen, scale, inverse, F: tl.constexpr, HAS_MASK: tl.constexpr):
    """ds = scale·(a·dp − b·δ) of a ratio."""
    if F.slope_of_weight is not None:
        below = a * (above - delta) * scale
    else:
        below = (a * above - b * delta) * (inverse * scale)
    if HAS_MASK or (F.slope_of_weight is None and F.shift == "none"):
        below = tl.where(seen, below, 0.0)
    return below


@triton.jit
def join_delta(delta, partial, counters, row, part, parts, PARTS: tl.constexpr, STAGE: tl.constexpr):
    if STAGE != "whole":
        if STAGE != "finish":
            publish(partial + row * parts, delta, 0, part, parts)
        if STAGE == "meet":
            meet(counters + row, parts)
        if STAGE != "publish":
            delta = tl.zeros_like(delta) + tl.sum(gather(partial + row * parts, 0, parts, 0.0, PARTS), 0)
    return delta


@triton.jit
def backward_online(
    dp, saved, ds, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, AGAIN: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """ds = scale·(a·dp − b·δ) with δ = Σ p·dp for ratios, δ = 0 for pointwise maps."""
    ACC: tl.constexpr = state.dtype.element_ty
    rows, columns, row, part = place(parts, ROWS, COLUMNS)
    scale = number(scale, ACC)
    theta = parameter(theta, theta_rows, rows, R, HAS_THETA, ACC)
    above, x, seen = load_both(dp, saved, mask, rows, columns, R, N, mask_row, mask_column, F, HAS_MASK, ACC)
    if F.family == "ratio":
        m = tl.load(state + rows, mask=rows < R, other=0.0)
        z = tl.load(state + R + rows, mask=rows < R, other=0.0)
        inverse = reciprocal(z)
        p, a, b = slopes(x, m, scale, inverse, F)
        delta = tl.sum(p * above, 1, keep_dims=True)
        if F.slope_of_weight is None:
            delta = delta * inverse
        delta = join_delta(delta, partial, counters, row, part, parts, PARTS, STAGE)
        if AGAIN and STAGE != "publish":
            tl.debug_barrier()
            above, x, seen = load_both(dp, saved, mask, rows, columns, R, N, mask_row, mask_column, F, HAS_MASK, ACC)
            _, a, b = slopes(x, m, scale, inverse, F)
        below = downstream(a, b, above, delta, seen, scale, inverse, F, HAS_MASK)
    else:
        if F.slope_of_weight is not None:
            below = F.slope_of_weight(x, theta) * above * scale
        else:
            below = F.slope(x * scale, theta) * above * scale
        if HAS_MASK or F.slope_of_weight is None:
            below = tl.where(seen, below, 0.0)
    if STAGE != "publish":
        store(ds, below, rows, columns, R, N)
