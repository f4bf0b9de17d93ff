"""Storage of a partial row between the two kernels of `decode.py`: FIELDS numbers per row and part."""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention.statistics import Sums
from regard._backends.gpu.attention.tiles import HIDDEN

FIELDS = 16


@triton.jit
def store_part(where, step, r, z, inside, C: tl.constexpr):
    """Store the sums of a part, `step` numbers apart, as `load_parts` reads them."""
    NEED: tl.constexpr = C.NEED
    store_if(where, r.top, inside, True)
    store_if(where + step, r.shift, inside, True)
    store_if(where + 2 * step, z, inside, True)
    store_if(where + 3 * step, r.ties, inside, NEED.shares)
    store_if(where + 4 * step, r.u, inside, NEED.shares)
    store_if(where + 5 * step, r.v, inside, NEED.slope)
    store_if(where + 6 * step, r.log_u, inside, NEED.log_u)
    store_if(where + 7 * step, r.square, inside, NEED.square)
    store_if(where + 8 * step, r.slope, inside, NEED.slope)
    store_if(where + 9 * step, r.cross, inside, NEED.slope)
    store_if(where + 10 * step, r.lse, inside, NEED.lse)
    store_if(where + 11 * step, r.distance, inside, NEED.distance)
    store_if(where + 12 * step, r.support, inside, NEED.support)
    store_if(where + 13 * step, r.pivot, inside, NEED.moments)
    store_if(where + 14 * step, r.mean, inside, NEED.moments)
    store_if(where + 15 * step, r.m2, inside, NEED.moments)


@triton.jit
def store_if(where, x, inside, WANTED: tl.constexpr):
    """Store x if it is wanted."""
    if WANTED:
        tl.store(where, x, mask=inside)


@triton.jit
def load_parts(where, step, there, C: tl.constexpr):
    """Load the sums of every part of a row: top and shift [PARTS], the others [PARTS, 1]."""
    NEED: tl.constexpr = C.NEED
    hidden: tl.constexpr = HIDDEN
    zero = load_if(where, there, False)
    return Sums(
        tl.load(where, mask=there, other=hidden),
        tl.load(where + step, mask=there, other=hidden),
        load_if(where + 2 * step, there, True),
        load_if(where + 3 * step, there, NEED.shares),
        load_if(where + 4 * step, there, NEED.shares),
        load_if(where + 5 * step, there, NEED.slope),
        load_if(where + 6 * step, there, NEED.log_u),
        load_if(where + 7 * step, there, NEED.square),
        load_if(where + 8 * step, there, NEED.slope),
        load_if(where + 9 * step, there, NEED.slope),
        load_if(where + 10 * step, there, NEED.lse),
        load_if(where + 11 * step, there, NEED.distance),
        load_if(where + 12 * step, there, NEED.support),
        zero,
        zero,
        zero,
        load_if(where + 13 * step, there, NEED.moments),
        load_if(where + 14 * step, there, NEED.moments),
        load_if(where + 15 * step, there, NEED.moments),
    )


@triton.jit
def load_if(where, there, WANTED: tl.constexpr):
    """Load one number of each part, [PARTS, 1]; 0 where there is no such part, or nobody asked."""
    if WANTED:
        x = tl.load(where, mask=there, other=0.0)[:, None]
    else:
        x = tl.zeros([where.shape[0], 1], where.dtype.element_ty)
    return x


@triton.jit
def merge_moments(r, part, length, first, last, C: tl.constexpr):
    """Return (mean of y, Σ (y − mean)²) of a row, each [1], from its parts' sums around their own pivots."""
    mean = tl.zeros([1], C.ACC)
    spread = tl.zeros([1], C.ACC)
    if C.NEED.moments:
        n = tl.minimum(last, (part + 1) * length) - tl.maximum(first, part * length)  # [PARTS]
        n = tl.maximum(n, 0).to(C.ACC)[:, None]
        some = n > 0.0
        each = tl.where(some, n, 1.0)
        centre = tl.where(some, r.pivot + r.mean / each, 0.0)
        mean = tl.sum(n * centre, 0) / tl.maximum(tl.sum(n, 0), 1.0)
        away = tl.where(some, centre - mean[None, :], 0.0)
        spread = tl.sum(tl.where(some, r.m2 - r.mean * (r.mean / each), 0.0) + n * away * away, 0)
    return mean, spread
