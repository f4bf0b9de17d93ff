"""The three families in one form: functions of a logit x and its row's shift (m, c), which the templates call.

    weight u, norm v, weight_slope u′, norm_slope v′; slope_product, what the gradient gain sums: v′·u, or g′² for
    threshold normalisers; has_weight: 1 where u > 0 in exact arithmetic, however small exp(x − m) is

Ratio: m is the shift and c = exp(−m). Threshold: m is the maximum of x and c = τ − gain·m. Pointwise: neither.
"""

from __future__ import annotations

from regard._backends.cpu.jit.compile import prim, real, tile
from regard._backends.cpu.rows.ratio import exp_difference


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
