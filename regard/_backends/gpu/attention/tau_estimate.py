"""Estimate of τ from the first sweep over a long row, which saves one or two sweeps.

Two blocks of keys give the mean μ and deviation σ of x = γ·s. Were x normal, Σ(x − τ)₊ᵏ = 1 would hold near
τ = μ + uσ with

    n·σᵏ·Γ(k+1)·φ(u) / (u² + k + 3/2)^((k+1)/2) = 1            (within 10 % of the integral for u > 1)

F and |F′| at that τ and a step to either side then give log F to second order, and its root. The estimate changes only
speed: the solver goes on from what the evaluations prove.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, tiles
from regard._backends.gpu.attention.tiles import HIDDEN


class Bracket(NamedTuple):
    """The solver's state of each row, in γ·(s − max): F ≥ 1 at low, F ≤ 1 at high."""

    tau: Any
    low: Any
    high: Any
    left: Any  # how far F may still be from 1 after the last step


@triton.jit
def is_worthwhile(block, opt, C: tl.constexpr):
    """True if there are enough whole key blocks, and no bias or mask decides which keys a row sees."""
    _, inner, outer = key_loop.find_whole_tiles(block, opt, C)
    enough = (outer - inner) // C.BN >= 6
    if C.NEED.count or (opt.mask.ptr is not None):
        enough = inner < 0
    return enough


@triton.jit
def find_exponent(block, C: tl.constexpr):
    """Return k, as [M], with g(t) = tᵏ."""
    if C.F.order == 0:
        k = -tl.log2(C.F.weigh(block.a * 0.0 + 0.5, block.theta))
    else:
        k = block.a * 0.0 + C.F.order
    return k


@triton.jit
def tail(n, sigma, k):
    """Return u with Σ(x − τ)₊ᵏ = 1 at τ = μ + uσ for n normal numbers x; k = 0 counts those above τ."""
    gamma = tl.where(k > 0.0, 0.5 * tl.log(6.2831853 * k) + k * (tl.log(k) - 1.0) + 1.0 / (12.0 * k), 0.0)  # log Γ(k+1)
    level = tl.log(n) + k * tl.log(sigma) + gamma - 0.9189385
    square = sigma * 0.0 + 6.0
    for _ in tl.static_range(4):
        square = tl.maximum(2.0 * (level - 0.5 * (k + 1.0) * tl.log(square + k + 1.5)), 0.01)
    return tl.sqrt(square)


@triton.jit
def guess_tau(block, opt, C: tl.constexpr):
    """Return (τ, step) of each row, in x."""
    _, inner, outer = key_loop.find_whole_tiles(block, opt, C)
    quarter = (outer - inner) // C.BN // 4 * C.BN
    _, _, y, _, _ = key_loop.score_tile(block, inner + quarter, opt, C, False)
    one, two = tl.sum(y, 1), tl.sum(y * y, 1)
    _, _, y, _, _ = key_loop.score_tile(block, inner + 3 * quarter, opt, C, False)
    one, two = one + tl.sum(y, 1), two + tl.sum(y * y, 1)
    gain = block.a * C.F.gain(block.theta)
    mean = one / (2 * C.BN)
    sigma = gain * tl.sqrt(tl.maximum(two / (2 * C.BN) - mean * mean, 1e-12))
    k = find_exponent(block, C)
    n = tl.maximum(block.last - block.first, 1).to(C.ACC)
    u = tail(n, sigma, k)
    square = u * u
    step = tl.minimum(tl.maximum(0.8 * u * sigma / (square + k + 1.0), 1e-3), 0.25)
    return mean * gain + u * sigma, step


@triton.jit
def measure(y, tau, block, opt, C: tl.constexpr):
    """Return (F, |F′|) of a tile at τ, in lanes."""
    theta = tiles.column(block.theta, opt)
    t = tiles.positive_part(y * (block.a * C.F.gain(block.theta))[:, None] - tau[:, None])
    if C.F.order == 2:
        mass, fall = tiles.fold(t * t, C), tiles.fold(t, C) * 2.0
    elif C.F.order == 1:
        mass, fall = tiles.fold(t, C), tiles.fold(tl.where(t > 0.0, 1.0, 0.0).to(C.ACC), C)
    else:
        u, d = tiles.weigh_excess(t, theta, C)
        mass, fall = tiles.fold(u, C), tiles.fold(d, C) / C.F.gain(theta)
    return mass, fall


@triton.jit
def survey_tile(state, block, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Update the maximum, and F and |F′| at three values of τ."""
    top, tau, step, f0, f1, f2, g0, g1, g2 = state
    _, _, y, _, _ = key_loop.score_tile(block, start, opt, C, EDGE)
    top = tl.maximum(top, tl.max(y, 1))
    a0, b0 = measure(y, tau - step, block, opt, C)
    a1, b1 = measure(y, tau, block, opt, C)
    a2, b2 = measure(y, tau + step, block, opt, C)
    return top, tau, step, f0 + a0, f1 + a1, f2 + a2, g0 + b0, g1 + b1, g2 + b2


@triton.jit
def narrow_bracket(low, high, tau, mass, fall):
    """Return the bracket after an evaluation: by its sign, and by Newton's step, which never passes the root."""
    low = tl.where(mass >= 1.0, tl.maximum(low, tau), low)
    high = tl.where(mass <= 1.0, tl.minimum(high, tau), high)
    newton = tau + (mass - 1.0) / tl.where(fall > 0.0, fall, 1.0)
    return tl.where(fall > 0.0, tl.maximum(low, newton), low), high


@triton.jit
def survey(block, i0, opt, C: tl.constexpr):
    """Return (bracket, max y, 0) after the first sweep."""
    tau, step = guess_tau(block, opt, C)
    zero = tiles.full(C.BM, 0.0, C.ACC)
    lanes = tiles.zeros(C.BM, C.LANES, C.ACC)
    state = (zero + HIDDEN, tau, step, lanes, lanes, lanes, lanes, lanes, lanes)
    top, _, _, f0, f1, f2, g0, g1, g2 = key_loop.sweep(state, block, i0, opt, survey_tile, C)
    f0, f1, f2 = tl.sum(f0, 1), tl.sum(f1, 1), tl.sum(f2, 1)
    g0, g1, g2 = tl.sum(g0, 1), tl.sum(g1, 1), tl.sum(g2, 1)
    peak = top * (block.a * C.F.gain(block.theta))
    low, high = narrow_bracket(peak - 1.0, peak, tau - step, f0, g0)
    low, high = narrow_bracket(low, high, tau, f1, g1)
    low, high = narrow_bracket(low, high, tau + step, f2, g2)
    # log F near its root, from the place of the three where F is nearest to 1
    h0, h1, h2 = safe_log(f0), safe_log(f1), safe_log(f2)
    left = tl.abs(h0) < tl.abs(h1)
    right = (tl.abs(h2) < tl.abs(h1)) & (left == 0)
    at = tl.where(left, tau - step, tl.where(right, tau + step, tau))
    h = tl.where(left, h0, tl.where(right, h2, h1))
    slope = tl.where(left, g0 / one_if_0(f0), tl.where(right, g2 / one_if_0(f2), g1 / one_if_0(f1)))
    there = (f2 > 0.0) & (slope > 0.0)
    bend = tl.where(there, (g0 / one_if_0(f0) - g2 / one_if_0(f2)) / (2.0 * step), 0.0)  # of log F, ≤ 0 in a tail
    root = tl.maximum(slope * slope - 2.0 * bend * h, 0.25 * slope * slope)
    new = at + tl.where(slope > 0.0, 2.0 * h / one_if_0(slope + tl.sqrt(root)), 0.0)
    new = tl.where(new > high, 0.5 * (tl.maximum(low, at) + high), tl.maximum(new, low))
    new = tl.minimum(new, high)
    return Bracket(new - peak, low - peak, high - peak, zero + 1.0), top, zero


@triton.jit
def safe_log(x):
    """Return log x, −1e4 where x = 0."""
    return tl.where(x > 0.0, tl.log(one_if_0(x)), -1e4)


@triton.jit
def one_if_0(x):
    """Return x, 1 where x = 0."""
    return tl.where(x > 0.0, x, 1.0)
