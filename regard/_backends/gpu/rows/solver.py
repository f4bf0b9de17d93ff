"""Solver of the threshold family: τ with Σ value(max(y − τ, 0)) = 1 over a row of logits y.

From a point τ the sums over the current support give the next one. F(τ) = Σ value is convex, so Newton's step never
passes the solution from the left. For value = t² two better ones: √F is a norm, so convex too, and Newton's step on it
is twice as long where F is large; the root of the quadratic on the current support is exact once the support is, but
may pass the solution: it then comes back from the right, never behind the last Newton step (`floor`).

The solution for some of the logits is a lower bound for all. So the few maxima of groups of logits are solved first;
all logits then need one or two steps more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard._backends.gpu.rows import tiles

LIMIT = tl.constexpr(40)  # steps; rows of random scores take 3 to 8
FINE = tl.constexpr(1e-5)  # coarser solutions take Newton's steps alone: a step more, but no support to count


class Solver(NamedTuple):
    """Compile-time options of `solve`."""

    F: Any
    TOLERANCE: float  # of |Σ value − 1|
    AGAIN: bool  # logits are read from the cache at every step
    HAS_MASK: bool
    PARTS: int


class Logits(NamedTuple):
    """Logits y = factor·(s − top) of one program, held in registers or at `tile`, and its part of a shared row."""

    tile: Any
    y: Any
    top: Any
    factor: Any
    theta: Any
    partial: Any
    counter: Any
    part: Any
    parts: Any


@triton.jit
def group_maxima(x, GROUPS: tl.constexpr, VECTOR: tl.constexpr):
    """Maxima of GROUPS groups of scores, [1, GROUPS]; a thread holds the whole of its groups."""
    parts: tl.constexpr = x.shape[1] // (GROUPS * VECTOR)
    grouped = tl.reshape(x, [x.shape[0], parts, GROUPS, VECTOR])
    return tl.reduce(tl.reduce(grouped, 3, tiles.nan_maximum), 1, tiles.nan_maximum)


@triton.jit
def add_two(a, b, c, d):
    """Adds two pairs, for reductions."""
    return a + c, b + d


@triton.jit
def add_three(a, b, c, d, e, f):
    """Adds two triples, for reductions."""
    return a + d, b + e, c + f


@triton.jit
def evaluate(y, tau, theta, F: tl.constexpr):
    """value, slope and 1 if in the support at τ, of each logit."""
    t = tl.maximum(y - tau, 0.0)
    return F.weigh(t, theta), F.slope(t, theta).to(y.dtype), (t > 0.0).to(y.dtype)


@triton.jit
def reduce_sums(value, slope, count, KEEP: tl.constexpr, TOLERANCE: tl.constexpr, F: tl.constexpr):
    """Sums over the second axis in one reduction; the support is counted only where `next_tau` uses it."""
    if F.order == 2 and TOLERANCE < FINE:
        value, slope, count = tl.reduce((value, slope, count), 1, add_three, keep_dims=KEEP)
    else:
        value, slope = tl.reduce((value, slope), 1, add_two, keep_dims=KEEP)
        count = value
    return value, slope, count


@triton.jit
def sum_held(logits, tau, step, TOLERANCE: tl.constexpr, C: tl.constexpr):
    """Σ value, Σ slope and the size of the support at τ: [1, 1] of y [1, n], [ROWS] of y [ROWS, K, LANES]."""
    F: tl.constexpr = C.F
    if len(logits.y.shape) == 3:
        value, slope, count = evaluate(logits.y, tiles.per_row(tau), tiles.per_row(logits.theta), F)
        value, slope, count = reduce_sums(value, slope, count, False, TOLERANCE, F)
        total, slope, count = reduce_sums(value, slope, count, False, TOLERANCE, F)
    else:
        value, slope, count = evaluate(logits.y, tau, logits.theta, F)
        total, slope, count = reduce_sums(value, slope, count, True, TOLERANCE, F)
    return total, slope, count


@triton.jit
def load_logits(logits, columns, C: tl.constexpr):
    """Reads the logits at some columns, from the cache if they were read before."""
    tile = tiles.move_tile(logits.tile, columns)
    return (tiles.load_scores(tile, C.HAS_MASK, logits.factor.dtype) - tiles.finite_or_zero(logits.top)) * logits.factor


@triton.jit
def tile_logits(logits, C: tl.constexpr):
    """Returns y [1, COLUMNS], held or read again."""
    if C.AGAIN:
        tl.debug_barrier()  # or the compiler would hold on to what it read before
        y = load_logits(logits, logits.tile.columns, C)
    else:
        y = logits.y
    return y


@triton.jit
def with_logits(logits, y):
    """Returns the same logits with y held."""
    return Logits(
        logits.tile, y, logits.top, logits.factor, logits.theta,
        logits.partial, logits.counter, logits.part, logits.parts,
    )  # fmt: skip


@triton.jit
def sum_tile(logits, tau, step, TOLERANCE: tl.constexpr, C: tl.constexpr):
    """Sums as in `sum_held` over a program's tile, held or read again."""
    return sum_held(with_logits(logits, tile_logits(logits, C)), tau, step, TOLERANCE, C)


@triton.jit
def sum_shared(logits, tau, step, TOLERANCE: tl.constexpr, C: tl.constexpr):
    """Sums as in `sum_held` over all parts of a row. Steps alternate between two buffers: none is overwritten early."""
    F: tl.constexpr = C.F
    PARTS: tl.constexpr = C.PARTS
    total, slope, count = sum_tile(logits, tau, step, TOLERANCE, C)
    which, parts = 3 * (step % 2), logits.parts
    tiles.publish_sum(logits.partial, total, which, logits.part, parts)
    tiles.publish_sum(logits.partial, slope, which + 1, logits.part, parts)
    if F.order == 2:
        tiles.publish_sum(logits.partial, count, which + 2, logits.part, parts)
    tiles.wait_for_parts(logits.counter, (step + 2) * parts)
    zero = total * 0.0
    total = zero + tl.sum(tiles.gather_sums(logits.partial, which, parts, 0.0, PARTS), 0)
    slope = zero + tl.sum(tiles.gather_sums(logits.partial, which + 1, parts, 0.0, PARTS), 0)
    count = total
    if F.order == 2:
        count = zero + tl.sum(tiles.gather_sums(logits.partial, which + 2, parts, 0.0, PARTS), 0)
    return total, slope, count


@triton.jit
def next_tau(tau, floor, total, slope, count, gain, TOLERANCE: tl.constexpr, F: tl.constexpr):
    """(the next τ, its lower bound, 1 if another step is needed) from the sums at τ."""
    fall = slope / gain
    has_support = fall > 0.0
    miss = total - 1.0
    fall = tl.where(has_support, fall, 1.0)
    if F.order == 2:
        half = 0.5 * fall  # Σ t
        newton = (total - tl.sqrt(total)) / half
        move = newton
        if TOLERANCE < FINE:
            discriminant = half * half - count * miss
            root = miss / (half + tl.sqrt(tl.maximum(discriminant, 0.0)))
            move = tl.where(discriminant > 0.0, root, newton)
    else:
        newton = miss / fall
        move = newton
    floor = tl.where(miss >= 0.0, tl.maximum(floor, tau + newton), floor)
    after = tl.maximum(tau + move, floor)
    far = (tl.abs(miss) > TOLERANCE) & (tl.abs(after - tau) > 0.5 * TOLERANCE * tl.abs(tau))
    return after, floor, (has_support & far).to(tl.int32)


@triton.jit
def solve(sum_logits: tl.constexpr, logits, tau, gain, TOLERANCE: tl.constexpr, C: tl.constexpr):
    """(τ, Σ value, Σ slope) where Σ value = 1, from a lower bound of τ.

    `sum_logits(logits, τ, step, TOLERANCE, C)` gives the sums at τ. Where several rows are solved together, one that
    is done keeps its τ.
    """
    F: tl.constexpr = C.F
    floor = tau * 0.0 - 1.0
    total, slope, count = sum_logits(logits, tau, 0, TOLERANCE, C)
    after, floor, far = next_tau(tau, floor, total, slope, count, gain, TOLERANCE, F)
    step = 1
    while (tl.max(far) > 0) & (step < LIMIT):
        if len(tau.shape) == 1:
            tau = tl.where(far > 0, after, tau)
        else:
            tau = after
        total, slope, count = sum_logits(logits, tau, step, TOLERANCE, C)
        after, floor, far = next_tau(tau, floor, total, slope, count, gain, TOLERANCE, F)
        step += 1
    return tau, total, slope


@triton.jit
def bound_from_maxima(maxima, theta, gain, factor, C: tl.constexpr):
    """(the maximum, a lower bound of τ) of a row from maxima of groups of its scores, [1, n]."""
    top = reset_layout(tl.reduce(maxima, 1, tiles.nan_maximum, keep_dims=True))
    logits = Logits(0, (maxima - tiles.finite_or_zero(top)) * factor, 0, 0, theta, 0, 0, 0, 0)
    tau, _total, _slope = solve(sum_held, logits, tiles.finite_or_zero(top) * 0.0 - 1.0, gain, 1e-4, C)
    return top, reset_layout(tau)


@triton.jit
def reset_layout(x):
    """Rebuilds [1, 1] from a scalar, so that no tile takes over the layout of what x was reduced from."""
    return tl.zeros([1, 1], x.dtype) + tl.sum(x)
