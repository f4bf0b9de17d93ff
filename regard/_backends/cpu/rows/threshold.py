"""Rows of threshold normalisers: p = value(max(gain·s − τ, 0)) with Σp = 1.

ds = scale·g′·(dp − δ),   δ = Σ g′·dp / Σ g′
"""

from __future__ import annotations

import numpy as np

from regard._backends.cpu.jit.compile import prim, real, tile
from regard._backends.cpu.rows.row_io import CHUNK, INF, fill, find_above, load, read_gradient, weightless_value
from regard._backends.cpu.threshold_solver import (
    STEPS,
    linear_step,
    norm_step,
    quadratic_gap,
    quadratic_step,
    solve_row,
)
from regard.normalizers import Threshold

SHORT = 128  # columns up to which rows are solved side by side
SIDE = 16  # such rows: each is one lane of every vector, and no sum runs across lanes
UNKNOWN = 1e30  # no count
VECTORS = 64  # entries that an unrolled vector loop takes at once


def tile_functions(normalizer: Threshold) -> dict:
    names = "gain", "value", "slope", "slope_of_weight", "order", "is_power"
    return {name: getattr(normalizer, name) for name in names}


def forward(s, p, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = s.shape[1]
    if tile.order > 0 and n <= SHORT:
        forward_short(s, p, state, theta, step, mask, stride, masked, scale, scratch, first, last)
    else:
        forward_long(s, p, state, theta, step, mask, stride, masked, scale, scratch, first, last)


def forward_long(s, p, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = s.shape[1]
    x = scratch[0, :n]
    for i in range(first, last):
        parameter = theta[i * step]
        gain = tile.gain(parameter)
        factor = gain * real(scale)
        top = load(s[i], x, mask[i * stride : i * stride + n], masked)
        if not (prim.abs(top) < INF):
            fill(p[i], weightless_value(top))
            state[0, i] = weightless_value(top)
            state[1, i] = weightless_value(top)
            continue
        tau, rest, _, slopes = solve_row(x, top, factor, scratch[1], parameter, gain)
        state[0, i] = top * factor + (tau + rest)
        state[1, i] = slopes
        row = p[i]
        for j in range(n):
            t = prim.maximum((x[j] - top) * factor - tau - rest, 0.0)
            row[j] = prim.where(t > 0.0, tile.value(t, parameter), 0.0)


def step_rows(tau, sums, known):
    """One step of `solve_linear` or `solve_quadratic` for SIDE rows at once; True while any support changes.

    A row whose support repeats keeps its τ; its `known` then holds the rest of τ.
    """
    changes = 0.0
    for lane in range(SIDE):
        count, first, second = sums[lane], sums[SIDE + lane], sums[2 * SIDE + lane]
        if tile.order == 1:
            delta, closed = linear_step(count, first), True
        else:
            gap = quadratic_gap(count, first, second)
            closed = gap >= 0.0
            delta = prim.where(closed, quadratic_step(first, second, gap), norm_step(first, second))
        repeats = (count == known[lane]) | (delta != delta) | (known[lane] < 0.5)
        known[lane] = prim.where(repeats, delta, prim.where(closed, count, UNKNOWN))
        tau[lane] = prim.where(repeats, tau[lane], tau[lane] + delta)
        changes = prim.maximum(changes, prim.where(repeats, 0.0, 1.0))
    return changes > 0.0


def interleave(s, block, x):
    """x[j·SIDE + lane] ← entry j of row block + lane, for SIDE rows."""
    n = s.shape[1]
    prim.side_interleave(s.reshape(s.size), block * n, n, x)
    start = n // SIDE * SIDE
    for lane in range(SIDE):
        row = s[block + lane]
        for j in range(start, n):
            x[j * SIDE + lane] = row[j]


def forward_short(s, p, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    """`forward_long` for SIDE rows at once: short rows spend their time in the solver's sums."""
    n = s.shape[1]
    x = scratch[0]
    top, tau, known, sums = scratch[1, :SIDE], scratch[1, SIDE:], scratch[1, 2 * SIDE :], scratch[1, 3 * SIDE :]
    factor = tile.gain(theta[0]) * real(scale)
    for block in range(first, last, SIDE):
        if masked or last - block < SIDE:
            for lane in range(SIDE):
                i = min(block + lane, last - 1)
                row, visible = s[i], mask[i * stride : i * stride + n]
                for j in range(n):
                    is_visible = visible[j] if masked else True
                    x[j * SIDE + lane] = prim.where(is_visible, row[j], -INF)
        else:
            interleave(s, block, x)
        prim.side_maximum(x, n, top)
        prim.side_begin(x, n, top, factor, tile.order, sums)
        for lane in range(SIDE):
            tau[lane] = -1.0
            known[lane] = UNKNOWN
        for _ in range(STEPS):
            if not step_rows(tau, sums, known):
                break
            prim.side_moments(x, n, tau, tile.order, sums)
        for lane in range(min(SIDE, last - block)):
            i = block + lane
            if not (prim.abs(top[lane]) < INF):
                fill(p[i], weightless_value(top[lane]))
                state[0, i] = weightless_value(top[lane])
                state[1, i] = weightless_value(top[lane])
                continue
            rest, visible = known[lane], mask[i * stride : i * stride + n]
            state[0, i] = top[lane] * factor + (tau[lane] + rest)
            state[1, i] = sums[(tile.order - 1) * SIDE + lane]
            write_row(s[i], p[i], visible, masked, factor, top[lane], tau[lane], rest, theta[0])


def write_row(s, row, mask, masked, factor, top, tau, rest, parameter):
    """row ← value(max(factor·(s − top) − τ − rest, 0))."""
    if masked:
        for j in range(row.size):
            y = (s[j] - top) * factor
            t = prim.maximum(prim.where(mask[j], y, -INF) - tau - rest, 0.0)
            row[j] = prim.where(t > 0.0, tile.value(t, parameter), 0.0)
    else:
        for j in range(row.size):
            t = prim.maximum((s[j] - top) * factor - tau - rest, 0.0)
            row[j] = prim.where(t > 0.0, tile.value(t, parameter), 0.0)


def backward_of_weights(dp, p, ds, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = p.shape[1]
    for i in range(first, last):
        if not (state[1, i] > 0.0):
            fill(ds[i], state[1, i])
            continue
        g = read_gradient(dp[i], scratch[0, :n], mask[i * stride : i * stride + n], masked)
        if tile.order == 0:
            size = find_above(p[i], 0.0, scratch[2])
            if 2 * size < n:
                backward_sparse(g, p[i], ds[i], scratch[2, :size], scratch[3], theta[i * step], real(scale))
                continue
        backward_dense(g, p[i], ds[i], theta[i * step], real(scale))


def backward_dense(g, weights, row, parameter, scale):
    n = row.size
    totals, products = np.float64(0), np.float64(0)
    for start in range(0, n, CHUNK):
        total, product, chunk, chunk_g = 0.0, 0.0, weights[start : start + CHUNK], g[start : start + CHUNK]
        for j in range(chunk.size):
            slope = tile.slope_of_weight(chunk[j], parameter)
            total = prim.accumulate(total, slope)
            product = prim.accumulate(product, slope * chunk_g[j])
        totals += total
        products += product
    delta = real(products / totals)
    for j in range(n):
        slope = tile.slope_of_weight(weights[j], parameter) * scale
        row[j] = slope * (g[j] - delta)


def backward_sparse(g, weights, row, found, slopes, parameter, scale):
    """`backward_dense` where few weights are positive and slopes are expensive: it computes only theirs."""
    size = found.size
    for k in range(size):
        slopes[k] = weights[np.uint64(prim.bits(found[k]))]
    padded = (size + VECTORS - 1) // VECTORS * VECTORS
    for k in range(size, padded):
        slopes[k] = 0.0
    totals, products = np.float64(0), np.float64(0)
    for start in range(0, padded, CHUNK):
        total, chunk = 0.0, slopes[start : min(start + CHUNK, padded)]
        for k in range(chunk.size):
            slope = prim.where(chunk[k] > 0.0, tile.slope_of_weight(chunk[k], parameter), 0.0)
            chunk[k] = slope
            total = prim.accumulate(total, slope)
        totals += total
    for k in range(size):
        products += slopes[k] * g[np.uint64(prim.bits(found[k]))]
    delta = real(products / totals)
    fill(row, 0.0)
    for k in range(size):
        j = np.uint64(prim.bits(found[k]))
        row[j] = slopes[k] * scale * (g[j] - delta)
