"""Solves Σ value(max(gain·s − τ, 0)) = 1 for the threshold τ of a row; templates for rows and attention.

τ is sought relative to the maximum, where subtraction is exact, between −1 and 0, and kept in two parts, τ + `rest`: a
long flat row has weights far smaller than the spacing of numbers near −1. Only entries above −1 can matter: they are
packed together first. Where value is t or t², the equation on a known support is solved in closed form, and a support
that repeats proves the solution exact; else Newton's steps from −1 never overshoot.
"""

from __future__ import annotations

import math

import numpy as np

from regard._backends.cpu.jit.compile import prim, real, tile

CHUNK = 4096  # entries summed in the working precision; chunks are added up in float64
STEPS = 60  # Newton needs 4 to 14
CLOSED = 12  # closed-form steps, before only Newton's are taken
NEAR = 1e-5  # |Σp − 1| of a solution; a root far away, among many entries, may have cancelled


def solve_row(x, top, factor, y, parameter, gain):
    """(τ, rest, Σp, Σg′) of the row factor·(x − top); y: room for the row and two vectors more.

    Σp and Σg′ are those at τ alone: p is value(t)/Σp, or more exactly value(t − rest).
    """
    size = pack_above(x, top, -1.0001 / factor, y)
    for j in range(size):
        y[j] *= factor
    seal(y, size)
    if tile.order == 1:
        return solve_linear(y, size)
    if tile.order == 2:
        return solve_quadratic(y, size)
    return solve_newton(y, size, parameter, gain)


def pack_above(x, top, bound, y):
    """y ← the entries x − top above `bound`, side by side; returns how many."""
    size, whole = 0, x.size // tile.lanes * tile.lanes
    for j in range(0, whole, tile.lanes):
        size = prim.compress(x, j, top, bound, y, size)
    if whole < x.size:
        tail = y.size - tile.lanes  # the last entries, padded to a vector
        seal(y, tail)
        for j in range(whole, x.size):
            y[tail + j - whole] = x[j]
        size = prim.compress(y, tail, top, bound, y, size)
    return size


def seal(y, size):
    """Fills the last vector with entries that are above no threshold."""
    for j in range(size, size + tile.lanes):
        y[j] = -math.inf


def shrink(y, size, tau):
    """Keeps only the entries above τ, in place; returns how many."""
    kept = 0
    for j in range(0, size, tile.lanes):
        kept = prim.compress(y, j, 0.0, tau, y, kept)
    seal(y, kept)
    return kept


def moments(y, size, tau):
    """(count, Σt, Σt²) over t = y − τ > 0."""
    counts, firsts, seconds = np.float64(0), np.float64(0), np.float64(0)
    for start in range(0, size, CHUNK):
        count, first, second = 0.0, 0.0, 0.0
        chunk = y[start : min(start + CHUNK, size)]
        for j in range(chunk.size):
            t = prim.maximum(chunk[j] - tau, 0.0)
            count = prim.accumulate(count, prim.where(t > 0.0, 1.0, 0.0))
            first = prim.accumulate(first, t)
            second = prim.accumulate(second, t * t)
        counts += count
        firsts += first
        seconds += second
    return counts, firsts, seconds


def threshold_sums(x, gain, top, tau, parameter):
    """(Σp, Σg′) of the row gain·(x − top) at τ."""
    values, slopes = np.float64(0), np.float64(0)
    for start in range(0, x.size, CHUNK):
        value, slope, chunk = 0.0, 0.0, x[start : start + CHUNK]
        for j in range(chunk.size):
            t = prim.maximum(gain * (chunk[j] - top) - tau, 0.0)
            g = prim.where(t > 0.0, tile.slope(t, parameter), 0.0)
            value = prim.accumulate(value, g * t if tile.is_power else tile.value(t, parameter))
            slope = prim.accumulate(slope, g)
        values += value
        slopes += slope
    return values, slopes


def linear_step(count, first):
    """The step of τ to Σ(t − step) = 1 on the support."""
    return (first - 1.0) / count


def quadratic_gap(count, first, second):
    """The discriminant of Σ(t − step)² = 1 on the support; negative if there is no such step."""
    return first * first - count * (second - 1.0)


def quadratic_step(first, second, gap):
    """The step of τ to Σ(t − step)² = 1 on the support."""
    return (second - 1.0) / (first + prim.sqrt(prim.maximum(gap, 0.0)))


def norm_step(first, second):
    """Newton's step of τ to ‖t‖ = 1."""
    norm = prim.sqrt(second)
    return (norm - 1.0) * norm / first


def newton_step(value, slope, gain):
    """Newton's step of τ to Σp = 1; for powers in (Σp)^gain, which is closer to linear."""
    if tile.is_power:
        return (value - value ** np.float64(1.0 - gain)) / slope
    return (value - 1) * gain / slope


def solve_linear(y, size):
    """(τ, rest, Σp, Σg′) for value = t: τ ← τ + (Σt − 1)/count until the support repeats."""
    tau, known = -1.0, np.float64(-1)
    count, first, _ = moments(y, size, tau)
    for _ in range(STEPS):
        if count == known:
            break
        known = count
        tau = real(tau + linear_step(count, first))
        if 2 * count < size:
            size = shrink(y, size, tau)
        count, first, _ = moments(y, size, tau)
    return tau, real(linear_step(count, first)), first, count


def solve_quadratic(y, size):
    """(τ, rest, Σp, Σg′) for value = t²: closed-form steps, or Newton's where there is no root."""
    tau, known = -1.0, np.float64(-1)
    count, first, second = moments(y, size, tau)
    for trial in range(STEPS):
        if count == known and abs(second - 1) < NEAR:
            break
        gap = quadratic_gap(count, first, second)
        if gap >= 0 and trial < CLOSED:
            known = count
            step = quadratic_step(first, second, gap)
        else:
            known = np.float64(-1)
            step = norm_step(first, second)
        moved = real(tau + step)
        if moved == tau:
            break
        tau = moved
        if 2 * count < size and known < 0:  # a closed-form step may overshoot
            size = shrink(y, size, tau)
        count, first, second = moments(y, size, tau)
    return tau, real(quadratic_step(first, second, quadratic_gap(count, first, second))), second, first


def solve_newton(y, size, parameter, gain):
    """(τ, rest, Σp, Σg′): Newton's steps while they raise τ."""
    tau = -1.0
    value, slope = packed_sums(y, size, tau, parameter)
    for _ in range(STEPS):
        moved, near = real(tau + newton_step(value, slope, gain)), value - 1 < (1e-4 if tile.lanes == 16 else 1e-8)
        if not (moved > tau):
            break
        tau = moved
        size = shrink(y, size, tau)
        value, slope = packed_sums(y, size, tau, parameter)
        if near:  # the error of a step is the square of that
            break
    return tau, real(newton_step(value, slope, gain)), value, slope


def packed_sums(y, size, tau, parameter):
    """`threshold_sums` of packed entries, up to the end of their last vector."""
    padded = (size + tile.lanes - 1) // tile.lanes * tile.lanes
    return threshold_sums(y[:padded], 1.0, 0.0, tau, parameter)


def refine_threshold(x, top, tau, parameter, gain):
    """τ of the row gain·(x − top), from one that was rounded by the size of the logits."""
    if not (real(-1.0) <= tau < real(0.0)):
        tau = real(-1.0)  # from where the steps rise to the root
    for _ in range(20):
        value, slope = threshold_sums(x, gain, top, tau, parameter)
        step = newton_step(value, slope, gain)
        tau = real(max(tau + step, -1.0))
        if abs(step) <= -1e-4 * tau:
            break
    return tau
