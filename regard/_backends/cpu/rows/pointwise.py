"""Rows of pointwise normalisers: p = value(s), ds = scale·slope·dp. A row with a NaN or +inf is NaN throughout."""

from __future__ import annotations

from regard._backends.cpu.jit.compile import prim, real, tile
from regard._backends.cpu.rows.row_io import INF, fill, read, weightless_value
from regard.normalizers import Pointwise


def tile_functions(normalizer: Pointwise) -> dict:
    return {name: getattr(normalizer, name) for name in ("value", "slope", "slope_of_weight")}


def forward(s, p, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = s.shape[1]
    for i in range(first, last):
        x, top = read(s[i], scratch[0, :n], mask[i * stride : i * stride + n], masked)
        if not (prim.abs(top) < INF):
            fill(p[i], weightless_value(top))
            state[0, i] = weightless_value(top)
            continue
        parameter = theta[i * step]
        row = p[i]
        for j in range(n):
            y = x[j] * real(scale)
            row[j] = prim.where(y > -INF, tile.value(y, parameter), 0.0)


def backward_of_scores(dp, s, ds, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = s.shape[1]
    for i in range(first, last):
        x, top = read(s[i], scratch[0, :n], mask[i * stride : i * stride + n], masked)
        if not (prim.abs(top) < INF):
            fill(ds[i], weightless_value(top))
            continue
        parameter = theta[i * step]
        given, row = dp[i], ds[i]
        for j in range(n):
            y = x[j] * real(scale)
            slope = tile.slope(y, parameter) * real(scale)
            row[j] = prim.where(y > -INF, slope * given[j], 0.0)


def backward_of_weights(dp, p, ds, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = p.shape[1]
    for i in range(first, last):
        parameter = theta[i * step]
        given, weights, row = dp[i], p[i], ds[i]
        visible = mask[i * stride : i * stride + n]
        for j in range(n):
            slope = tile.slope_of_weight(weights[j], parameter) * real(scale)
            row[j] = slope * given[j]
        if masked:
            for j in range(n):
                row[j] = prim.where(visible[j], row[j], real(0.0))
