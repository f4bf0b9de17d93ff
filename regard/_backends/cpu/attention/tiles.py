"""The three families in one form, functions of a score x and its row's shift (m, c), for the attention templates.

    weight u, norm v, rise u′, fall v′, and cross, what the gradient gain sums: v′·u, or g′² for the threshold maps;
    weighs: 1 where u > 0 in exact arithmetic, which is where u rises, however small exp(x − m) is

Ratio: m is the shift and c = exp(−m). Threshold: m is the maximum of x and c = τ − gain·m. Pointwise: neither.
`level` is gain·x, which τ is told in, and `score` the x of a level.
"""

from __future__ import annotations

from regard._backends.cpu.jit.compile import real, tile, words
from regard._backends.cpu.rows.ratio import grown


def plain_level(x, theta):
    return x


def threshold_level(x, theta):
    return tile.gain(theta) * x


def threshold_score(level, theta):
    return level / tile.gain(theta)


def ratio_weight(x, m, c, theta):
    if tile.differs:
        return tile.numerator(grown(words.exp(x - m), x, c), x, real(0.0))
    return tile.numerator(words.exp(x - m), x, c)


def ratio_norm(x, m, c, theta):
    if tile.differs:
        return tile.denominator(grown(words.exp(x - m), x, c), x, real(0.0))
    return tile.denominator(words.exp(x - m), x, c)


def ratio_rise(x, m, c, theta):
    return tile.numerator_slope(words.exp(x - m), x, c)


def ratio_fall(x, m, c, theta):
    return tile.denominator_slope(words.exp(x - m), x, c)


def ratio_weighs(x, m, c, theta):
    return words.where(tile.numerator_slope(real(1.0), x, c) > 0.0, 1.0, 0.0)


def ratio_cross(x, m, c, theta):
    return tile.fall(x, m, c, theta) * tile.weight(x, m, c, theta)


def threshold_above(x, m, c, theta):
    """t = gain·x − τ, with τ = gain·m + c: what is subtracted first rounds by the difference, not by the score."""
    return words.maximum(tile.gain(theta) * (x - m) - c, 0.0)


def threshold_weight(x, m, c, theta):
    return tile.value(tile.above(x, m, c, theta), theta)


def threshold_rise(x, m, c, theta):
    t = tile.above(x, m, c, theta)
    return words.where(t > 0.0, tile.slope(t, theta), 0.0)


threshold_norm, threshold_fall = threshold_weight, threshold_rise


def threshold_weighs(x, m, c, theta):
    return words.where(tile.above(x, m, c, theta) > 0.0, 1.0, 0.0)


def threshold_cross(x, m, c, theta):
    return tile.rise(x, m, c, theta) * tile.rise(x, m, c, theta)


def pointwise_weight(x, m, c, theta):
    return tile.value(x, theta)


def pointwise_rise(x, m, c, theta):
    return tile.slope(x, theta)


def pointwise_weighs(x, m, c, theta):
    return 1.0


def pointwise_cross(x, m, c, theta):
    return 0.0


pointwise_norm, pointwise_fall = pointwise_weight, pointwise_cross
