"""float32 rows of p = exp(s)/Z whose error is, but for 2⁻²⁷, the rounding of the result; and their backward.

e^y = 2^j·e^r with y = j·ln 2 + r, |r| ≤ ½ ln 2, is kept as a sum of two floats, e^r = (1 + r) + r²·P(r), with what the
difference s − m and the product with the scale lost to rounding in the smaller one. Z and δ are summed in float64.
All terms are held 2⁶⁴ times as large, so that weights below the normal numbers are rounded once as well.
"""

import triton
import triton.language as tl

from regard.kernels.rows_online import load_both, shift_of
from regard.kernels.rows_tiles import (
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

GROWN = tl.constexpr(2.0**64)
LEAST = tl.constexpr(-105.0)  # e^y rounds to 0 from here on, in every weight
# (e^r − 1 − r) / r² on |r| ≤ ½ ln 2: minimax, weighted by r²/e^r, to 2⁻³²·⁹
P0 = tl.constexpr(0.5)
P1 = tl.constexpr(0.166666641831398)
P2 = tl.constexpr(0.041666459292173386)
P3 = tl.constexpr(0.008333896286785603)
P4 = tl.constexpr(0.0013935420429334044)
P5 = tl.constexpr(0.00019569472351577133)


@triton.jit
def difference(x, y):
    """x − y and what rounding lost of it."""
    d = x - y
    back = d - x
    return d, (x - (d - back)) - (y + back)


@triton.jit
def exponential(x, shift, scale, scale_rest, UNIT: tl.constexpr):
    """2⁶⁴·exp((x − shift)·scale) as a float and a smaller one; the argument is at most 0, the scale 1 if UNIT."""
    d, rest = difference(x, shift)
    if UNIT:
        y = tl.maximum(d, LEAST)
        rest = tl.maximum(rest, -1e-3)  # of −inf it is NaN
    else:
        least = LEAST / scale
        d = tl.maximum(d, least)
        rest = tl.maximum(rest, 1e-5 * least)
        y = d * scale
        rest = tl.fma(d, scale_rest, tl.fma(rest, scale, tl.fma(d, scale, -y)))
    t = tl.fma(y, 1.4426950408889634, 12582912.0)  # floats that large have no fraction: j in the last bits
    j = t - 12582912.0
    power = ((t.to(tl.int32, bitcast=True) << 23) + (191 << 23)).to(tl.float32, bitcast=True)
    near = tl.fma(j, -0.693145751953125, y)  # exact: ln 2 in two parts, the first of 16 bits
    rest = tl.fma(j, -1.428606765330187e-6, rest)
    r = near + rest
    rest = rest - (r - near)
    q = tl.fma(r, P5, P4)
    q = tl.fma(r, q, P3)
    q = tl.fma(r, q, P2)
    q = tl.fma(r, q, P1)
    q = tl.fma(r, q, P0)
    high = 1.0 + r
    low = tl.fma(r * r, q, tl.fma(rest, high, r - (high - 1.0)))
    return high * power, low * power


@triton.jit
def over(x):
    """A number per row, [ROWS], against a tile."""
    return x[:, None, None]


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
        falls = tl.exp(tl.maximum(apart * scale, LEAST))
        fall = tl.exp(tl.maximum((shift.to(tl.float64) - common) * scale, LEAST))
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
def forward_exact(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, UNIT: tl.constexpr, AHEAD: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """The tile is [ROWS, K, LANES]: short rows lie K deep in a few lanes each, a long one side by side (K = 1)."""
    part = tl.program_id(0) % parts
    first = (tl.program_id(0) // parts).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)  # [ROWS], as all that follows but the tile
    columns = tl.arange(0, COLUMNS // LANES)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    columns += part * COLUMNS
    scale = tl.zeros([1], tl.float64) + scale
    near, rest = halves(scale)
    x = load_scores(s, mask, over(row), columns, R, N, mask_row, mask_column, HAS_MASK, tl.float32)
    if AHEAD > 0:
        prefetch(s, R, N, parts, COLUMNS, AHEAD)
    top = tl.reduce(tl.reduce(x, 1, larger), 1, larger)
    shift = shift_of(finite(top), F)
    high, low = exponential(x, over(shift), over(near), over(rest), UNIT)
    z = tl.sum(tl.sum(high.to(tl.float64), 1), 1) + tl.sum(tl.sum(low, 1), 1)
    if STAGE != "whole":
        top, z, shift, fall = join(top, z, shift, scale, partial, counters, first, part, parts, F, PARTS, STAGE)
    if STAGE != "publish":
        z = tl.where(top == float("-inf"), 0.0, z + F.rest(silent(shift, near, rest, F)) * GROWN)
        inverse = reciprocal(z)
        if STAGE != "whole":  # the part's maximum may lie far below the row's: weights first, then their fall
            small = tl.where(fall < 1e-8, 1.0 / GROWN, 1.0)
            high, low = high * over(small.to(tl.float32)), low * over(small.to(tl.float32))
            inverse = inverse * (fall / small)
        near, rest = halves(tl.where(top < float("inf"), inverse, float("nan")))
        store(p, tl.fma(high, over(near), tl.fma(low, over(near), high * over(rest))), over(row), columns, R, N)
        z = tl.where(top < float("inf"), z / GROWN, float("nan"))
        store_state(state, (shift * scale).to(tl.float32), z.to(tl.float32), row, part, R)


@triton.jit
def silent(shift, near, rest, F: tl.constexpr):
    """c = exp(−m), which maps with a silent term need; m ≥ 0 there."""
    if F.shift == "max0":
        high, low = exponential(shift * 0.0, shift, near, rest, False)
        c = (high.to(tl.float64) + low) / GROWN
    else:
        c = tl.exp(-shift * near)
    return c


@triton.jit
def reciprocal(z):
    """1/z of a float64 by one Newton step from the float32 one, and 0 for 0: a row without weight."""
    guess = (1.0 / tl.where(z == 0.0, 1.0, z).to(tl.float32)).to(tl.float64)
    return tl.where(z == 0.0, 0.0, tl.fma(guess, tl.fma(-z, guess, 1.0), guess))


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
def backward_exact(
    dp, saved, ds, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, UNIT: tl.constexpr, AGAIN: tl.constexpr, AHEAD: tl.constexpr,
    STAGE: tl.constexpr,
):  # fmt: skip
    """ds = scale·p·(dp − δ) with δ = Σ p·dp, from the weights."""
    rows, columns, row, part = place(parts, ROWS, COLUMNS)
    above, p, seen = load_both(dp, saved, mask, rows, columns, R, N, mask_row, mask_column, F, HAS_MASK, tl.float32)
    if AHEAD > 0:
        prefetch(dp, R, N, parts, COLUMNS, AHEAD)
        prefetch(saved, R, N, parts, COLUMNS, AHEAD)
    product = p * above
    lost = tl.fma(p, above, -product)
    delta = tl.sum(product.to(tl.float64), 1, keep_dims=True) + tl.sum(lost, 1, keep_dims=True)
    delta = join_delta(delta, partial, counters, row, part, parts, PARTS, STAGE)
    if STAGE != "publish":
        near, rest = halves(delta)
        d, lost = difference(above, near)
        below = tl.fma(p, d, p * (lost - rest))
        if not UNIT:
            near, rest = halves(tl.zeros([1, 1], tl.float64) + scale)
            below = tl.fma(below, near, below * rest)
        if HAS_MASK:
            below = tl.where(seen, below, 0.0)
        store(ds, below, rows, columns, R, N)
