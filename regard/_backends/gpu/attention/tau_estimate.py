"""Three guesses for τ from the first sweep over a long row, so that one or two sweeps less remain.

Two blocks of keys tell the mean μ and deviation σ of x = γ·s. Were x normal, Σ(x − τ)₊ᵏ = 1 would hold near
τ = μ + uσ with

    n·σᵏ·Γ(k+1)·φ(u) / (u² + k + 3/2)^((k+1)/2) = 1            (within 10 % of the integral for u > 1)

F and |F′| at that τ and a step to either side then give log F to second order, and its root. Nothing rests on the
guess but speed: the solver goes on from what the evaluations prove.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, tiles
from regard._backends.gpu.attention.tiles import HIDDEN


class Solver(NamedTuple):
    """Where each row stands, in γ·(s − max): F ≥ 1 at low, F ≤ 1 at high."""

    tau: Any
    low: Any
    high: Any
    left: Any  # how far F may still be from 1 after the last step


@triton.jit
def worthwhile(scene, i0, opt, C: tl.constexpr):
    """Are there enough whole key blocks?"""
    _, inner, outer = key_loop.key_blocks(i0, opt, tiles.key_count(opt, scene.b), C.BM, C.BN)
    enough = (outer - inner) // C.BN >= 6
    if (opt.bias.ptr is not None) or (opt.mask.ptr is not None):
        enough = inner < 0
    return enough


@triton.jit
def power(scene, C: tl.constexpr):
    """k, as [M], with g(t) = tᵏ."""
    if C.F.order == 0:
        k = -tl.log2(C.F.weigh(scene.a * 0.0 + 0.5, scene.theta))
    else:
        k = scene.a * 0.0 + C.F.order
    return k


@triton.jit
def tail(n, sigma, k):
    """u with Σ(x − τ)₊ᵏ = 1 at τ = μ + uσ, were the n numbers x normal; k = 0 counts those above τ."""
    gamma = tl.where(k > 0.0, 0.5 * tl.log(6.2831853 * k) + k * (tl.log(k) - 1.0) + 1.0 / (12.0 * k), 0.0)  # log Γ(k+1)
    level = tl.log(n) + k * tl.log(sigma) + gamma - 0.9189385
    square = sigma * 0.0 + 6.0
    for _ in tl.static_range(4):
        square = tl.maximum(2.0 * (level - 0.5 * (k + 1.0) * tl.log(square + k + 1.5)), 0.01)
    return tl.sqrt(square)


@triton.jit
def guess(scene, i0, opt, C: tl.constexpr):
    """(τ, step) of each row, in x."""
    _, inner, outer = key_loop.key_blocks(i0, opt, tiles.key_count(opt, scene.b), C.BM, C.BN)
    quarter = (outer - inner) // C.BN // 4 * C.BN
    _, _, y, _, _ = key_loop.look(scene, inner + quarter, opt, C, False)
    one, two = tl.sum(y, 1), tl.sum(y * y, 1)
    _, _, y, _, _ = key_loop.look(scene, inner + 3 * quarter, opt, C, False)
    one, two = one + tl.sum(y, 1), two + tl.sum(y * y, 1)
    gain = scene.a * C.F.gain(scene.theta)
    mean = one / (2 * C.BN)
    sigma = gain * tl.sqrt(tl.maximum(two / (2 * C.BN) - mean * mean, 1e-12))
    k = power(scene, C)
    n = tl.maximum(scene.last - scene.first, 1).to(C.ACC)
    u = tail(n, sigma, k)
    square = u * u
    step = tl.minimum(tl.maximum(0.8 * u * sigma / (square + k + 1.0), 1e-3), 0.25)
    return mean * gain + u * sigma, step


@triton.jit
def measured(y, tau, scene, C: tl.constexpr):
    """(F, |F′|) of a tile at τ, in lanes."""
    t = tiles.positive_part(y * (scene.a * C.F.gain(scene.theta))[:, None] - tau[:, None])
    if C.F.order == 2:
        mass, fall = tiles.fold(t * t, C), tiles.fold(t, C) * 2.0
    elif C.F.order == 1:
        mass, fall = tiles.fold(t, C), tiles.fold(tl.where(t > 0.0, 1.0, 0.0).to(C.ACC), C)
    else:
        mass = tiles.fold(C.F.weigh(t, scene.theta), C)
        fall = tiles.fold(tl.where(t > 0.0, C.F.slope(t, scene.theta), 0.0), C) / C.F.gain(scene.theta)
    return mass, fall


@triton.jit
def survey_tile(state, scene, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """The maximum, and F and |F′| at three places."""
    top, tau, step, f0, f1, f2, g0, g1, g2 = state
    _, _, y, _, _ = key_loop.look(scene, start, opt, C, EDGE)
    top = tl.maximum(top, tl.max(y, 1))
    a0, b0 = measured(y, tau - step, scene, C)
    a1, b1 = measured(y, tau, scene, C)
    a2, b2 = measured(y, tau + step, scene, C)
    return top, tau, step, f0 + a0, f1 + a1, f2 + a2, g0 + b0, g1 + b1, g2 + b2


@triton.jit
def bounds(low, high, tau, mass, fall):
    """The bracket after an evaluation: its sign, and Newton's step, which never passes the root."""
    low = tl.where(mass >= 1.0, tl.maximum(low, tau), low)
    high = tl.where(mass <= 1.0, tl.minimum(high, tau), high)
    newton = tau + (mass - 1.0) / tl.where(fall > 0.0, fall, 1.0)
    return tl.where(fall > 0.0, tl.maximum(low, newton), low), high


@triton.jit
def survey(scene, i0, opt, C: tl.constexpr):
    """(solver, max y, 0) after the first sweep."""
    tau, step = guess(scene, i0, opt, C)
    zero = tiles.full(C.BM, 0.0, C.ACC)
    lanes = tiles.zeros(C.BM, C.LANES, C.ACC)
    state = (zero + HIDDEN, tau, step, lanes, lanes, lanes, lanes, lanes, lanes)
    top, _, _, f0, f1, f2, g0, g1, g2 = key_loop.sweep(state, scene, i0, opt, survey_tile, C)
    f0, f1, f2 = tl.sum(f0, 1), tl.sum(f1, 1), tl.sum(f2, 1)
    g0, g1, g2 = tl.sum(g0, 1), tl.sum(g1, 1), tl.sum(g2, 1)
    peak = top * (scene.a * C.F.gain(scene.theta))
    low, high = bounds(peak - 1.0, peak, tau - step, f0, g0)
    low, high = bounds(low, high, tau, f1, g1)
    low, high = bounds(low, high, tau + step, f2, g2)
    # log F near its root, from the place of the three where F is nearest to 1
    h0, h1, h2 = logarithm(f0), logarithm(f1), logarithm(f2)
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
    return Solver(new - peak, low - peak, high - peak, zero + 1.0), top, zero


@triton.jit
def logarithm(x):
    return tl.where(x > 0.0, tl.log(one_if_0(x)), -1e4)


@triton.jit
def one_if_0(x):
    return tl.where(x > 0.0, x, 1.0)
