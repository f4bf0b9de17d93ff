"""p = value(s), ds = scale·slope·dp: each entry alone, but a row with a NaN or +inf score is NaN throughout."""

from __future__ import annotations

from regard._backends.cpu.jit.compile import real, tile, words
from regard._backends.cpu.rows.row_io import INF, fill, nothing_or_nan


def tiles(normalizer, dtype):
    return {name: getattr(normalizer, name) for name in ("value", "slope", "slope_of_weight")}


def forward(s, p, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = s.shape[1]
    for i in range(first, last):
        x, top = tile.read(s[i], scratch[0, :n], mask[i * stride : i * stride + n], masked)
        if not (words.abs(top) < INF):
            fill(p[i], nothing_or_nan(top))
            state[0, i] = nothing_or_nan(top)
            continue
        parameter = theta[i * step]
        row = p[i]
        for j in range(n):
            y = x[j] * real(scale)
            row[j] = tile.narrow(words.where(y > -INF, tile.value(y, parameter), 0.0))


def backward_of_scores(dp, s, ds, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = s.shape[1]
    for i in range(first, last):
        x, top = tile.read(s[i], scratch[0, :n], mask[i * stride : i * stride + n], masked)
        if not (words.abs(top) < INF):
            fill(ds[i], nothing_or_nan(top))
            continue
        parameter = theta[i * step]
        given, row = dp[i], ds[i]
        for j in range(n):
            y = x[j] * real(scale)
            slope = tile.slope(y, parameter) * real(scale)
            row[j] = tile.narrow(words.where(y > -INF, slope * tile.widen(given[j]), 0.0))


def backward_of_weights(dp, p, ds, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    n = p.shape[1]
    for i in range(first, last):
        parameter = theta[i * step]
        given, weights, row = dp[i], p[i], ds[i]
        seen = mask[i * stride : i * stride + n]
        for j in range(n):
            slope = tile.slope_of_weight(tile.widen(weights[j]), parameter) * real(scale)
            row[j] = tile.narrow(slope * tile.widen(given[j]))
        if masked:
            for j in range(n):
                row[j] = words.where(seen[j], row[j], tile.narrow(real(0.0)))
