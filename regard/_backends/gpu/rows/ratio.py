"""Row kernels of the ratio family, p = u/Z with one shift per row, and of the pointwise family, p = f(s).

`forward_ratio` and `backward_ratio` hold a tile in registers, or (AGAIN) read it again from the cache for each use.
`forward_pointwise` takes long pointwise rows.
"""

import triton
import triton.language as tl

from regard._backends.gpu.rows import tiles
from regard._backends.gpu.rows.terms import compute_terms, exp_minus_shift, is_near_zero, shift_from_max


@triton.jit
def sum_denominators(x, shift, scale, F: tl.constexpr, TRAITS: tl.constexpr, HALF: tl.constexpr):
    """Σv over a tile's columns, [ROWS, 1]."""
    CANCELS: tl.constexpr = F.differs and not HALF and x.dtype == tl.float32
    if CANCELS and is_near_zero(shift, scale):
        _u, v = compute_terms(x, shift, scale, 0.0, F, TRAITS, HALF, True)
        z = tl.sum(v, 1, keep_dims=True)
    else:
        _u, v = compute_terms(x, shift, scale, 0.0, F, TRAITS, HALF, False)
        z = tl.sum(v, 1, keep_dims=True)
    return z


@triton.jit
def store_weights(p, x, shift, scale, inverse, theta, tile, F: tl.constexpr, TRAITS: tl.constexpr,
                  HALF: tl.constexpr):  # fmt: skip
    """Stores p = u/Z."""
    CANCELS: tl.constexpr = F.differs and not HALF and x.dtype == tl.float32
    if CANCELS and is_near_zero(shift, scale):
        u, _v = compute_terms(x, shift, scale, theta, F, TRAITS, HALF, True)
        tiles.store(p, u * inverse, tile)
    else:
        u, _v = compute_terms(x, shift, scale, theta, F, TRAITS, HALF, False)
        tiles.store(p, u * inverse, tile)


@triton.jit
def merge_parts(top, z, shift, scale, partial, counters, row, part, parts, F: tl.constexpr, PARTS: tl.constexpr,
                STAGE: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """(maximum, z, shift) of the whole row from those of a part, and the factor from the part's shift to the row's."""
    factor = z * 0.0 + 1.0
    if STAGE != "whole":
        partial = tiles.share_sums((top, z), partial, counters, row, part, parts, STAGE)
        if STAGE != "publish":
            tops = tiles.gather_sums(partial, 0, parts, float("-inf"), PARTS)
            sums = tiles.gather_sums(partial, 1, parts, 0.0, PARTS)
            own = top
            top = tl.zeros([1, 1], ACC) + tl.reduce(tops, 0, tiles.nan_maximum)
            if F.family == "ratio":  # a part with no visible score has no shift, and its sum is 0
                common = shift_from_max(tiles.finite_or_zero(top), F)
                factors = tl.exp((shift_from_max(tiles.finite_or_zero(tops), F) - tl.sum(common)) * tl.sum(scale))
                factor = tl.exp((shift - common) * scale)
                z = tl.zeros([1, 1], ACC) + tl.sum(tl.where(tops == float("-inf"), 0.0, sums * factors), 0)
                factor = tl.where(own == float("-inf"), 0.0, factor)
                shift = common
    return top, z, shift, factor


@triton.jit
def finish_sum(top, z, shift, scale, F: tl.constexpr, HALF: tl.constexpr):
    """(Z, 1/Z) with the constant term of Z; both NaN for a row that becomes NaN."""
    if F.family == "ratio":
        z = tl.where(top == float("-inf"), 0.0, z + F.rest(exp_minus_shift(shift, scale, HALF)))
        inverse = tiles.reciprocal(z)
        if F.shift == "none":
            top = tiles.nan_maximum(top, z)  # a sum that overflows makes the row NaN
    else:
        inverse = z + 1.0
    return tl.where(top < float("inf"), z, float("nan")), tl.where(top < float("inf"), inverse, float("nan"))


@triton.jit
def forward_ratio(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, TRAITS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, AGAIN: tl.constexpr, AHEAD: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """Weights of the ratio and pointwise families. AGAIN: the tile is read from the cache for each use."""
    ACC: tl.constexpr = state.dtype.element_ty
    HALF: tl.constexpr = s.dtype.element_ty.primitive_bitwidth == 16
    rows, columns, row, part = tiles.locate_tile(parts, ROWS, COLUMNS)
    tile = tiles.Tile(s, mask, rows, columns, R, N, mask_row, mask_column)
    scale = tiles.scalar_tile(scale, ACC)
    theta = tiles.load_theta(theta, theta_rows, rows, R, HAS_THETA, ACC)
    x = tiles.load_scores(tile, HAS_MASK, ACC)
    if AHEAD > 0:
        tiles.prefetch_tile(s, R, N, parts, COLUMNS, AHEAD)
    top = tiles.row_maximum(x)  # [ROWS, 1], before scaling: differences from it are exact where weights are large
    shift = shift_from_max(tiles.finite_or_zero(top), F)
    z = tiles.finite_or_zero(top) * 0.0
    if AGAIN and F.family == "ratio":
        tl.debug_barrier()
        x = tiles.load_scores(tile, HAS_MASK, ACC)
    if F.family == "ratio":
        z = sum_denominators(x, shift, scale, F, TRAITS, HALF)
    top, z, common, factor = merge_parts(
        top, z, shift, scale, partial, counters, row, part, parts, F, PARTS, STAGE, ACC
    )
    if STAGE != "publish":
        z, inverse = finish_sum(top, z, common, scale, F, HALF)
        if AGAIN:
            tl.debug_barrier()
            x = tiles.load_scores(tile, HAS_MASK, ACC)
            shift = common
        elif STAGE != "whole":
            inverse = inverse * factor
        store_weights(p, x, shift, scale, inverse, theta, tile, F, TRAITS, HALF)
        tiles.store_state(state, common, z, rows, part, R)


@triton.jit
def forward_pointwise(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, TRAITS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, STEP: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """Weights of a long row, or of COLUMNS of a shared one, each STEP columns written as soon as they are read.

    A row that holds NaN or +inf becomes NaN as a whole, which is known only after all of it has been read: such a row
    is written a second time.
    """
    ACC: tl.constexpr = state.dtype.element_ty
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts).to(tl.int64)
    rows = row + tl.arange(0, 1)[:, None]
    begin = part * COLUMNS
    end = tl.minimum(begin + COLUMNS, N)
    steps = tiles.Tile(s, mask, rows, tl.arange(0, STEP)[None, :], R, N, mask_row, mask_column)
    scale = tiles.scalar_tile(scale, ACC)
    theta = tiles.load_theta(theta, theta_rows, rows, R, HAS_THETA, ACC)
    zero = tiles.scalar_tile(0.0, ACC)
    tops = tl.full([1, STEP], float("-inf"), ACC)
    if STAGE != "finish":
        for first in range(begin, end, STEP):
            tile = tiles.move_tile(steps, first + steps.columns)
            x = tiles.load_scores(tile, HAS_MASK, ACC)
            tops = tiles.nan_maximum(tops, x)
            u, _v = compute_terms(x, zero, scale, theta, F, TRAITS, False, False)
            tiles.store(p, u, tile)
    top, _z, _shift, _factor = merge_parts(
        tiles.row_maximum(tops), zero, zero, scale, partial, counters, row, part, parts, F, PARTS, STAGE, ACC
    )
    if STAGE != "publish":
        bad = tl.where(top < float("inf"), 0.0, float("nan"))
        tiles.store_state(state, zero, bad, rows, part, R)
        if tl.max(tl.where(top < float("inf"), 0, 1)) > 0:
            for first in range(begin, end, STEP):
                tiles.store(p, tl.zeros([1, STEP], ACC) + bad, tiles.move_tile(steps, first + steps.columns))


@triton.jit
def load_gradient(dp, tile, F: tl.constexpr, HAS_MASK: tl.constexpr, SLOPES_VANISH: tl.constexpr, ACC: tl.constexpr):
    """(dp, p or s, visible); `tile.s` holds p where the normaliser has a slope_of_weight. dp is 0 where masked."""
    upstream = tiles.load(dp, tile, 0.0, ACC)
    if F.slope_of_weight is not None:
        x = tiles.load(tile.s, tile, 0.0, ACC)
        visible = tile.columns < tile.N
        if HAS_MASK:
            visible = tiles.load_visible(tile)
            upstream = tl.where(visible, upstream, 0.0)
    else:
        x = tiles.load_scores(tile, HAS_MASK, ACC)
        visible = x != float("-inf")
        if HAS_MASK or F.shift == "none":
            x = tl.where(visible, x, 0.0)
            upstream = tl.where(visible, upstream, 0.0)
        elif not SLOPES_VANISH:  # a finite score so low that exp(s − m) and its slopes are 0
            LOWEST: tl.constexpr = -1e200 if tl.float64 == ACC else -3e38
            x = tl.maximum(x, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    return upstream, x, visible


@triton.jit
def ratio_slopes(x, shift, scale, inverse, F: tl.constexpr, HALF: tl.constexpr):
    """(a, b) of a ratio from p; or both times Z, from s."""
    if F.slope_of_weight is not None:
        a = F.slope_of_weight(x, inverse)
        b = a
    else:
        y = x * scale
        e, c = tiles.shifted_exp(x, shift, scale, HALF), exp_minus_shift(shift, scale, HALF)
        a = F.numerator_slope(e, y, c)
        b = F.denominator_slope(e, y, c)
    return a, b


@triton.jit
def sum_delta(x, upstream, shift, scale, inverse, F: tl.constexpr, TRAITS: tl.constexpr, HALF: tl.constexpr):
    """δ = Σ p·dp over a tile's columns, [ROWS, 1]."""
    CANCELS: tl.constexpr = F.differs and not HALF and x.dtype == tl.float32
    if F.slope_of_weight is not None:
        delta = tl.sum(x * upstream, 1, keep_dims=True)
    elif CANCELS and is_near_zero(shift, scale):
        u, _v = compute_terms(x, shift, scale, 0.0, F, TRAITS, HALF, True)
        delta = tl.sum(u * upstream, 1, keep_dims=True) * inverse
    else:
        u, _v = compute_terms(x, shift, scale, 0.0, F, TRAITS, HALF, False)
        delta = tl.sum(u * upstream, 1, keep_dims=True) * inverse
    return delta


@triton.jit
def ratio_gradient(a, b, upstream, delta, visible, scale, inverse, F: tl.constexpr, SELECT: tl.constexpr):
    """ds = scale·(a·dp − b·δ) of a ratio. SELECT: 0 where not visible."""
    if F.slope_of_weight is not None:
        ds = a * (upstream - delta) * scale
    else:
        ds = (a * upstream - b * delta) * (inverse * scale)
    if SELECT or (F.slope_of_weight is None and F.shift == "none"):
        ds = tl.where(visible, ds, 0.0)
    return ds


@triton.jit
def merge_delta(delta, partial, counters, row, part, parts, PARTS: tl.constexpr, STAGE: tl.constexpr):
    """δ of the whole row from that of a part."""
    if STAGE != "whole":
        partial = tiles.share_sums((delta,), partial, counters, row, part, parts, STAGE)
        if STAGE != "publish":
            delta = tl.zeros_like(delta) + tl.sum(tiles.gather_sums(partial, 0, parts, 0.0, PARTS), 0)
    return delta


@triton.jit
def backward_ratio(
    dp, saved, ds, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, TRAITS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, AGAIN: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """ds = scale·(a·dp − b·δ) with δ = Σ p·dp for ratios, δ = 0 for pointwise normalisers."""
    ACC: tl.constexpr = state.dtype.element_ty
    rows, columns, row, part = tiles.locate_tile(parts, ROWS, COLUMNS)
    tile = tiles.Tile(saved, mask, rows, columns, R, N, mask_row, mask_column)
    scale = tiles.scalar_tile(scale, ACC)
    theta = tiles.load_theta(theta, theta_rows, rows, R, HAS_THETA, ACC)
    upstream, x, visible = load_gradient(dp, tile, F, HAS_MASK, TRAITS.slopes_vanish, ACC)
    if F.family == "ratio":
        HALF: tl.constexpr = saved.dtype.element_ty.primitive_bitwidth == 16
        shift = tl.load(state + rows, mask=rows < R, other=0.0)
        inverse = tiles.reciprocal(tl.load(state + R + rows, mask=rows < R, other=0.0))
        delta = sum_delta(x, upstream, shift, scale, inverse, F, TRAITS, HALF)
        delta = merge_delta(delta, partial, counters, row, part, parts, PARTS, STAGE)
        if AGAIN and STAGE != "publish":
            tl.debug_barrier()
            upstream, x, visible = load_gradient(dp, tile, F, HAS_MASK, TRAITS.slopes_vanish, ACC)
        a, b = ratio_slopes(x, shift, scale, inverse, F, HALF)
        gradient = ratio_gradient(a, b, upstream, delta, visible, scale, inverse, F, HAS_MASK)
    else:
        if F.slope_of_weight is not None:
            gradient = F.slope_of_weight(x, theta) * upstream * scale
        else:
            gradient = F.slope(x * scale, theta) * upstream * scale
        if HAS_MASK or F.slope_of_weight is None:
            gradient = tl.where(visible, gradient, 0.0)
    if STAGE != "publish":
        tiles.store(ds, gradient, tile)
