"""The three families in one form: functions of a logit x and its row's shift (m, c), which the templates call.

    weight u, norm v, weight_slope u′, norm_slope v′; slope_product, what the gradient gain sums: v′·u, or g′² for
    threshold normalisers; has_weight: 1 where u > 0 in exact arithmetic, however small exp(x − m) is

Ratio: m is the shift and c = exp(−m). Threshold: m is the maximum of x and c = τ − gain·m. Pointwise: neither.

Then what turns the sums of a row into its statistics, in float64: the functions of `statistics.definitions`, compiled.
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
from regard._backends.cpu.jit.compile import prim, real, tile
from regard._backends.cpu.rows.ratio import exp_difference
from regard.statistics import NAMES


def no_parameter_slope(p, theta):
    """What stands for `parameter_slope` where a normaliser has none, and nothing calls it."""
    return real(0.0)


def ratio_weight(x, m, c, theta):
    if tile.is_difference:
        return tile.numerator(exp_difference(prim.exp(x - m), x, c), x, real(0.0))
    return tile.numerator(prim.exp(x - m), x, c)


def ratio_norm(x, m, c, theta):
    if tile.is_difference:
        return tile.denominator(exp_difference(prim.exp(x - m), x, c), x, real(0.0))
    return tile.denominator(prim.exp(x - m), x, c)


def ratio_weight_slope(x, m, c, theta):
    return tile.numerator_slope(prim.exp(x - m), x, c)


def ratio_norm_slope(x, m, c, theta):
    return tile.denominator_slope(prim.exp(x - m), x, c)


def ratio_slope_product(x, m, c, theta):
    return tile.norm_slope(x, m, c, theta) * tile.weight(x, m, c, theta)


def ratio_has_weight(x, m, c, theta):
    return prim.where(tile.numerator_slope(real(1.0), x, c) > 0.0, 1.0, 0.0)


def threshold_excess(x, m, c, theta):
    """t = gain·x − τ, with τ = gain·m + c: x − m first, so that it rounds by the difference, not by the logit."""
    return prim.maximum(tile.gain(theta) * (x - m) - c, 0.0)


def threshold_weight(x, m, c, theta):
    return tile.value(tile.excess(x, m, c, theta), theta)


def threshold_weight_slope(x, m, c, theta):
    t = tile.excess(x, m, c, theta)
    return prim.where(t > 0.0, tile.slope(t, theta), 0.0)


def threshold_slope_product(x, m, c, theta):
    return tile.weight_slope(x, m, c, theta) * tile.weight_slope(x, m, c, theta)


def threshold_has_weight(x, m, c, theta):
    return prim.where(tile.excess(x, m, c, theta) > 0.0, 1.0, 0.0)


threshold_norm, threshold_norm_slope = threshold_weight, threshold_weight_slope


def pointwise_weight(x, m, c, theta):
    return tile.value(x, theta)


def pointwise_weight_slope(x, m, c, theta):
    return tile.slope(x, theta)


def pointwise_slope_product(x, m, c, theta):
    return 0.0


def pointwise_has_weight(x, m, c, theta):
    return 1.0


pointwise_norm, pointwise_norm_slope = pointwise_weight, pointwise_slope_product


VISIBLE_KEYS, MAX_LOGIT = NAMES.index("visible_keys"), NAMES.index("max_logit")
LARGEST_EXPONENT = 709.0  # of a finite exponential


def finish_rows(sums, parameter, sink, wanted, bare, stats, values):
    """stats[k, r] ← statistic number wanted[k] of statistics.NAMES, from the sums [17, rows]; values: room for all.

    bare: what each is of a row that sees no key.
    """
    for r in range(sums.shape[1]):
        row = sums[:, r]
        if row[N] == 0.0:
            for k in range(len(values)):
                values[k] = bare[k]
        elif row[TOP] < math.inf:
            made = make_row(row, parameter[min(r, len(parameter) - 1)], np.float64(sink[min(r, len(sink) - 1)]))
            for at, finish in tile.statistics:  # one after the other, when the template is filled in
                values[at] = finish(made)
        else:  # a NaN or +inf among the logits: there are no weights to describe
            values[:] = math.nan
            values[VISIBLE_KEYS], values[MAX_LOGIT] = row[N], row[TOP]
        for k in range(len(wanted)):
            stats[k, r] = values[wanted[k]]


def make_row(row, theta, sink):
    """`statistics.definitions.Row` from the sums of a row."""
    m, c = tile.finish_shift(row)
    top, ties = row[TOP], row[TIES]
    u, v = tile.weight(top, m, c, theta), tile.norm(top, m, c, theta)
    slope, cross = tile.weight_slope(top, m, c, theta), tile.slope_product(top, m, c, theta)
    inverse, gain, lse = tile.sharpness(row, sink, u, v, slope, cross)
    alive = u > 0.0
    unit = u if alive else np.float64(1.0)
    square = unit * unit  # may underflow, as every square then does
    squares = ties + (row[SQUARE] / square if square != 0.0 else row[SQUARE])
    lower = (row[LOG_U] - math.log(unit) * row[U]) / unit
    return prim.Row(
        row[N], top, row[MEAN], row[M2], ties, unit, row[U] / unit, lower, squares, row[DISTANCE], row[FIRST_U],
        row[SUPPORT], inverse, u * inverse, gain, lse, alive,
    )  # fmt: skip


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
