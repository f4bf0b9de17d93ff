"""Rows of which a block holds a part of the keys: what the whole row decides (τ, Z, δ) is given.

Templates like those of `attention_rows`. A threshold τ comes as (high, c): the row's largest gain·s, and τ − high.
"""

from __future__ import annotations

import math

import numpy as np

from regard._backends.cpu.attention.backward_rows import inverted, scaled, sums_at
from regard._backends.cpu.attention.forward_rows import (
    CHUNK,
    FRAME,
    TOP,
    N,
    general_row,
    interval,
    maximum_of,
    opened,
)
from regard._backends.cpu.jit.compile import real, tile, words
from regard._backends.cpu.rows.threshold import solve


def solve_part(s, i0, rows, j0, left, right, limit, parameter, first_column, high, c, counts, support, places):
    """(high, c) of the block's keys alone, and of those above τ, as many as there is room for, gain·s − high and place.

    high = −inf where a row sees no key; `counts` are the keys above τ, whether there was room or not. Places count
    from `first_column` on, which is that of the block's first key.
    """
    theta = real(parameter)
    gain = tile.gain(theta)
    y = np.empty(s.shape[1] + tile.lanes, s.dtype)
    packed = np.empty(s.shape[1] + 2 * tile.lanes, s.dtype)
    for r in range(s.shape[0]):
        first, last = interval(i0 + r % rows, j0, left, right, limit, s.shape[1])
        x = s[r][first:last]
        top = maximum_of(x)
        high[r], c[r], counts[r] = gain * top, real(0.0), 0
        if not (abs(top) < real(math.inf)):
            continue
        for j in range(len(x)):
            y[j] = x[j]
        padded = (len(x) + tile.lanes - 1) // tile.lanes * tile.lanes
        for j in range(len(x), padded):
            y[j] = -math.inf
        tau, _, _, _ = solve(y, padded, top, gain, packed, theta, gain)
        c[r] = tau
        found = 0
        for j in range(len(x)):
            t = gain * (x[j] - top)
            if t > tau:
                if found < support.shape[1]:
                    support[r, found], places[r, found] = t, first_column + first + j
                found += 1
        counts[r] = found


def sum_support(support, counts, shift, c, parameter, values, slopes):
    """values ← Σp and slopes ← Σg′ at τ of the keys that a part kept; `shift` is its own high − the row's."""
    theta = real(parameter)
    for r in range(len(counts)):
        value, slope, offset = real(0.0), real(0.0), real(shift[r] - c[r])
        x = support[r][: counts[r]]
        for j in range(len(x)):
            t = words.maximum(x[j] + offset, 0.0)
            value = words.accumulate(value, tile.value(t, theta))
            slope = words.accumulate(slope, words.where(t > 0.0, tile.slope(t, theta), 0.0))
        values[r], slopes[r] = value, slope


def gather_support(support, places, counts, shift, c, parameter, v, o, w, values, slopes):
    """o ← Σp·v, w ← Σg′·v (if it has columns), and the sums, at τ of the keys that a part kept; v are all its keys'."""
    theta = real(parameter)
    for r in range(len(counts)):
        row, rises = o[r], w[r]
        row[:] = real(0.0)
        rises[:] = real(0.0)
        value, slope, offset = real(0.0), real(0.0), real(shift[r] - c[r])
        for j in range(counts[r]):
            t = support[r, j] + offset
            if t > real(0.0):
                p, rise = tile.value(t, theta), tile.slope(t, theta)
                value += p
                slope += rise
                x = v[places[r, j]]
                for e in range(len(row)):
                    row[e] += p * x[e]
                for e in range(len(rises)):
                    rises[e] += rise * x[e]
        values[r], slopes[r] = value, slope


def measure_part(s, i0, rows, j0, left, right, limit, parameter, high, c, values, slopes):
    """values ← Σp and slopes ← Σg′ of the block's keys at τ."""
    theta = real(parameter)
    for r in range(s.shape[0]):
        first, last = interval(i0 + r % rows, j0, left, right, limit, s.shape[1])
        values[r], slopes[r] = sums_at(s[r][first:last], tile.score(high[r], theta), c[r], theta)


def weigh_part(s, i0, rows, j0, left, right, limit, parameter, high, c, values, slopes, sums):
    """s ← p at τ, its sums, and what statistics are made of."""
    theta = real(parameter)
    for r in range(s.shape[0]):
        i = i0 + r % rows
        first, last = interval(i, j0, left, right, limit, s.shape[1])
        x = opened(s, r, first, last)
        top = maximum_of(x)
        m = tile.score(high[r], theta)
        values[r], slopes[r] = sums_at(x, m, c[r], theta)
        if tile.measured:
            sums[:, r] = 0.0
            sums[TOP, r] = top
        if top > real(-math.inf):
            general_row(x, r, top, m, c[r], theta, i, j0 + first, sums)
        else:  # nothing is seen, or a NaN
            for j in range(len(x)):
                if tile.measured:
                    sums[N, r] += x[j] != real(-math.inf)
                x[j] = real(0.0)
        if tile.measured:
            sums[FRAME, r] = np.float64(high[r]) + np.float64(c[r])


def slopes_part(s, dp, i0, rows, j0, left, right, limit, parameter, high, c, total):
    """total ← Σ g′·dp of the block's keys at τ."""
    theta = real(parameter)
    for r in range(s.shape[0]):
        first, last = interval(i0 + r % rows, j0, left, right, limit, s.shape[1])
        x, g, m = s[r][first:last], dp[r][first:last], tile.score(high[r], theta)
        whole = np.float64(0.0)
        for start in range(0, len(x), CHUNK):
            chunk, dchunk = x[start : start + CHUNK], g[start : start + CHUNK]
            part = real(0.0)
            for j in range(len(chunk)):
                part = words.accumulate(part, tile.rise(chunk[j], m, c[r], theta) * dchunk[j])
            whole += part
        total[r] = whole


def backward_part(s, dp, i0, rows, j0, left, right, limit, parameter, m, c, z, delta, tilt, pull):
    """s ← p and dp ← ds = a·dp − b·δ + p·(lift − β·(s − m)) + γ·(s − mean); pull = Σ ds·s.

    tilt [4, rows]: lift, β, γ, mean. For ratio maps c is exp(−m).
    """
    theta = real(parameter)
    for r in range(s.shape[0]):
        first, last = interval(i0 + r % rows, j0, left, right, limit, s.shape[1])
        x = opened(s, r, first, last)
        g = opened(dp, r, first, last)
        boost, inverse, steepest = inverted(z[r])
        shift, frame, offset = delta[r], tile.score(m[r], theta), c[r]
        lift, beta, gamma, mean = real(0.0), real(0.0), real(0.0), real(0.0)
        if tile.tilted:
            lift, beta, gamma, mean = tilt[0, r], tilt[1, r], tilt[2, r], tilt[3, r]
        pulled = np.float64(0.0)
        for start in range(0, len(x), CHUNK):
            chunk, dchunk = x[start : start + CHUNK], g[start : start + CHUNK]
            part = real(0.0)
            for j in range(len(chunk)):
                y = chunk[j]
                hidden = y == real(-math.inf)
                y = words.where(hidden, 0.0, y)
                p = boost * tile.weight(y, frame, offset, theta) * scaled(inverse)
                rise, fall = tile.rise(y, frame, offset, theta), tile.fall(y, frame, offset, theta)
                d = (rise * dchunk[j] - fall * shift) * scaled(steepest)
                if tile.tilted:
                    d += p * (lift - beta * (y - frame)) + gamma * (y - mean)
                d = words.where(hidden, 0.0, d)
                if tile.heated:
                    part = words.accumulate(part, d * y)
                dchunk[j] = d
                chunk[j] = words.where(hidden, 0.0, p)
            pulled += part
        pull[r] = pulled
