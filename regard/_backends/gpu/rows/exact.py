"""Row kernels for float32 softmax and softmax1, p = exp(s)/Z, correctly rounded but for one result in thousands.

The exponential and the sums are taken in float64, which costs a float32 row little: its bytes leave time for 56
instructions per score. e^y = 2^j·2^r with |r| ≤ ½, 2^r by a polynomial good to 2⁻³⁴, ten digits.
"""

import triton
import triton.language as tl

from regard._backends.gpu.rows import tiles
from regard._backends.gpu.rows.ratio import load_gradient
from regard._backends.gpu.rows.terms import shift_from_max


@triton.constexpr_function
def split_constant(x):
    """Splits a Python float into two float32 numbers."""
    wide = x * (2.0**29 + 1.0)
    near = wide - (wide - x)
    return near, x - near


@triton.jit
def constant64(x: tl.constexpr):
    """A constant in float64, to 48 bits; Triton would round a bare one to float32."""
    both: tl.constexpr = split_constant(x)
    return tl.cast(both[0], tl.float64) + tl.cast(both[1], tl.float64)


@triton.jit
def exp2_float64(x, shift, factor):
    """2^((x − shift)·factor) in float64, x float32, shift and factor float64; the exponent lies in −1000 … 0."""
    large = constant64(6755399441055744.0)  # 1.5·2⁵²: numbers that large have no fraction; j is in the last bits
    d = x.to(tl.float64) - shift
    t = tl.fma(d, factor, large)
    j = t - large
    r = tl.fma(d, factor, -j)
    # 2^r: minimax, relative error
    q = tl.fma(r, constant64(1.5196156492007747e-05), constant64(0.00015466756326751142))
    q = tl.fma(r, q, constant64(0.001333393505578615))
    q = tl.fma(r, q, constant64(0.009618038132025485))
    q = tl.fma(r, q, constant64(0.055504103659911576))
    q = tl.fma(r, q, constant64(0.24022651066561426))
    q = tl.fma(r, q, constant64(0.693147180704532))
    q = tl.fma(r, q, constant64(1.0))
    return (q.to(tl.int64, bitcast=True) + (t.to(tl.int64, bitcast=True) << 52)).to(tl.float64, bitcast=True)


@triton.jit
def merge_parts_float64(top, z, shift, scale, partial, counters, row, part, parts, F: tl.constexpr,
                        PARTS: tl.constexpr, STAGE: tl.constexpr):  # fmt: skip
    """(maximum, z, shift) of the whole row from those of a part, and the factor from the part's shift to the row's.

    All are [1]; z and the factor are float64.
    """
    near, rest = split_float64(z)
    partial = tiles.share_sums((top, near, rest), partial, counters, row, part, parts, STAGE)
    factor = z * 0.0 + 1.0
    if STAGE != "publish":
        tops = tiles.gather_sums(partial, 0, parts, float("-inf"), PARTS)
        sums = tiles.gather_sums(partial, 1, parts, 0.0, PARTS).to(tl.float64) + tiles.gather_sums(
            partial, 2, parts, 0.0, PARTS
        )
        own = top
        top = tl.zeros([1], tl.float32) + tl.reduce(tops, 0, tiles.nan_maximum)
        common = shift_from_max(tiles.finite_or_zero(top), F)
        distance = shift_from_max(tiles.finite_or_zero(tops), F).to(tl.float64) - tl.sum(common.to(tl.float64))
        factors = tl.exp(tl.maximum(distance * scale, -200.0))
        factor = tl.exp(tl.maximum((shift.to(tl.float64) - common) * scale, -200.0))
        # a part with no visible score has no shift, and its sum is 0
        z = tl.zeros([1], tl.float64) + tl.sum(tl.where(tops == float("-inf"), 0.0, sums * factors), 0)
        factor = tl.where(own == float("-inf"), 0.0, factor)
        shift = common
    return top, z, shift, factor


@triton.jit
def split_float64(x):
    """Splits a float64 into two float32, its nearest and the rest."""
    near = x.to(tl.float32)
    return near, (x - near).to(tl.float32)


@triton.jit
def exp_float64(x, shift, scale):
    """exp((x − shift)·scale) in float64 of a tile of scores, 0 where they are −inf; shift and scale per row.

    e^−105 is 0 in float32, so scores are clamped at shift − 105/scale, −inf too; they are halved, so that this limit is
    finite. Next to a shift of 10⁹ or more floats lie so far apart that only the maximum has weight, whatever the scale;
    the scale is limited there to keep the exponent in range.
    """
    shift = 0.5 * shift
    distance = tl.abs(shift) * 2.0**-22
    lowest = tl.maximum(shift - tl.maximum(52.5 / scale.to(tl.float32), distance), -3.4e38)
    scale = tl.minimum(2.0 * scale, (420.0 / tl.maximum(distance, 1e-37)).to(tl.float64))
    factor = scale * constant64(1.4426950408889634)
    return exp2_float64(tl.maximum(0.5 * x, lowest), shift.to(tl.float64), factor)


@triton.jit
def forward_exact(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, AHEAD: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """Weights of float32 softmax or softmax1, by float64 exponentials.

    The tile is [ROWS, K, LANES]: a lane holds K numbers of a short row; K = 1 for a long one.
    """
    part = tl.program_id(0) % parts
    first = (tl.program_id(0) // parts).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)  # [ROWS], as all that follows but the tile
    columns = tl.arange(0, COLUMNS // LANES)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    columns += part * COLUMNS
    scale = tl.zeros([1], tl.float64) + scale
    tile = tiles.Tile(s, mask, tiles.per_row(row), columns, R, N, mask_row, mask_column)
    x = tiles.load_scores(tile, HAS_MASK, tl.float32)
    if AHEAD > 0:
        tiles.prefetch_tile(s, R, N, parts, COLUMNS, AHEAD)
    top = tl.reduce(tl.reduce(x, 1, tiles.nan_maximum), 1, tiles.nan_maximum)
    shift = shift_from_max(tiles.finite_or_zero(top), F)
    e = exp_float64(x, tiles.per_row(shift), tiles.per_row(scale))
    z = tl.sum(tl.sum(e, 1), 1)
    if STAGE != "whole":
        top, z, shift, factor = merge_parts_float64(
            top, z, shift, scale, partial, counters, first, part, parts, F, PARTS, STAGE
        )
    if STAGE != "publish":
        z = tl.where(top == float("-inf"), 0.0, z + F.rest(exp_minus_shift_float64(shift, scale, F)))
        inverse = reciprocal_float64(z)
        if STAGE != "whole":
            inverse = inverse * factor
        inverse = tl.where(top < float("inf"), inverse, float("nan"))
        tiles.store(p, (e * tiles.per_row(inverse)).to(tl.float32), tile)
        z = tl.where(top < float("inf"), z, float("nan"))
        tiles.store_state(state, shift, z.to(tl.float32), row, part, R)


@triton.jit
def reciprocal_float64(z):
    """1/z in float64 by a Newton step from the float32 quotient, and 0 for 0: a row without weight."""
    guess = (1.0 / tl.where(z == 0.0, 1.0, z).to(tl.float32)).to(tl.float64)
    return tl.where(z == 0.0, 0.0, guess * (2.0 - z * guess))


@triton.jit
def exp_minus_shift_float64(shift, scale, F: tl.constexpr):
    """c = exp(−shift·scale), the constant term of softmax1, whose shift is at least 0."""
    if F.shift == "max0":
        c = tl.exp(tl.maximum(-shift * scale, -700.0))
    else:
        c = tl.exp(-shift * scale.to(tl.float32))
    return c


@triton.jit
def merge_delta_float64(delta, partial, counters, row, part, parts, PARTS: tl.constexpr, STAGE: tl.constexpr):
    """δ of the whole row, in float64, from that of a part."""
    if STAGE != "whole":
        near, rest = split_float64(delta)
        partial = tiles.share_sums((near, rest), partial, counters, row, part, parts, STAGE)
        if STAGE != "publish":
            near = tl.sum(tiles.gather_sums(partial, 0, parts, 0.0, PARTS).to(tl.float64), 0)
            delta = tl.zeros_like(delta) + (near + tl.sum(tiles.gather_sums(partial, 1, parts, 0.0, PARTS), 0))
    return delta


@triton.jit
def subtract_with_error(x, y):
    """x − y and its rounding error."""
    d = x - y
    back = d - x
    return d, (x - (d - back)) - (y + back)


@triton.jit
def backward_exact(
    dp, saved, ds, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """ds = scale·p·(dp − δ) with δ = Σ p·dp, from the weights."""
    rows, columns, row, part = tiles.locate_tile(parts, ROWS, COLUMNS)
    tile = tiles.Tile(saved, mask, rows, columns, R, N, mask_row, mask_column)
    upstream, p, visible = load_gradient(dp, tile, F, HAS_MASK, True, tl.float32)
    product = p * upstream
    lost = tl.fma(p, upstream, -product)
    delta = tl.sum(product.to(tl.float64), 1, keep_dims=True) + tl.sum(lost, 1, keep_dims=True)
    delta = merge_delta_float64(delta, partial, counters, row, part, parts, PARTS, STAGE)
    if STAGE != "publish":
        near, rest = split_float64(delta)
        d, lost = subtract_with_error(upstream, near)
        gradient = tl.fma(p, d, p * (lost - rest))
        near, rest = split_float64(tl.zeros([1, 1], tl.float64) + scale)
        gradient = tl.fma(gradient, near, gradient * rest)
        if HAS_MASK:
            gradient = tl.where(visible, gradient, 0.0)
        tiles.store(ds, gradient, tile)
