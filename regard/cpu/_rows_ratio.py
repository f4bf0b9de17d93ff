"""p = u/Z, Z = Σv + rest; ds = scale·(u′·dp − v′·δ)/Z, δ = Σ p·dp."""

from __future__ import annotations

import numpy as np

from regard.cpu._compile import real, tile, words
from regard.cpu._rows_parts import CHUNK, INF, fill, load, load_gradient, nothing_or_nan

SHIFTS = {"max": 0, "max0": 1, "none": 2}
HUGE = 3e38  # exp(−m) stays finite, so that 0·exp(−m) is 0


def tiles(normalizer):
    names = "numerator", "numerator_slope", "denominator", "denominator_slope", "rest", "slope_of_weight"
    return {"shift": SHIFTS[normalizer.shift], **{name: getattr(normalizer, name) for name in names}}


def shifted(top):
    """m: the maximum, at least 0, or 0."""
    m = top
    if tile.shift == 1:
        m = words.maximum(top, 0.0)
    if tile.shift == 2:
        m = 0.0
    return m


def forward(s, p, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = s.shape[1]
    x = scratch[0, :n]
    for i in range(first, last):
        top = load(s[i], x, real(scale), mask[i * stride : i * stride + n], masked)
        if not (words.abs(top) < INF):
            fill(p[i], nothing_or_nan(top))
            state[0, i] = nothing_or_nan(top)
            state[1, i] = nothing_or_nan(top)
            continue
        m = shifted(top)
        c = words.minimum(words.exp(-m), HUGE)
        total = np.float64(tile.rest(c))
        for start in range(0, n, CHUNK):
            part, chunk = 0.0, x[start : start + CHUNK]
            for j in range(chunk.size):
                y = chunk[j]
                e = words.exp(y - m)
                chunk[j] = tile.numerator(e, y, c) if y > -INF else 0.0
                part = words.accumulate(part, tile.denominator(e, y, c) if y > -INF else 0.0)
            total += part
        state[0, i] = m
        state[1, i] = total
        inverse = np.float64(1) / total if total > 0 else np.float64(0)
        high = real(inverse)
        low = real(inverse - high)
        row = p[i]
        for j in range(n):
            row[j] = tile.narrow(x[j] * high + x[j] * low)


def backward_of_weights(dp, p, ds, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = p.shape[1]
    g = scratch[0, :n]
    for i in range(first, last):
        z = state[1, i]
        if not (z > 0.0):
            fill(ds[i], real(z))
            continue
        load_gradient(dp[i], g, mask[i * stride : i * stride + n], masked)
        weights, row = p[i], ds[i]
        total = np.float64(0)
        for start in range(0, n, CHUNK):
            part, chunk, chunk_g = 0.0, weights[start : start + CHUNK], g[start : start + CHUNK]
            for j in range(chunk.size):
                part = words.accumulate(part, tile.widen(chunk[j]) * chunk_g[j])
            total += part
        delta = real(total)
        inverse = 1.0 / z
        for j in range(n):
            slope = tile.slope_of_weight(tile.widen(weights[j]), inverse) * real(scale)
            row[j] = tile.narrow(slope * (g[j] - delta))


def backward_of_scores(dp, s, ds, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = s.shape[1]
    x, g, exponentials = scratch[0, :n], scratch[1, :n], scratch[2, :n]
    for i in range(first, last):
        z = state[1, i]
        if not (z > 0.0):
            fill(ds[i], real(z))
            continue
        seen = mask[i * stride : i * stride + n]
        load(s[i], x, real(scale), seen, masked)
        load_gradient(dp[i], g, seen, masked)
        m = state[0, i]
        c = words.minimum(words.exp(-m), HUGE)
        total = np.float64(0)
        for start in range(0, n, CHUNK):
            end = start + CHUNK
            part, chunk, chunk_g, chunk_e = 0.0, x[start:end], g[start:end], exponentials[start:end]
            for j in range(chunk.size):
                y = chunk[j]
                e = words.exp(y - m)
                chunk_e[j] = e
                part = words.accumulate(part, tile.numerator(e, y, c) * chunk_g[j] if y > -INF else 0.0)
            total += part
        inverse = 1.0 / z
        delta = real(total) * inverse
        inverse *= real(scale)
        row = ds[i]
        for j in range(n):
            a = tile.numerator_slope(exponentials[j], x[j], c)
            b = tile.denominator_slope(exponentials[j], x[j], c)
            row[j] = tile.narrow((a * g[j] - b * delta) * inverse if x[j] > -INF else 0.0)
