"""Rows of ratio normalisers: p = u/Z, Z = Σv + rest; ds = scale·(u′·dp − v′·δ)/Z, δ = Σ p·dp."""

from __future__ import annotations

import numpy as np

from regard._backends.cpu.jit.compile import prim, real, tile
from regard._backends.cpu.rows.row_io import (
    CHUNK,
    INF,
    fill,
    read,
    read_again,
    read_gradient,
    scale_row,
    weightless_value,
)
from regard.normalizers import Ratio

SHIFTS = {"max": 0, "max0": 1, "none": 2}
GRID = 1.5 * 2**12  # v ≤ 1 rounded to 2⁻¹¹ sums exactly over a chunk, and what is left over is small
SMALLEST = 1e-38  # a smaller sum has no inverse in float32: relu, or softpick near 0
LARGE = 1e30  # scores whose sum may overflow
HUGE = 3e38  # exp(−m) stays finite, so that 0·exp(−m) is 0
NEAR = 0.34  # < ln 2 / 2: below it e^y − 1 is computed without cancellation


def tile_functions(normalizer: Ratio) -> dict:
    names = "numerator", "numerator_slope", "denominator", "denominator_slope", "rest", "slope_of_weight", "exponential"
    flags = dict(
        shift=SHIFTS[normalizer.shift], is_proportional=normalizer.proportional, is_difference=normalizer.differs
    )
    return {**flags, **{name: getattr(normalizer, name) for name in names}}


def shift_of(top):
    """What is subtracted from the scores before they are scaled: the maximum, at least 0, or 0."""
    m = top
    if tile.shift == 1:
        m = prim.maximum(top, 0.0)
    if tile.shift == 2:
        m = 0.0
    return m


def exp_difference(e, y, c):
    """e − c = (e^y − 1)·c, which the difference would lose near y = 0."""
    return prim.where(prim.abs(y) < NEAR, prim.growth(y) * c, e - c)


def weigh_row(x, u, highest, factor, c):
    """u ← the row's numerators; returns Σv."""
    total = np.float64(0)
    for start in range(0, x.size, CHUNK):
        coarse, fine, chunk, chunk_u = 0.0, 0.0, x[start : start + CHUNK], u[start : start + CHUNK]
        for j in range(chunk.size):
            y = chunk[j] * factor
            e, low = prim.decay((chunk[j] - highest) * factor), c
            if tile.is_difference:
                e, low = exp_difference(e, y, c), 0.0
            visible = tile.exponential or chunk[j] > -INF  # exp(−inf) is 0 already
            chunk_u[j] = prim.where(visible, tile.numerator(e, y, low), 0.0)
            v = prim.where(visible, tile.denominator(e, y, low), 0.0)
            rounded = (v + GRID) - GRID
            coarse = prim.accumulate(coarse, rounded)
            fine = prim.accumulate(fine, v - rounded)
        total += np.float64(coarse) + np.float64(fine)
    return total


def forward(s, p, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = s.shape[1]
    for i in range(first, last):
        factor = real(scale)
        x, top = read(s[i], scratch[0, :n], mask[i * stride : i * stride + n], masked)
        if not (prim.abs(top) < INF):
            fill(p[i], weightless_value(top))
            state[0, i] = weightless_value(top)
            state[1, i] = weightless_value(top)
            continue
        if tile.is_proportional and top * factor > LARGE:
            factor = 1.0 / top
        highest = shift_of(top)
        m = highest * factor
        c = prim.minimum(prim.exp(-m), HUGE)
        u = p[i]
        total = tile.rest(c) + weigh_row(x, u, highest, factor, c)
        state[0, i] = m
        state[1, i] = total * (real(scale) / factor)
        if (tile.shift == 2 or tile.is_difference) and total < SMALLEST and total > 0:  # 1/Z overflows
            for j in range(n):
                p[i, j] = real(np.float64(u[j]) / total)
            continue
        inverse = np.float64(1) / total if total > 0 else np.float64(0)
        high = real(inverse)
        scale_row(u, high, real(inverse - high))


def backward_of_weights(dp, p, ds, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = p.shape[1]
    for i in range(first, last):
        z = state[1, i]
        if not (z > 0.0):
            fill(ds[i], z)
            continue
        g = read_gradient(dp[i], scratch[0, :n], mask[i * stride : i * stride + n], masked)
        weights, row = p[i], ds[i]
        total = np.float64(0)
        for start in range(0, n, CHUNK):
            part, chunk, chunk_g = 0.0, weights[start : start + CHUNK], g[start : start + CHUNK]
            for j in range(chunk.size):
                part = prim.accumulate(part, chunk[j] * chunk_g[j])
            total += part
        delta = real(total)
        inverse = 1.0 / z
        for j in range(n):
            slope = tile.slope_of_weight(weights[j], inverse) * real(scale)
            row[j] = slope * (g[j] - delta)


def backward_of_scores(dp, s, ds, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = s.shape[1]
    factor = real(scale)
    for i in range(first, last):
        z = state[1, i]
        if not (z > 0.0):
            fill(ds[i], z)
            continue
        visible = mask[i * stride : i * stride + n]
        g = read_gradient(dp[i], scratch[1, :n], visible, masked)
        e, highest = scratch[2, :n], state[0, i]
        if factor == 1.0:
            x = read_again(s[i], scratch[0, :n], visible, masked)
        else:  # dividing a scaled maximum would round
            x, top = read(s[i], scratch[0, :n], visible, masked)
            highest = shift_of(top)
        c = prim.minimum(prim.exp(-highest * factor), HUGE)
        total = np.float64(0)
        for start in range(0, n, CHUNK):
            end = start + CHUNK
            part, chunk, chunk_g, chunk_e = 0.0, x[start:end], g[start:end], e[start:end]
            for j in range(chunk.size):
                y = chunk[j] * factor
                power = prim.decay((chunk[j] - highest) * factor)
                chunk_e[j] = power
                if tile.is_difference:
                    product = tile.numerator(exp_difference(power, y, c), y, 0.0) * chunk_g[j]
                else:
                    product = tile.numerator(power, y, c) * chunk_g[j]
                part = prim.accumulate(part, prim.where(chunk[j] > -INF, product, 0.0))
            total += part
        inverse = 1.0 / z
        delta = real(total) * inverse
        inverse *= factor
        row = ds[i]
        for j in range(n):
            y = x[j] * factor
            a, b = tile.numerator_slope(e[j], y, c), tile.denominator_slope(e[j], y, c)
            row[j] = prim.where(x[j] > -INF, (a * g[j] - b * delta) * inverse, 0.0)
