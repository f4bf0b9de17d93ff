"""Lower bound of τ from the first sweep over a row, which saves sweeps and shortens lists of candidates.

The sweep keeps the maximum of each of N groups of keys, those at the same place of every tile: one instruction per
score. The maxima are keys themselves, and τ of some of a row's keys never exceeds τ of all. As few keys have weight,
most of them are their group's maximum: with normal scores Σp at that τ is 1.02 to 1.07, whatever the number of keys.
The second highest key of each group as well makes it 1.00. No distribution of the scores is assumed.
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
def find_exponent(block, C: tl.constexpr):
    """Return k, as [M], with g(t) = tᵏ."""
    if C.F.order == 0:
        k = -tl.log2(C.F.weigh(block.a * 0.0 + 0.5, block.theta))
    else:
        k = block.a * 0.0 + C.F.order
    return k


@triton.jit
def best_tile(state, block, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Update the two highest keys of each group, [M, N], and the count of visible keys where a bias decides."""
    best, second, n = state
    _, _, y, visible, _ = key_loop.score_tile(block, start, opt, C, EDGE)
    second = tl.maximum(second, tl.minimum(best, y))
    best = tl.maximum(best, y)
    if C.NEED.count:
        n += tl.sum(tl.where(visible, 1.0, 0.0).to(C.ACC), 1)
    return best, second, n


@triton.jit
def survey(block, i0, opt, C: tl.constexpr):
    """Return (bracket, max y, number of visible keys where a bias decides) after the first sweep."""
    zero = tiles.full(C.BM, 0.0, C.ACC)
    lowest = tiles.zeros(C.BM, C.BN, C.ACC) + HIDDEN
    best, second, n = key_loop.sweep((lowest, lowest, zero), block, i0, opt, best_tile, C)
    top = tl.max(best, 1)
    gain = block.a * C.F.gain(block.theta)
    best, second = (best - top[:, None]) * gain[:, None], (second - top[:, None]) * gain[:, None]
    tau = step_to_root(best, second, solve_keys(best, block, opt, C), block, opt, C, 12, 1e-3)
    low = tau - 1e-5 - 4e-7 * tl.abs(top * gain)  # for rounding
    if C.F.order == 0 and not C.F.is_power:  # of such maps Newton's step on F^(1/k) proves nothing
        low = zero - 1.0
    return Bracket(tau, low, zero, zero + 1.0), top, n


@triton.jit
def solve_resident(x, block, opt, C: tl.constexpr, LIMIT: tl.constexpr):
    """Return τ of rows whose keys x [M, N] are all in registers: first of the maxima of N/4 groups, then of all."""
    tau = solve_keys(tl.max(tl.reshape(x, [C.BM, 4, C.BN // 4]), 1), block, opt, C)
    LEAST: tl.constexpr = 1e-5 if C.NEED.top else 1e-4
    return step_to_root(x, None, tau, block, opt, C, LIMIT, LEAST)


@triton.jit
def solve_keys(x, block, opt, C: tl.constexpr):
    """Return the root of Σ g = 1 over keys x [M, N], in units of τ, to about 1e-5 and from below.

    The first steps of powers, which are slow to compute, take the maxima of 16 groups of these keys.
    """
    tau = tl.full([C.BM], -1.0, C.ACC)
    if C.F.order == 0:
        few = tl.max(tl.reshape(x, [C.BM, x.shape[1] // 16, 16]), 1)
        tau = step_to_root(few, None, tau, block, opt, C, 12, 1e-2)
    return step_to_root(x, None, tau, block, opt, C, 12, 1e-3)


@triton.jit
def step_to_root(x, second, tau, block, opt, C: tl.constexpr, LIMIT: tl.constexpr, LEAST: tl.constexpr):
    """Return τ after Newton's steps over keys x and `second`, until every row's step is LEAST or shorter."""
    power = find_exponent(block, C)
    steps = 0
    moves = 1
    while (moves > 0) & (steps < LIMIT):
        mass, fall = measure_keys(x, tau, block, opt, C)
        if second is not None:
            more_mass, more_fall = measure_keys(second, tau, block, opt, C)
            mass += more_mass
            fall += more_fall
        if C.F.order == 2:
            step = (mass - tl.sqrt(mass)) / fall
        else:
            step = newton_step(mass, fall, power)
        step = tl.maximum(step, 0.0)
        tau += step
        moves = tl.max(tl.where(step > LEAST, 1, 0), 0)
        steps += 1
    return tau


@triton.jit
def measure_keys(x, tau, block, opt, C: tl.constexpr):
    """Return (F, |F′|) of keys x [M, N] at τ; of g = t² half of |F′|."""
    t = tiles.positive_part(x - tau[:, None])
    if C.F.order == 2:
        mass, fall = tl.sum(t * t, 1), tl.sum(t, 1)
    else:
        u, d = tiles.weigh_excess(t, tiles.column(block.theta, opt), C)
        mass, fall = tl.sum(u, 1), tl.sum(d, 1) / C.F.gain(block.theta)
    return mass, fall


@triton.jit
def newton_step(mass, slope_sum, power):
    """Newton step on the norm F^(1/k), which is convex: it never passes the root."""
    some = (mass > 0.0) & (slope_sum > 0.0)
    root = tl.exp2(tl.log2(tl.where(some, mass, 1.0)) / power)
    return tl.where(some, power * mass * (1.0 - 1.0 / root) / tl.where(some, slope_sum, 1.0), 0.0)
