"""Long float32 rows of p = exp(s)/Z in float32 arithmetic, where many weights share the sum; else in float64.

    e^s = 2^j·e^r,  j = ⌊s·log₂e⌉,  r = s − j·ln 2;     e^r = 1 + r + r²·Q(r);     p = A·e^r,  A = 2^(j−M)/Z

r is exact up to ln 2's second word, and A·(1 + r) keeps what rounding takes from it, so that p is rounded once. The
terms of Z are rounded, which averages out unless few of them make it up. Rows in which that might be (Z below
CROWD times the largest term), and rows of scores too large for j, are told in float64, as `rows_exact` does, a step at
a time from the cache.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard._backends.gpu.rows.exact import exponentials, halves, reciprocal, silent
from regard._backends.gpu.rows.terms import shift_of
from regard._backends.gpu.rows.tiles import finite, highest, load_scores, place, store, store_state

CROWD = tl.constexpr(128.0)
FAR = tl.constexpr(65536.0)  # the largest shift: beyond, r loses digits
LARGE = tl.constexpr(12582912.0)  # 1.5·2²³: numbers that large have no fraction, j is in their last bits
LOG2E = tl.constexpr(1.4426950216293335)
LN2 = tl.constexpr(0.6931471824645996)
LN2_REST = tl.constexpr(-1.904654299957768e-09)
LOWEST = tl.constexpr(-125.0)  # the power of two that stands for all below it, 0 too


class Frame(NamedTuple):
    """How a row's scores become exponents, each a number per row."""

    scale: Any
    lost: Any  # what float32 takes from the scale
    m: Any  # M
    lowest: Any  # the score that stands for all below it


@triton.jit
def frame_of(offset, scale):
    """M = ⌊shift·scale·log₂e⌉ and what belongs to it; shift float32, scale float64."""
    near, lost = halves(scale)
    m = tl.floor(offset * near * LOG2E + 0.5)
    return Frame(near, lost, m, (m + LOWEST) * LN2 / near)


@triton.jit
def split(x, shift, start, more, SCALED: tl.constexpr):
    """(A, r, rest) with start·e^(x·scale − M·LN2)·(1 + more) = A·e^(r + rest): start are the bits of a float."""
    y = tl.maximum(x, shift.lowest)
    if SCALED:
        x = y
        y = x * shift.scale
        fine = tl.fma(x, shift.lost, tl.fma(x, shift.scale, -y))
    t = tl.fma(y, LOG2E, LARGE)
    j = t - LARGE
    r = tl.fma(j, -LN2, y)
    rest = tl.fma(j, -LN2_REST, more + shift.m * LN2_REST)
    if SCALED:
        rest += fine
    bits = (t.to(tl.int32, bitcast=True) << 23) + (start - (shift.m.to(tl.int32) << 23))
    return tl.maximum(bits, 0).to(tl.float32, bitcast=True), r, rest


@triton.jit
def square_term(r):
    """Q(r) with e^r = 1 + r + r²·Q(r), minimax: r²·Q is good to 2⁻³³."""
    q = tl.fma(r, 0.00019945876556448638, 0.001393510028719902)
    q = tl.fma(r, q, 0.008333206176757812)
    q = tl.fma(r, q, 0.041666463017463684)
    q = tl.fma(r, q, 0.1666666716337204)
    return tl.fma(r, q, 0.5)


@triton.jit
def term(x, shift, SCALED: tl.constexpr):
    """e^(x·scale − M·LN2), rounded."""
    a, r, rest = split(x, shift, 0x3F800000, 0.0, SCALED)
    q = square_term(r)
    if SCALED:  # `rest` is what rounding took from x·scale, too
        rest = tl.fma(rest, tl.fma(r * r, q, r), rest)
    return tl.fma(a, r + tl.fma(r * r, q, rest), a)  # the least first: beside r it would be lost


@triton.jit
def weight(x, shift, start, more, SCALED: tl.constexpr):
    """start·e^(x·scale − M·LN2)·(1 + more), correctly rounded as a rule."""
    a, r, rest = split(x, shift, start, more, SCALED)
    p = tl.fma(a, r, a)
    lost = tl.fma(a, r, a - p)  # exactly
    lost = tl.fma(a, r * r * square_term(r), lost)
    whole = p
    if SCALED:
        whole = p + lost
    return p + tl.fma(whole, rest, lost)


@triton.jit
def apart(shift, offset, scale):
    """e^(M·LN2 − shift·scale) in float64: from the row's integer shift to that of its maximum."""
    return tl.exp(shift.m.to(tl.float64) * LN2 - offset.to(tl.float64) * scale)


@triton.jit
def forward_quick(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    STEP: tl.constexpr, SCALED: tl.constexpr, HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """A row per program. SCALED: the scale is not 1; it is not faint."""
    rows, columns, _row, part = place(parts, 1, COLUMNS)
    scale = tl.zeros([1, 1], tl.float64) + scale
    x = load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, tl.float32)
    top = highest(x)  # [1, 1], as all that follows but the tile
    offset = shift_of(finite(top), F)
    shift = frame_of(offset, scale)
    e = tl.reshape(term(x, shift, SCALED), [COLUMNS // (LANES * VECTOR), LANES, VECTOR])
    z = tl.sum(tl.sum(tl.sum(e, 2).to(tl.float64), 0)[None, :], 1, keep_dims=True) * apart(shift, offset, scale)
    if tl.max(((z >= CROWD) & (top < float("inf")) & (tl.abs(shift.m) < FAR)).to(tl.int32)) > 0:
        z = z + F.rest(silent(offset, scale, F))
        # z·0: the same shift, but not to the compiler, which would hold r and Q until here
        shift = frame_of(offset + (z * 0.0).to(tl.float32), scale)
        near, rest = halves(reciprocal(z) * apart(shift, offset, scale))
        store(p, weight(x, shift, near.to(tl.int32, bitcast=True), rest / near, SCALED), rows, columns, R, N)
    else:
        sums = tl.zeros([1, STEP], tl.float64)
        for first in range(0, N, STEP):
            some = first + tl.arange(0, STEP)[None, :]
            y = load_scores(s, mask, rows, some, R, N, mask_row, mask_column, HAS_MASK, tl.float32)
            sums += exponentials(y, offset, scale, False)
        z = tl.sum(sums, 1, keep_dims=True)
        z = tl.where(top == float("-inf"), 0.0, z + F.rest(silent(offset, scale, F)))
        inverse = tl.where(top < float("inf"), reciprocal(z), float("nan"))
        z = tl.where(top < float("inf"), z, float("nan"))
        for first in range(0, N, STEP):
            some = first + tl.arange(0, STEP)[None, :]
            y = load_scores(s, mask, rows, some, R, N, mask_row, mask_column, HAS_MASK, tl.float32)
            store(p, exponentials(y, offset, scale, False) * inverse, rows, some, R, N)
    store_state(state, offset, z.to(tl.float32), rows, part, R)
