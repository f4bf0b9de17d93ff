"""Numerators and denominators of the ratio family, and weights of the pointwise one, for a tile of scores.

Scores are scaled after the row's maximum is subtracted, so that their differences are what rounds.
"""

import triton
import triton.language as tl

from regard._backends.gpu.rows.tiles import shifted_exp


@triton.jit
def shift_from_max(m, F: tl.constexpr):
    """Returns what a normaliser subtracts from scores whose maximum is m."""
    if F.shift == "max":
        return m
    elif F.shift == "max0":
        return tl.maximum(m, 0.0)
    else:
        return m * 0.0


@triton.jit
def compute_terms(x, shift, scale, theta, F: tl.constexpr, TRAITS: tl.constexpr, HALF: tl.constexpr,
                  NEAR: tl.constexpr):  # fmt: skip
    """(u, v), numerator and denominator of each score; 0 where it is −inf. NEAR: as in `expm1_terms`."""
    if F.family == "ratio":
        y = x * scale
        e, c = expm1_terms(shifted_exp(x, shift, scale, HALF), y, exp_minus_shift(shift, scale, HALF), NEAR)
        u = F.numerator(e, y, c)
        v = F.denominator(e, y, c)
        if not TRAITS.numerator_vanishes:
            u = tl.where(x > float("-inf"), u, 0.0)
        if not TRAITS.denominator_vanishes:
            v = tl.where(x > float("-inf"), v, 0.0)
    else:
        u = tl.where(x > float("-inf"), F.weigh(x * scale, theta), 0.0)
        v = u
    return u, v


@triton.jit
def exp_minus_shift(shift, scale, HALF: tl.constexpr):
    """c = exp(−shift·scale), finite, so that 0·c is 0."""
    return tl.minimum(shifted_exp(shift * 0.0, shift, scale, HALF), 3e38)


@triton.jit
def expm1_terms(e, y, c, NEAR: tl.constexpr):
    """(e, c) for a normaliser of e − c alone; if NEAR, (e − c, 0) without cancellation for y near 0.

    e^y − 1 = y·P(y), minimax on |y| ≤ ½ with relative error 3e-9.
    """
    if NEAR:
        q = tl.fma(y, 1.98411906e-04, 1.39973244e-03)
        q = tl.fma(y, q, 8.33363464e-03)
        q = tl.fma(y, q, 4.16653182e-02)
        q = tl.fma(y, q, 1.66666629e-01)
        q = tl.fma(y, q, 5.00000042e-01)
        q = tl.fma(y, q, 1.0)
        e = tl.where(tl.abs(y) < 0.5, y * c * q, e - c)
        c = c * 0.0
    return e, c


@triton.jit
def is_near_zero(shift, scale):
    """True if a row of the tile may have only logits near 0, where e − c would cancel.

    Callers branch on it for the whole program: computing both forms for every score made the kernels spill.
    """
    return tl.min(shift * scale) < 0.25
