"""Rows of threshold normalisers: p = value(max(gain·s − τ, 0)) with Σp = 1.

ds = scale·g′·(dp − δ),   δ = Σ g′·dp / Σ g′
"""

from __future__ import annotations

import numpy as np

from regard._backends.cpu.jit.compile import prim, real, tile
from regard._backends.cpu.rows.interleaved import forward_short
from regard._backends.cpu.rows.row_io import CHUNK, INF, fill, find_above, load, read_gradient, weightless_value
from regard._backends.cpu.threshold_solver import solve_row
from regard.normalizers import Threshold

SHORT = 128  # columns up to which rows are solved side by side
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
