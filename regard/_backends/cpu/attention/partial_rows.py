"""Row kernels for a part of the keys: what the whole row decides (τ, Z, δ) is given.

A threshold τ is given as (high, c): the row's largest gain·s, and τ − high.
"""

from __future__ import annotations

import math

import numpy as np

from regard._backends.cpu.attention.backward_rows import write_gradients
from regard._backends.cpu.attention.forward_rows import (
    CHUNK,
    SHIFT,
    TOP,
    N,
    finite_inverse,
    row_maximum,
    visible_columns,
    weigh_row,
    zero_unseen,
)
from regard._backends.cpu.jit.compile import prim, real, tile
from regard._backends.cpu.threshold_solver import solve_row, threshold_sums


def solve_part(s, geometry, parameter, first_column, high, c, counts, support, places, packed):
    """(high, c) of the block's keys alone; of the keys above τ, as many as there is room for, gain·s − high and index.

    high = −inf in an empty row. `counts` are the keys above τ, whether there was room or not. Indices count from
    `first_column`, that of the block's first key. packed: room for `solve_row`.
    """
    theta = real(parameter)
    gain = tile.gain(theta)
    for r in range(s.shape[0]):
        _, first, last = visible_columns(geometry, r, s.shape[1])
        x = s[r][first:last]
        top = row_maximum(x)
        high[r], c[r], counts[r] = gain * top, real(0.0), 0
        if not (abs(top) < real(math.inf)):
            continue
        tau, _, _, _ = solve_row(x, top, gain, packed, theta, gain)
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
            t = prim.maximum(x[j] + offset, 0.0)
            value = prim.accumulate(value, tile.value(t, theta))
            slope = prim.accumulate(slope, prim.where(t > 0.0, tile.slope(t, theta), 0.0))
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


def measure_part(s, geometry, parameter, high, c, values, slopes):
    """values ← Σp and slopes ← Σg′ of the block's keys at τ."""
    theta = real(parameter)
    gain = tile.gain(theta)
    for r in range(s.shape[0]):
        _, first, last = visible_columns(geometry, r, s.shape[1])
        values[r], slopes[r] = threshold_sums(s[r][first:last], gain, tile.logit(high[r], theta), c[r], theta)


def weigh_part(s, geometry, parameter, high, c, values, slopes, sums):
    """s ← p at τ, its sums, and those that statistics are made of."""
    theta = real(parameter)
    gain = tile.gain(theta)
    for r in range(s.shape[0]):
        i, first, last = visible_columns(geometry, r, s.shape[1])
        zero_unseen(s[r], first, last)
        x = s[r, first:last]
        top = row_maximum(x)
        m = tile.logit(high[r], theta)
        values[r], slopes[r] = threshold_sums(x, gain, m, c[r], theta)
        if tile.has_stats:
            sums[:, r] = 0.0
            sums[TOP, r] = top
        if top > real(-math.inf):
            weigh_row(x, r, top, m, c[r], theta, i, geometry[2] + first, sums)
        else:  # an empty row, or a NaN
            for j in range(len(x)):
                if tile.has_stats:
                    sums[N, r] += x[j] != real(-math.inf)
                x[j] = real(0.0)
        if tile.has_stats:
            sums[SHIFT, r] = np.float64(high[r]) + np.float64(c[r])


def slopes_part(s, dp, geometry, parameter, high, c, total):
    """total ← Σ g′·dp of the block's keys at τ."""
    theta = real(parameter)
    for r in range(s.shape[0]):
        _, first, last = visible_columns(geometry, r, s.shape[1])
        x, g, m, offset = s[r][first:last], dp[r][first:last], tile.logit(high[r], theta), c[r]
        whole = np.float64(0.0)
        for start in range(0, len(x), CHUNK):
            chunk, dchunk = x[start : start + CHUNK], g[start : start + CHUNK]
            part = real(0.0)
            for j in range(len(chunk)):
                part = prim.accumulate(part, tile.weight_slope(chunk[j], m, offset, theta) * dchunk[j])
            whole += part
        total[r] = whole


def backward_part(s, dp, geometry, parameter, m, c, z, delta, tilt, ds_dot_s):
    """s ← p and dp ← ds = a·dp − b·δ + p·(lift − β·(s − m)) + γ·(s − mean); ds_dot_s = Σ ds·s.

    tilt [4, rows]: lift, β, γ, mean. For ratios c is exp(−m).
    """
    theta = real(parameter)
    for r in range(s.shape[0]):
        _, first, last = visible_columns(geometry, r, s.shape[1])
        zero_unseen(s[r], first, last)
        zero_unseen(dp[r], first, last)
        x, g = s[r, first:last], dp[r, first:last]
        shift = tile.logit(m[r], theta)
        terms = real(0.0), real(0.0), real(0.0), real(0.0), shift, real(0.0), real(0.0)
        if tile.stat_gradients:
            terms = tilt[0, r], tilt[1, r], tilt[2, r], tilt[3, r], shift, real(0.0), real(0.0)
        ds_dot_s[r] = write_gradients(x, g, shift, c[r], theta, finite_inverse(z[r]), delta[r], terms)
