"""Turns the sums of a row into its statistics, in float64: `statistics.State.finish`, compiled.

The maximum is kept out of the sums, so that nothing cancels in a row that is nearly one-hot; see `regard.statistics`.
"""

from __future__ import annotations

import math

import numpy as np

from regard._backends.cpu.attention.forward_rows import (
    CROSS,
    DISTANCE,
    FIRST_U,
    LOG_U,
    LSE,
    M2,
    MEAN,
    SHIFT,
    SLOPE,
    SQUARE,
    SUPPORT,
    TIES,
    TOP,
    N,
    U,
    V,
)
from regard._backends.cpu.jit.compile import prim, tile

LARGEST_EXPONENT = 709.0  # of a finite exponential


def finish_rows(sums, parameter, sink, wanted, stats, values):
    """stats[k, r] ← statistic number wanted[k] of statistics.NAMES, from the sums [17, rows]; values: room for all."""
    for r in range(sums.shape[1]):
        row = sums[:, r]
        values[0], values[1] = row[N], row[TOP]
        if row[N] == 0.0:
            values[1:] = 0.0
            values[1], values[4] = -math.inf, -math.inf
        elif row[TOP] < math.inf:
            finish_row(row, parameter[min(r, len(parameter) - 1)], np.float64(sink[min(r, len(sink) - 1)]), values)
        else:  # a NaN or +inf among the logits: there are no weights to describe
            values[2:] = math.nan
        for k in range(len(wanted)):
            stats[k, r] = values[wanted[k]]


def finish_row(row, theta, sink, values):
    """The statistics from mean_logit on, in the order of statistics.NAMES."""
    m, c = tile.finish_shift(row)
    top, ties = row[TOP], row[TIES]
    u, v = tile.weight(top, m, c, theta), tile.norm(top, m, c, theta)
    slope, cross = tile.weight_slope(top, m, c, theta), tile.slope_product(top, m, c, theta)
    inverse, gain, lse = tile.sharpness(row, sink, u, v, slope, cross)
    values[2], values[3], values[4] = row[MEAN], row[M2] / row[N], lse
    values[10], values[13] = row[SUPPORT], prim.maximum(gain, 0.0)
    values[9] = u * inverse
    if not (u > 0.0):
        values[5:9] = 0.0
        values[11:13] = 0.0
        return
    others = row[U] / u
    count = ties + others  # Σu / u_max ≥ 1
    lower = (row[LOG_U] - math.log(u) * row[U]) / u
    entropy = prim.maximum(math.log1p((ties - 1.0) + others) - lower / count, 0.0)
    square = u * u  # may underflow, as every square then does
    squares = ties + (row[SQUARE] / square if square != 0.0 else row[SQUARE])
    values[5], values[6], values[7], values[8] = (
        u * count * inverse,
        entropy,
        math.exp(entropy),
        count * count / squares,
    )
    values[11], values[12] = row[DISTANCE] / (u * count), row[FIRST_U] / (u * count)


def plain_finish_shift(row):
    """(m, c) of the tile functions, for ratio and pointwise normalisers."""
    return row[SHIFT], math.exp(-row[SHIFT])


def threshold_finish_shift(row):
    """(m, c) of the tile functions: the shift among the sums is τ − gain·max."""
    return row[TOP], row[SHIFT]


# (1/Z, tr ∂p/∂s, logsumexp) of a row: the gain from products of two terms that are not both the maximum's


def exponential_sharpness(row, sink, u, v, slope, cross):
    """Rest and sink join in a shift of their own, so that nothing overflows."""
    ties, m = row[TIES], max(row[SHIFT], tile.lowest_shift)
    m = max(m, sink)
    factor, rest = math.exp(row[SHIFT] - m), math.exp(sink - m) + tile.rest(math.exp(min(-m, LARGEST_EXPONENT)))
    both = ties * u + row[U]
    total = factor * both + rest
    pairs = ties * (ties - 1.0) * u * u + 2.0 * ties * u * row[U] + row[U] * row[U] - row[SQUARE]
    gain = (factor * factor * pairs + factor * both * rest) / (total * total)
    return factor / total, gain, m + math.log(total)


def ratio_sharpness(row, sink, u, v, slope, cross):
    ties = row[TIES]
    others = tile.rest(math.exp(min(-row[SHIFT], LARGEST_EXPONENT))) + (ties - 1.0) * v + row[V]
    z = others + v
    gain = ties * (slope * others + (slope * v - cross)) + row[SLOPE] * z - row[CROSS]
    square = z * z
    return 1.0 / z if z > 0.0 else 0.0, gain / square if square > 0.0 else 0.0, row[TOP] + math.log(ties + row[LSE])


def threshold_sharpness(row, sink, u, v, slope, cross):
    ties = row[TIES]
    total = ties * slope + row[SLOPE]
    pairs = ties * (ties - 1.0) * cross + 2.0 * ties * slope * row[SLOPE] + row[SLOPE] * row[SLOPE] - row[CROSS]
    return 1.0, pairs / total if total > 0.0 else 0.0, row[TOP] + math.log(ties + row[LSE])


def pointwise_sharpness(row, sink, u, v, slope, cross):
    return 1.0, row[TIES] * slope + row[SLOPE], row[TOP] + math.log(row[TIES] + row[LSE])
