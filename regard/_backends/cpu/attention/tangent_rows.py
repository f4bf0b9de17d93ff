"""Tangent row kernel: s ← p and ds ← p′ = J·ds in place, for each row of a block, with the forward's row state.

ratio       p′ = a·s′ − p·β     β = Σ b·s′, with a = u′/Z and b = v′/Z
threshold   p′ = g′·(s′ − β)    β = Σ g′·s′ / Σ g′
pointwise   p′ = f′·s′
"""

from __future__ import annotations

import math

import numpy as np

from regard._backends.cpu.attention.backward_rows import finish_delta, ratio_factor
from regard._backends.cpu.attention.forward_rows import CHUNK, finite_inverse, visible_columns, zero_unseen
from regard._backends.cpu.jit.compile import prim, real, tile


def write_tangents(s, ds, geometry, parameter, shift, z):
    """s ← p and ds ← p′, from the logits and their tangents."""
    theta = real(parameter)
    for r in range(s.shape[0]):
        _, first, last = visible_columns(geometry, r, s.shape[1])
        zero_unseen(s[r], first, last)
        zero_unseen(ds[r], first, last)
        x, g = s[r, first:last], ds[r, first:last]
        inverse = finite_inverse(z[r])
        m, c = tile.row_shift(x, shift[r], theta)
        beta = real(0.0)
        if tile.is_coupled:
            beta = sum_slopes(x, g, m, c, theta, inverse)
        for j in range(len(x)):
            hidden = x[j] == real(-math.inf)
            y = prim.where(hidden, 0.0, x[j])
            p = tile.weight(y, m, c, theta) * ratio_factor(inverse)
            rise = tile.weight_slope(y, m, c, theta) * ratio_factor(inverse)
            g[j] = prim.where(hidden, 0.0, rise * g[j] - fall_of(p, rise) * beta)
            x[j] = prim.where(hidden, 0.0, p)


def sum_slopes(x, g, m, c, theta, inverse):
    """β of a row."""
    total = np.float64(0.0)
    for start in range(0, len(x), CHUNK):
        chunk, dchunk = x[start : start + CHUNK], g[start : start + CHUNK]
        part = real(0.0)
        for j in range(len(chunk)):
            hidden = chunk[j] == real(-math.inf)
            y = prim.where(hidden, 0.0, chunk[j])
            slope = tile.norm_slope(y, m, c, theta) * ratio_factor(inverse)
            part = prim.accumulate(part, prim.where(hidden, 0.0, slope * dchunk[j]))
        total += part
    return finish_delta(total, inverse)


def fall_of(p, rise):
    """What β takes from a weight: p of a ratio, its slope of a threshold normaliser."""
    if tile.is_ratio:
        return p
    return rise
