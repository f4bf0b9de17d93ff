"""float32 rows of p = exp(s)/Z, correctly rounded but for one result in thousands; and their backward.

The exponential and the sums are taken in float64, which costs a float32 row little: its bytes leave time for 56
instructions per score. e^y = 2^j·2^r with |r| ≤ ½, 2^r by a polynomial good to 2⁻³⁴, ten digits.
"""

import triton
import triton.language as tl

from regard._backends.gpu.rows.online import load_both
from regard._backends.gpu.rows.terms import shift_of
from regard._backends.gpu.rows.tiles import (
    finite,
    gather,
    larger,
    load_scores,
    meet,
    place,
    prefetch,
    publish,
    store,
    store_state,
)


@triton.constexpr_function
def words(x):
    """A Python float as two float32 numbers."""
    wide = x * (2.0**29 + 1.0)
    near = wide - (wide - x)
    return near, x - near


@triton.jit
def double(x: tl.constexpr):
    """A constant in float64, 48 bits of it: a bare one would be rounded to float32 on its way."""
    both: tl.constexpr = words(x)
    return tl.cast(both[0], tl.float64) + tl.cast(both[1], tl.float64)


@triton.jit
def over(x):
    """A number per row, [ROWS], against a tile."""
    return x[:, None, None]


@triton.jit
def exponential(x, shift, factor):
    """2^((x − shift)·factor) in float64, x float32, shift and factor float64; the exponent lies in −1000 … 0."""
    large = double(6755399441055744.0)  # 1.5·2⁵²: numbers that large have no fraction, j is in their last bits
    d = x.to(tl.float64) - shift
    t = tl.fma(d, factor, large)
    j = t - large
    r = tl.fma(d, factor, -j)
    q = tl.fma(r, double(1.5196156492007747e-05), double(0.00015466756326751142))  # 2^r: minimax, relative error
    q = tl.fma(r, q, double(0.001333393505578615))
    q = tl.fma(r, q, double(0.009618038132025485))
    q = tl.fma(r, q, double(0.055504103659911576))
    q = tl.fma(r, q, double(0.24022651066561426))
    q = tl.fma(r, q, double(0.693147180704532))
    q = tl.fma(r, q, double(1.0))
    return (q.to(tl.int64, bitcast=True) + (t.to(tl.int64, bitcast=True) << 52)).to(tl.float64, bitcast=True)


@triton.jit
def join(top, z, shift, scale, partial, counters, row, part, parts, F: tl.constexpr, PARTS: tl.constexpr,
         STAGE: tl.constexpr):  # fmt: skip
    """(top, z, shift) of the whole row from those of a part, and what the part's terms are multiplied by; all [1]."""
    partial += row * 3 * parts
    if STAGE != "finish":
        near, rest = halves(z)
        publish(partial, top, 0, part, parts)
        publish(partial, near, 1, part, parts)
        publish(partial, rest, 2, part, parts)
    if STAGE == "meet":
        meet(counters + row, parts)
    fall = z * 0.0 + 1.0
    if STAGE != "publish":
        tops = gather(partial, 0, parts, float("-inf"), PARTS)
        sums = gather(partial, 1, parts, 0.0, PARTS).to(tl.float64) + gather(partial, 2, parts, 0.0, PARTS)
        own = top
        top = tl.zeros([1], tl.float32) + tl.reduce(tops, 0, larger)
        common = shift_of(finite(top), F)
        apart = shift_of(finite(tops), F).to(tl.float64) - tl.sum(common.to(tl.float64))
        falls = tl.exp(tl.maximum(apart * scale, -200.0))
        fall = tl.exp(tl.maximum((shift.to(tl.float64) - common) * scale, -200.0))
        # a part that sees nothing has no shift, and weighs 0
        z = tl.zeros([1], tl.float64) + tl.sum(tl.where(tops == float("-inf"), 0.0, sums * falls), 0)
        fall = tl.where(own == float("-inf"), 0.0, fall)
        shift = common
    return top, z, shift, fall


@triton.jit
def halves(x):
    """A float64 as two float32."""
    near = x.to(tl.float32)
    return near, (x - near).to(tl.float32)


@triton.jit
def exponentials(x, shift, scale, FAINT: tl.constexpr):
    """exp((x − shift)·scale) in float64 of a tile of scores, 0 where they are −inf; shift, scale of each row.

    e^−105 is 0: the lowest score that may weigh anything stands for all below, −inf too (none can where the scale is
    FAINT). Scores are halved, so that it is finite. Floats beside a shift of 10⁹ and more lie so far apart that all but
    the maximum weigh 0, whatever the scale: there it is made small enough for the exponent.
    """
    shift = 0.5 * shift
    apart = tl.abs(shift) * 2.0**-22
    lowest = tl.maximum(shift - tl.maximum(52.5 / scale.to(tl.float32), apart), -3.4e38)
    scale = tl.minimum(2.0 * scale, (420.0 / tl.maximum(apart, 1e-37)).to(tl.float64))
    factor = scale * double(1.4426950408889634)
    e = exponential(tl.maximum(0.5 * x, lowest), shift.to(tl.float64), factor)
    if FAINT:
        e = tl.where(x == float("-inf"), 0.0, e)
    return e


@triton.jit
def forward_exact(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, AHEAD: tl.constexpr, FAINT: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """The tile is [ROWS, K, LANES]: short rows lie K deep in a few lanes each, a long one side by side (K = 1)."""
    part = tl.program_id(0) % parts
    first = (tl.program_id(0) // parts).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)  # [ROWS], as all that follows but the tile
    columns = tl.arange(0, COLUMNS // LANES)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    columns += part * COLUMNS
    scale = tl.zeros([1], tl.float64) + scale
    x = load_scores(s, mask, over(row), columns, R, N, mask_row, mask_column, HAS_MASK, tl.float32)
    if AHEAD > 0:
        prefetch(s, R, N, parts, COLUMNS, AHEAD)
    top = tl.reduce(tl.reduce(x, 1, larger), 1, larger)
    shift = shift_of(finite(top), F)
    e = exponentials(x, over(shift), over(scale), FAINT)
    z = tl.sum(tl.sum(e, 1), 1)
    if STAGE != "whole":
        top, z, shift, fall = join(top, z, shift, scale, partial, counters, first, part, parts, F, PARTS, STAGE)
    if STAGE != "publish":
        z = tl.where(top == float("-inf"), 0.0, z + F.rest(silent(shift, scale, F)))
        inverse = reciprocal(z)
        if STAGE != "whole":
            inverse = inverse * fall
        inverse = tl.where(top < float("inf"), inverse, float("nan"))
        store(p, (e * over(inverse)).to(tl.float32), over(row), columns, R, N)
        z = tl.where(top < float("inf"), z, float("nan"))
        store_state(state, shift, z.to(tl.float32), row, part, R)


@triton.jit
def reciprocal(z):
    """1/z by Newton's step from the float32 one, and 0 for 0: a row without weight."""
    guess = (1.0 / tl.where(z == 0.0, 1.0, z).to(tl.float32)).to(tl.float64)
    return tl.where(z == 0.0, 0.0, guess * (2.0 - z * guess))


@triton.jit
def silent(shift, scale, F: tl.constexpr):
    """c = exp(−m), which maps with a silent term need; m ≥ 0 there."""
    if F.shift == "max0":
        c = tl.exp(tl.maximum(-shift * scale, -700.0))
    else:
        c = tl.exp(-shift * scale.to(tl.float32))
    return c


@triton.jit
def join_delta(delta, partial, counters, row, part, parts, PARTS: tl.constexpr, STAGE: tl.constexpr):
    if STAGE != "whole":
        partial += row * 2 * parts
        if STAGE != "finish":
            near, rest = halves(delta)
            publish(partial, near, 0, part, parts)
            publish(partial, rest, 1, part, parts)
        if STAGE == "meet":
            meet(counters + row, parts)
        if STAGE != "publish":
            near = tl.sum(gather(partial, 0, parts, 0.0, PARTS).to(tl.float64), 0)
            delta = tl.zeros_like(delta) + (near + tl.sum(gather(partial, 1, parts, 0.0, PARTS), 0))
    return delta


@triton.jit
def difference(x, y):
    """x − y and what rounding lost of it."""
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
    rows, columns, row, part = place(parts, ROWS, COLUMNS)
    above, p, seen = load_both(dp, saved, mask, rows, columns, R, N, mask_row, mask_column, F, HAS_MASK, tl.float32)
    product = p * above
    lost = tl.fma(p, above, -product)
    delta = tl.sum(product.to(tl.float64), 1, keep_dims=True) + tl.sum(lost, 1, keep_dims=True)
    delta = join_delta(delta, partial, counters, row, part, parts, PARTS, STAGE)
    if STAGE != "publish":
        near, rest = halves(delta)
        d, lost = difference(above, near)
        below = tl.fma(p, d, p * (lost - rest))
        near, rest = halves(tl.zeros([1, 1], tl.float64) + scale)
        below = tl.fma(below, near, below * rest)
        if HAS_MASK:
            below = tl.where(seen, below, 0.0)
        store(ds, below, rows, columns, R, N)
