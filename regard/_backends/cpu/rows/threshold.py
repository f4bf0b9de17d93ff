"""p = value(max(gain·s − τ, 0)) with Σp = 1; ds = scale·g·(dp − δ), δ = Σ g·dp / Σ g.

τ is sought relative to the maximum, where subtraction is exact, between −1 and 0, and kept in two parts, τ + `rest`: a
long flat row has weights far smaller than the spacing of numbers near −1. Only entries above −1 can matter:
they are packed together first. Where value is t or t², the equation on a known support is solved in closed form, and
a support that repeats proves the solution exact; else Newton's steps from −1 never overshoot.
"""

from __future__ import annotations

import numpy as np
import torch

from regard._backends.cpu.jit.compile import real, tile, words
from regard._backends.cpu.rows.interleaved import forward_short, interleave_direct, interleave_loaded
from regard._backends.cpu.rows.row_io import CHUNK, INF, fill, load, nothing_or_nan, positions

SHORT = 128  # columns up to which rows are solved side by side
WHOLE = 64  # entries that a vector loop takes at once
STEPS = 60  # Newton needs 4 to 14
NEAR = 1e-5  # a root found far away, among many entries, is not yet one: its square root cancelled
CLOSED = 12  # after so many closed-form steps only Newton's


def tiles(normalizer, dtype):
    names = "gain", "value", "slope", "slope_of_weight", "order"
    interleave = interleave_direct if dtype in (torch.float32, torch.float64) else interleave_loaded
    flags = {"interleave": interleave, "power": normalizer.is_power}
    return {**flags, **{name: getattr(normalizer, name) for name in names}}


def moments(y, size, tau):
    """(count, Σt, Σt²) over t = y − τ > 0."""
    counts, firsts, seconds = np.float64(0), np.float64(0), np.float64(0)
    for start in range(0, size, CHUNK):
        count, first, second = 0.0, 0.0, 0.0
        chunk = y[start : min(start + CHUNK, size)]
        for j in range(chunk.size):
            t = words.maximum(chunk[j] - tau, 0.0)
            count = words.accumulate(count, words.where(t > 0.0, 1.0, 0.0))
            first = words.accumulate(first, t)
            second = words.accumulate(second, t * t)
        counts += count
        firsts += first
        seconds += second
    return counts, firsts, seconds


def shrink(y, size, tau):
    """Keep only the entries above τ, in place; returns how many."""
    kept = 0
    for j in range(0, size, tile.lanes):
        kept = words.compress(y, j, 0.0, tau, y, kept)
    seal(y, kept)
    return kept


def seal(y, size):
    """Fill up the last vector with entries that can never count."""
    for j in range(size, size + tile.lanes):
        y[j] = -INF


def solve_linear(y, size):
    """(τ, rest, Σp, Σg) for value = t: τ ← τ + (Σt − 1)/count until the support repeats."""
    tau, known = -1.0, np.float64(-1)
    count, first, _ = moments(y, size, tau)
    for _ in range(STEPS):
        if count == known:
            break
        known = count
        tau = real(tau + (first - 1) / count)
        if 2 * count < size:
            size = shrink(y, size, tau)
        count, first, _ = moments(y, size, tau)
    return tau, real((first - 1) / count), first, count


def solve_quadratic(y, size):
    """(τ, rest, Σp, Σg) for value = t²: the root of Σ(t − δ)² = 1 on the support, or a Newton step on ‖t‖ = 1."""
    tau, known = -1.0, np.float64(-1)
    count, first, second = moments(y, size, tau)
    for trial in range(STEPS):
        if count == known and abs(second - 1) < NEAR:
            break
        gap = first * first - count * (second - 1)
        if gap >= 0 and trial < CLOSED:
            known = count
            step = (second - 1) / (first + np.sqrt(gap))
        else:
            known = np.float64(-1)
            norm = np.sqrt(second)
            step = (norm - 1) * norm / first
        moved = real(tau + step)
        if moved == tau:
            break
        tau = moved
        if 2 * count < size and known < 0:  # a closed-form step may overshoot
            size = shrink(y, size, tau)
        count, first, second = moments(y, size, tau)
    rest = (second - 1) / (first + np.sqrt(max(first * first - count * (second - 1), np.float64(0))))
    return tau, real(rest), second, first


def sums(y, size, tau, parameter):
    """(Σp, Σg)."""
    values, slopes = np.float64(0), np.float64(0)
    padded = (size + tile.lanes - 1) // tile.lanes * tile.lanes
    for start in range(0, padded, CHUNK):
        value, slope = 0.0, 0.0
        chunk = y[start : min(start + CHUNK, padded)]
        for j in range(chunk.size):
            t = words.maximum(chunk[j] - tau, 0.0)
            g = words.where(t > 0.0, tile.slope(t, parameter), 0.0)
            value = words.accumulate(value, g * t if tile.power else tile.value(t, parameter))
            slope = words.accumulate(slope, g)
        values += value
        slopes += slope
    return values, slopes


def newton_step(value, slope, gain):
    """How far τ is from where Σp = 1, to first order; for powers in (Σp)^gain, which bends less than Σp."""
    if tile.power:
        return (value - value ** np.float64(1.0 - gain)) / slope
    return (value - 1) * gain / slope


def solve_newton(y, size, parameter, gain):
    """(τ, rest, Σp, Σg): τ moves by `newton_step` while that takes it further."""
    tau = -1.0
    value, slope = sums(y, size, tau, parameter)
    for _ in range(STEPS):
        moved, near = real(tau + newton_step(value, slope, gain)), value - 1 < (1e-4 if tile.lanes == 16 else 1e-8)
        if not (moved > tau):
            break
        tau = moved
        size = shrink(y, size, tau)
        value, slope = sums(y, size, tau, parameter)
        if near:  # the error of a step is the square of that
            break
    return tau, real(newton_step(value, slope, gain)), value, slope


def solve(x, n, top, factor, y, parameter, gain):
    """(τ, rest, Σp, Σg) of the row factor·(x[:n] − top), n a multiple of the lanes; y: room for it and one vector more.

    Σp and Σg are those at τ alone: p is value(t)/Σp, or more exactly value(t − rest).
    """
    size, bound = 0, -1.0001 / factor
    for j in range(0, n, tile.lanes):
        size = words.compress(x, j, top, bound, y, size)
    for j in range(size):
        y[j] *= factor
    seal(y, size)
    if tile.order == 1:
        return solve_linear(y, size)
    if tile.order == 2:
        return solve_quadratic(y, size)
    return solve_newton(y, size, parameter, gain)


def forward(s, p, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = s.shape[1]
    if tile.order > 0 and n <= SHORT:
        forward_short(s, p, state, theta, step, mask, stride, masked, scale, scratch, first, last)
    else:
        forward_long(s, p, state, theta, step, mask, stride, masked, scale, scratch, first, last)


def forward_long(s, p, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = s.shape[1]
    padded = (n + tile.lanes - 1) // tile.lanes * tile.lanes
    x, y = scratch[0], scratch[1]
    for j in range(n, padded):
        x[j] = -INF
    for i in range(first, last):
        parameter = theta[i * step]
        gain = tile.gain(parameter)
        factor = gain * real(scale)
        top = load(s[i], x[:n], mask[i * stride : i * stride + n], masked)
        if not (words.abs(top) < INF):
            fill(p[i], nothing_or_nan(top))
            state[0, i] = nothing_or_nan(top)
            state[1, i] = nothing_or_nan(top)
            continue
        tau, rest, _, slopes = solve(x, padded, top, factor, y, parameter, gain)
        state[0, i] = top * factor + (tau + rest)
        state[1, i] = slopes
        row = p[i]
        for j in range(n):
            t = words.maximum((x[j] - top) * factor - tau - rest, 0.0)
            row[j] = tile.narrow(words.where(t > 0.0, tile.value(t, parameter), 0.0))


def backward_of_weights(dp, p, ds, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = p.shape[1]
    for i in range(first, last):
        if not (state[1, i] > 0.0):
            fill(ds[i], state[1, i])
            continue
        g = tile.read_gradient(dp[i], scratch[0, :n], mask[i * stride : i * stride + n], masked)
        if tile.order == 0:
            weights = tile.read_gradient(p[i], scratch[1, :n], mask[:0], False)
            size = positions(weights, 0.0, scratch[2])
            if 2 * size < n:
                backward_sparse(g, weights, ds[i], scratch[2, :size], scratch[3], theta[i * step], real(scale))
                continue
        backward_dense(g, p[i], ds[i], theta[i * step], real(scale))


def backward_dense(g, weights, row, parameter, scale):
    n = row.size
    totals, products = np.float64(0), np.float64(0)
    for start in range(0, n, CHUNK):
        total, product, chunk, chunk_g = 0.0, 0.0, weights[start : start + CHUNK], g[start : start + CHUNK]
        for j in range(chunk.size):
            slope = tile.slope_of_weight(tile.widen(chunk[j]), parameter)
            total = words.accumulate(total, slope)
            product = words.accumulate(product, slope * chunk_g[j])
        totals += total
        products += product
    delta = real(products / totals)
    for j in range(n):
        slope = tile.slope_of_weight(tile.widen(weights[j]), parameter) * scale
        row[j] = tile.narrow(slope * (g[j] - delta))


def backward_sparse(g, weights, row, found, slopes, parameter, scale):
    """The same where few weights are positive and slopes are dear: only those are looked at."""
    size = found.size
    for k in range(size):
        slopes[k] = weights[np.uint64(words.bits(found[k]))]
    padded = (size + WHOLE - 1) // WHOLE * WHOLE
    for k in range(size, padded):
        slopes[k] = 0.0
    totals, products = np.float64(0), np.float64(0)
    for start in range(0, padded, CHUNK):
        total, chunk = 0.0, slopes[start : min(start + CHUNK, padded)]
        for k in range(chunk.size):
            g_k = words.where(chunk[k] > 0.0, tile.slope_of_weight(chunk[k], parameter), 0.0)
            chunk[k] = g_k
            total = words.accumulate(total, g_k)
        totals += total
    for k in range(size):
        products += slopes[k] * g[np.uint64(words.bits(found[k]))]
    delta = real(products / totals)
    fill(row, 0.0)
    for k in range(size):
        j = np.uint64(words.bits(found[k]))
        row[j] = tile.narrow(slopes[k] * scale * (g[j] - delta))
