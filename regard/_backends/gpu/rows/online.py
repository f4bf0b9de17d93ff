"""Rows of the pointwise and ratio families: p = f(s), or p = u/Z from one running shift; and their backward."""

import triton
import triton.language as tl

from regard._backends.gpu.rows.terms import shift_of, silence, suited, terms, total
from regard._backends.gpu.rows.tiles import (
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
def tell(p, x, offset, scale, inverse, theta, rows, columns, R, N, F: tl.constexpr, TRAITS: tl.constexpr,
         HALF: tl.constexpr):  # fmt: skip
    """Store p = u/Z."""
    if TRAITS.differs and not HALF and x.dtype == tl.float32:
        if tl.min(offset * scale) < 0.25:
            u, _v = terms(x, offset, scale, theta, F, TRAITS, HALF, True)
            store(p, u * inverse, rows, columns, R, N)
        else:
            u, _v = terms(x, offset, scale, theta, F, TRAITS, HALF, False)
            store(p, u * inverse, rows, columns, R, N)
    else:
        u, _v = terms(x, offset, scale, theta, F, TRAITS, HALF, False)
        store(p, u * inverse, rows, columns, R, N)


@triton.jit
def join(top, z, offset, scale, partial, counters, row, part, parts, F: tl.constexpr, TRAITS: tl.constexpr,
         PARTS: tl.constexpr, STAGE: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
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
                fall = tl.exp((offset - common) * scale)
                if TRAITS.proportional:
                    pace = suited(top, scale, TRAITS)
                    falls = falls * (tl.sum(pace) / suited(tops, tl.sum(scale), TRAITS))
                    fall = fall * (pace / suited(own, scale, TRAITS))
                z = tl.zeros([1, 1], ACC) + tl.sum(tl.where(tops == float("-inf"), 0.0, sums * falls), 0)
                fall = tl.where(own == float("-inf"), 0.0, fall)
                offset = common
    return top, z, offset, fall


@triton.jit
def ending(top, z, offset, scale, F: tl.constexpr, TRAITS: tl.constexpr, HALF: tl.constexpr):
    """(Z, 1/Z) with the silent term, both NaN for a row that becomes NaN; Z is of the scores times the scale, 1/Z of
    them as they are `suited`."""
    if F.family == "ratio":
        z = tl.where(top == float("-inf"), 0.0, z + F.rest(silence(offset, scale, HALF)))
        inverse = reciprocal(z)
        if TRAITS.proportional:
            z = z * (scale / suited(top, scale, TRAITS))
    else:
        inverse = z + 1.0
    return tl.where(top < float("inf"), z, float("nan")), tl.where(top < float("inf"), inverse, float("nan"))


@triton.jit
def forward_online(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, TRAITS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, AGAIN: tl.constexpr, AHEAD: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """AGAIN: the tile is read again, from the cache, for each of its uses, so that no register holds it between."""
    ACC: tl.constexpr = state.dtype.element_ty
    HALF: tl.constexpr = s.dtype.element_ty.primitive_bitwidth == 16
    rows, columns, row, part = place(parts, ROWS, COLUMNS)
    scale = number(scale, ACC)
    theta = parameter(theta, theta_rows, rows, R, HAS_THETA, ACC)
    x = load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, ACC)
    if AHEAD > 0:
        prefetch(s, R, N, parts, COLUMNS, AHEAD)
    top = highest(x)  # [ROWS, 1], of the bare scores: their difference from it is exact where weights are large
    offset = shift_of(finite(top), F)
    z = finite(top) * 0.0
    if AGAIN and F.family == "ratio":
        tl.debug_barrier()
        x = load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, ACC)
    pace = suited(top, scale, TRAITS)
    if F.family == "ratio":
        z = total(x, offset, pace, F, TRAITS, HALF)
    top, z, shift, fall = join(top, z, offset, scale, partial, counters, row, part, parts, F, TRAITS, PARTS, STAGE, ACC)
    if STAGE != "publish":
        z, inverse = ending(top, z, shift, scale, F, TRAITS, HALF)
        if AGAIN:  # told anew, in the row's shift
            tl.debug_barrier()
            x = load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, ACC)
            offset, pace = shift, suited(top, scale, TRAITS)
        elif STAGE != "whole":
            inverse = inverse * fall
            if TRAITS.proportional:  # a part without weight, told in a far smaller row's scale: not 0·∞
                inverse = tl.where(inverse == float("inf"), 3e38, inverse)
        tell(p, x, offset, pace, inverse, theta, rows, columns, R, N, F, TRAITS, HALF)
        store_state(state, shift, z, rows, part, R)


@triton.jit
def load_both(dp, saved, mask, rows, columns, R, N, mask_row, mask_column, F: tl.constexpr, HAS_MASK: tl.constexpr,
              ACC: tl.constexpr, FAINT: tl.constexpr = False, ENDS: tl.constexpr = False):  # fmt: skip
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
        if HAS_MASK or FAINT or F.shift == "none":
            x = tl.where(seen, x, 0.0)
            above = tl.where(seen, above, 0.0)
        elif not ENDS:  # exp(s − m) is 0 of a score as low as this, and so are its slopes
            x = tl.maximum(x, -3e38, propagate_nan=tl.PropagateNan.ALL)
    return above, x, seen


@triton.jit
def slopes(x, offset, scale, inverse, F: tl.constexpr, HALF: tl.constexpr):
    """(a, b) of a ratio, from p; or both times Z, from s."""
    if F.slope_of_weight is not None:
        a = F.slope_of_weight(x, inverse)
        b = a
    else:
        y = x * scale
        e, c = exponential(x, offset, scale, HALF), silence(offset, scale, HALF)
        a = F.numerator_slope(e, y, c)
        b = F.denominator_slope(e, y, c)
    return a, b


@triton.jit
def weighed(x, above, offset, scale, inverse, F: tl.constexpr, TRAITS: tl.constexpr, HALF: tl.constexpr):
    """Σ p·dp over a tile's columns, [ROWS, 1]."""
    if F.slope_of_weight is not None:
        delta = tl.sum(x * above, 1, keep_dims=True)
    elif TRAITS.differs and not HALF and x.dtype == tl.float32:
        if tl.min(offset * scale) < 0.25:
            u, _v = terms(x, offset, scale, 0.0, F, TRAITS, HALF, True)
            delta = tl.sum(u * above, 1, keep_dims=True) * inverse
        else:
            u, _v = terms(x, offset, scale, 0.0, F, TRAITS, HALF, False)
            delta = tl.sum(u * above, 1, keep_dims=True) * inverse
    else:
        u, _v = terms(x, offset, scale, 0.0, F, TRAITS, HALF, False)
        delta = tl.sum(u * above, 1, keep_dims=True) * inverse
    return delta


@triton.jit
def downstream(a, b, above, delta, seen, scale, inverse, F: tl.constexpr, SELECT: tl.constexpr):
    """ds = scale·(a·dp − b·δ) of a ratio."""
    if F.slope_of_weight is not None:
        below = a * (above - delta) * scale
    else:
        below = (a * above - b * delta) * (inverse * scale)
    if SELECT or (F.slope_of_weight is None and F.shift == "none"):
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
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, TRAITS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, AGAIN: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """ds = scale·(a·dp − b·δ) with δ = Σ p·dp for ratios, δ = 0 for pointwise maps."""
    ACC: tl.constexpr = state.dtype.element_ty
    rows, columns, row, part = place(parts, ROWS, COLUMNS)
    scale = number(scale, ACC)
    theta = parameter(theta, theta_rows, rows, R, HAS_THETA, ACC)
    above, x, seen = load_both(
        dp, saved, mask, rows, columns, R, N, mask_row, mask_column, F, HAS_MASK, ACC, TRAITS.faint, TRAITS.slopes_end
    )
    if F.family == "ratio":
        HALF: tl.constexpr = saved.dtype.element_ty.primitive_bitwidth == 16
        offset = tl.load(state + rows, mask=rows < R, other=0.0)
        z = tl.load(state + R + rows, mask=rows < R, other=0.0)
        inverse = reciprocal(z)
        delta = weighed(x, above, offset, scale, inverse, F, TRAITS, HALF)
        delta = join_delta(delta, partial, counters, row, part, parts, PARTS, STAGE)
        if AGAIN and STAGE != "publish":
            tl.debug_barrier()
            above, x, seen = load_both(
                dp,
                saved,
                mask,
                rows,
                columns,
                R,
                N,
                mask_row,
                mask_column,
                F,
                HAS_MASK,
                ACC,
                TRAITS.faint,
                TRAITS.slopes_end,
            )
        a, b = slopes(x, offset, scale, inverse, F, HALF)
        below = downstream(a, b, above, delta, seen, scale, inverse, F, HAS_MASK or TRAITS.faint)
    else:
        if F.slope_of_weight is not None:
            below = F.slope_of_weight(x, theta) * above * scale
        else:
            below = F.slope(x * scale, theta) * above * scale
        if HAS_MASK or F.slope_of_weight is None:
            below = tl.where(seen, below, 0.0)
    if STAGE != "publish":
        store(ds, below, rows, columns, R, N)
