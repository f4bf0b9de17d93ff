"""Row kernel for long float32 rows of softmax and softmax1 in float32 arithmetic.

    e^s = 2^j·e^r,  j = ⌊s·log₂e⌉,  r = s − j·ln 2;     e^r = 1 + r + r²·Q(r);     p = A·e^r,  A = 2^(j−M)/Z

r is exact up to ln 2's second word, and A·(1 + r) keeps its rounding error, so that p is rounded once. The terms of Z
are rounded, which averages out unless a few of them dominate. Imprecise rows (Z below MIN_TERMS times the largest term,
or scores too large for j) are computed again in float64, as in `exact.py`, a step at a time from the cache.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard._backends.gpu.rows import tiles
from regard._backends.gpu.rows.exact import (
    exp_float64,
    exp_minus_shift_float64,
    reciprocal_float64,
    split_float64,
)
from regard._backends.gpu.rows.terms import shift_from_max

MIN_TERMS = tl.constexpr(128.0)
MAX_SHIFT = tl.constexpr(65536.0)  # the largest shift: beyond, r loses digits
LARGE = tl.constexpr(12582912.0)  # 1.5·2²³: numbers that large have no fraction, j is in their last bits
LOG2E = tl.constexpr(1.4426950216293335)
LN2 = tl.constexpr(0.6931471824645996)
LN2_REST = tl.constexpr(-1.904654299957768e-09)
MIN_POWER = tl.constexpr(-125.0)  # lower powers of two count as this one, 0 too


class ExponentShift(NamedTuple):
    """The integer shift M of a row's exponents and what belongs to it; a number per row each."""

    scale: Any
    lost: Any  # the scale's float32 rounding error
    m: Any  # M
    lowest: Any  # lower scores count as this one


@triton.jit
def exponent_shift(shift, scale):
    """Returns M = ⌊shift·scale·log₂e⌉ and what belongs to it; shift float32, scale float64."""
    near, lost = split_float64(scale)
    m = tl.floor(shift * near * LOG2E + 0.5)
    return ExponentShift(near, lost, m, (m + MIN_POWER) * LN2 / near)


@triton.jit
def reduce_argument(x, power, start, relative, SCALED: tl.constexpr):
    """(A, r, rest) with start·e^(x·scale − M·LN2)·(1 + relative) = A·e^(r + rest); start is the bits of a float."""
    y = tl.maximum(x, power.lowest)
    if SCALED:
        x = y
        y = x * power.scale
        lost = tl.fma(x, power.lost, tl.fma(x, power.scale, -y))
    t = tl.fma(y, LOG2E, LARGE)
    j = t - LARGE
    r = tl.fma(j, -LN2, y)
    rest = tl.fma(j, -LN2_REST, relative + power.m * LN2_REST)
    if SCALED:
        rest += lost
    bits = (t.to(tl.int32, bitcast=True) << 23) + (start - (power.m.to(tl.int32) << 23))
    return tl.maximum(bits, 0).to(tl.float32, bitcast=True), r, rest


@triton.jit
def exp_polynomial(r):
    """Q(r) with e^r = 1 + r + r²·Q(r), minimax: r²·Q is good to 2⁻³³."""
    q = tl.fma(r, 0.00019945876556448638, 0.001393510028719902)
    q = tl.fma(r, q, 0.008333206176757812)
    q = tl.fma(r, q, 0.041666463017463684)
    q = tl.fma(r, q, 0.1666666716337204)
    return tl.fma(r, q, 0.5)


@triton.jit
def exp_term(x, power, SCALED: tl.constexpr):
    """e^(x·scale − M·LN2), rounded."""
    a, r, rest = reduce_argument(x, power, 0x3F800000, 0.0, SCALED)
    q = exp_polynomial(r)
    if SCALED:  # `rest` includes the rounding error of x·scale
        rest = tl.fma(rest, tl.fma(r * r, q, r), rest)
    return tl.fma(a, r + tl.fma(r * r, q, rest), a)  # smallest first, or r would absorb it


@triton.jit
def exp_weight(x, power, start, relative, SCALED: tl.constexpr):
    """start·e^(x·scale − M·LN2)·(1 + relative), correctly rounded but for one or two in a hundred."""
    a, r, rest = reduce_argument(x, power, start, relative, SCALED)
    p = tl.fma(a, r, a)
    lost = tl.fma(a, r, a - p)  # exactly
    lost = tl.fma(a, r * r * exp_polynomial(r), lost)
    whole = p
    if SCALED:
        whole = p + lost
    return p + tl.fma(whole, rest, lost)


@triton.jit
def shift_gap(power, shift, scale):
    """e^(M·LN2 − shift·scale) in float64, the factor between the integer shift and the row's shift."""
    return tl.exp(power.m.to(tl.float64) * LN2 - shift.to(tl.float64) * scale)


@triton.jit
def forward_fast_exact(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    STEP: tl.constexpr, SCALED: tl.constexpr, HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """Weights of one row per program. SCALED: the scale is not 1."""
    rows, columns, _row, part = tiles.locate_tile(parts, 1, COLUMNS)
    scale = tl.zeros([1, 1], tl.float64) + scale
    tile = tiles.Tile(s, mask, rows, columns, R, N, mask_row, mask_column)
    x = tiles.load_scores(tile, HAS_MASK, tl.float32)
    top = tiles.row_maximum(x)  # [1, 1], as all that follows but the tile
    shift = shift_from_max(tiles.finite_or_zero(top), F)
    power = exponent_shift(shift, scale)
    e = tl.reshape(exp_term(x, power, SCALED), [COLUMNS // (LANES * VECTOR), LANES, VECTOR])
    z = tl.sum(tl.sum(tl.sum(e, 2).to(tl.float64), 0)[None, :], 1, keep_dims=True) * shift_gap(power, shift, scale)
    if tl.max(((z >= MIN_TERMS) & (top < float("inf")) & (tl.abs(power.m) < MAX_SHIFT)).to(tl.int32)) > 0:
        z = z + F.rest(exp_minus_shift_float64(shift, scale, F))
        # + z·0 hides from the compiler that this is the same value; it would keep r and Q in registers until here
        power = exponent_shift(shift + (z * 0.0).to(tl.float32), scale)
        near, rest = split_float64(reciprocal_float64(z) * shift_gap(power, shift, scale))
        tiles.store(p, exp_weight(x, power, near.to(tl.int32, bitcast=True), rest / near, SCALED), tile)
    else:
        sums = tl.zeros([1, STEP], tl.float64)
        for first in range(0, N, STEP):
            step = tiles.move_tile(tile, first + tl.arange(0, STEP)[None, :])
            y = tiles.load_scores(step, HAS_MASK, tl.float32)
            sums += exp_float64(y, shift, scale)
        z = tl.sum(sums, 1, keep_dims=True)
        z = tl.where(top == float("-inf"), 0.0, z + F.rest(exp_minus_shift_float64(shift, scale, F)))
        inverse = tl.where(top < float("inf"), reciprocal_float64(z), float("nan"))
        z = tl.where(top < float("inf"), z, float("nan"))
        for first in range(0, N, STEP):
            step = tiles.move_tile(tile, first + tl.arange(0, STEP)[None, :])
            y = tiles.load_scores(step, HAS_MASK, tl.float32)
            tiles.store(p, exp_float64(y, shift, scale) * inverse, step)
    tiles.store_state(state, shift, z.to(tl.float32), rows, part, R)
