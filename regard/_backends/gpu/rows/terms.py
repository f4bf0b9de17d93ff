"""The terms of the ratio and pointwise families: u and v of a tile of scores, for scores of any size a float has.

Scores are scaled after the row's maximum is subtracted, so that their differences are what rounds.
"""

import triton
import triton.language as tl

from regard._backends.gpu.rows.tiles import exponential, finite


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
def suited(top, scale, TRAITS: tl.constexpr):
    """What scores are multiplied by: the scale; or about 1/max, for a map proportional to them where their sum, or its
    inverse, could overflow. At most 1e37 times the scale, so that a part of a row can be told in the row's."""
    if TRAITS.proportional:
        m = finite(top)
        inverse = tl.minimum(1.0 / tl.where(m > 0.0, m, 1.0), 2.0**126)
        inverse = tl.minimum(inverse, tl.maximum(1e37 * scale, 1.0))
        scale = tl.where((m > 0.0) & ((m * scale > 1e30) | (m * scale < 1e-30)), inverse, scale + m * 0.0)
    return scale


@triton.jit
def terms(x, shift, scale, theta, F: tl.constexpr, TRAITS: tl.constexpr, HALF: tl.constexpr, NEAR: tl.constexpr):
    """(u, v) of scores, 0 where they are −inf."""
    if F.family == "ratio":
        y = x * scale
        e, c = grown(exponential(x, shift, scale, HALF), y, silence(shift, scale, HALF), NEAR)
        u = F.numerator(e, y, c)
        v = F.denominator(e, y, c)
        if not TRAITS.numerator_ends:
            u = tl.where(x > float("-inf"), u, 0.0)
        if not TRAITS.denominator_ends:
            v = tl.where(x > float("-inf"), v, 0.0)
    else:
        u = tl.where(x > float("-inf"), F.weigh(x * scale, theta), 0.0)
        v = u
    return u, v


@triton.jit
def silence(shift, scale, HALF: tl.constexpr):
    """c = exp(−m), finite, so that 0·c is 0."""
    return tl.minimum(exponential(shift * 0.0, shift, scale, HALF), 3e38)


@triton.jit
def grown(e, y, c, NEAR: tl.constexpr):
    """(e, c) of a map of e − c alone: that difference and 0, where NEAR scores would lose its digits to cancellation.

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
def total(x, shift, scale, F: tl.constexpr, TRAITS: tl.constexpr, HALF: tl.constexpr):
    """Σv over a tile's columns, [ROWS, 1]."""
    if TRAITS.differs and not HALF and x.dtype == tl.float32:
        if tl.min(shift * scale) < 0.25:
            _u, v = terms(x, shift, scale, 0.0, F, TRAITS, HALF, True)
            z = tl.sum(v, 1, keep_dims=True)
        else:
            _u, v = terms(x, shift, scale, 0.0, F, TRAITS, HALF, False)
            z = tl.sum(v, 1, keep_dims=True)
    else:
        _u, v = terms(x, shift, scale, 0.0, F, TRAITS, HALF, False)
        z = tl.sum(v, 1, keep_dims=True)
    return z
