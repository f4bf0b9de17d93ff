"""Backward row kernels: s ← p and dp ← ds = a·dp − b·δ in place, for each row of a block; δ = Σ c·dp."""

from __future__ import annotations

import math

import numpy as np

from regard._backends.cpu.attention.forward_rows import (
    CHUNK,
    count_and_mean,
    finite_inverse,
    parameter_of,
    row_maximum,
    visible_columns,
    zero_unseen,
)
from regard._backends.cpu.jit.compile import prim, real, tile
from regard._backends.cpu.threshold_solver import refine_threshold


def backward_whole(s, dp, geometry, parameter, shift, z, delta, dtheta, stat_gradients, ds_dot_s):
    """s ← p and dp ← a·dp − b·δ + the gradients of the statistics; ds_dot_s = Σ ds·s.

    stat_gradients [3, rows]: of logit_variance, logsumexp and entropy.
    """
    for r in range(s.shape[0]):
        theta = parameter_of(parameter, r)
        _, first, last = visible_columns(geometry, r, s.shape[1])
        zero_unseen(s[r], first, last)
        zero_unseen(dp[r], first, last)
        x, g = s[r, first:last], dp[r, first:last]
        inverse = finite_inverse(z[r])
        m, c = tile.row_shift(x, shift[r], theta)
        total, own, by_own = np.float64(0.0), np.float64(0.0), np.float64(0.0)
        for start in range(0, len(x), CHUNK):
            chunk, dchunk = x[start : start + CHUNK], g[start : start + CHUNK]
            part, own_, by_own_ = real(0.0), real(0.0), real(0.0)
            for j in range(len(chunk)):
                factor = delta_factor(chunk[j], m, c, theta, inverse)
                part = prim.accumulate(part, prim.where(chunk[j] == real(-math.inf), 0.0, factor) * dchunk[j])
                if tile.theta_gradient:
                    p = prim.where(chunk[j] == real(-math.inf), 0.0, tile.weight(chunk[j], m, c, theta))
                    h = tile.parameter_slope(p, theta)
                    own_ = prim.accumulate(own_, h)
                    by_own_ = prim.accumulate(by_own_, h * dchunk[j])
            total += part
            own += own_
            by_own += by_own_
        delta[r] = finish_delta(total, inverse)
        if tile.theta_gradient:
            dtheta[r] = by_own - delta[r] * own
        top, log_total, offset, mean = real(0.0), real(0.0), real(0.0), real(0.0)
        by_variance, by_lse, by_entropy = real(0.0), real(0.0), real(0.0)
        if tile.stat_gradients:
            top = row_maximum(x)
            n, average = count_and_mean(x)
            mean = real(average)
            log_total, entropy = softmax_entropy(x, top)
            offset = entropy - log_total
            by_variance = real(2.0 * stat_gradients[0, r] / max(n, np.float64(1.0)))
            by_lse, by_entropy = stat_gradients[1, r], stat_gradients[2, r]
        terms = by_lse, by_entropy, by_variance, mean, top, offset, log_total
        ds_dot_s[r] = write_gradients(x, g, m, c, theta, inverse, delta[r], terms)


def backward_part(s, dp, geometry, parameter, m, z, delta, ds_dot_s):
    """s ← p and dp ← ds = a·dp − b·δ of a part of the keys, from m, Z and δ of the whole rows; ds_dot_s = Σ ds·s."""
    theta = real(parameter)
    for r in range(s.shape[0]):
        _, first, last = visible_columns(geometry, r, s.shape[1])
        zero_unseen(s[r], first, last)
        zero_unseen(dp[r], first, last)
        x, g = s[r, first:last], dp[r, first:last]
        terms = real(0.0), real(0.0), real(0.0), real(0.0), real(0.0), real(0.0), real(0.0)
        ds_dot_s[r] = write_gradients(x, g, m[r], prim.exp(-m[r]), theta, finite_inverse(z[r]), delta[r], terms)


def write_gradients(x, g, m, c, theta, inverse, delta, terms):
    """x ← p and g ← ds; returns Σ ds·s.

    With statistics' gradients ds has lift·p − β·p̄·(s − top + offset) + γ·(s − mean) in addition, where p̄ is the
    softmax of the row's keys without sink.
    """
    lift, beta, gamma, mean, top, offset, log_total = terms
    total = np.float64(0.0)
    for start in range(0, len(x), CHUNK):
        chunk, dchunk = x[start : start + CHUNK], g[start : start + CHUNK]
        part = real(0.0)
        for j in range(len(chunk)):
            y = chunk[j]
            hidden = y == real(-math.inf)
            y = prim.where(hidden, 0.0, y)
            p = tile.weight(y, m, c, theta) * ratio_factor(inverse)
            rise, fall = tile.weight_slope(y, m, c, theta), tile.norm_slope(y, m, c, theta)
            d = (rise * dchunk[j] - fall * delta) * ratio_factor(inverse)
            if tile.stat_gradients:
                share = prim.exp((y - top) - log_total)
                d += lift * p + gamma * (y - mean)
                d -= beta * share * ((y - top) + offset)
            d = prim.where(hidden, 0.0, d)
            part = prim.accumulate(part, d * y)
            dchunk[j] = d
            chunk[j] = prim.where(hidden, 0.0, p)
        total += part
    return total


def softmax_entropy(x, top):
    """(log Σ exp(x − top), entropy) of the softmax of a row."""
    total, weighted = np.float64(0.0), np.float64(0.0)
    for start in range(0, len(x), CHUNK):
        chunk = x[start : start + CHUNK]
        some, part = real(0.0), real(0.0)
        for j in range(len(chunk)):
            d = prim.maximum(chunk[j] - top, tile.lowest)
            e = prim.exp(d)
            some = prim.accumulate(some, e)
            part = prim.accumulate(part, e * d)
        total += some
        weighted += part
    if total == 0.0:
        return real(0.0), real(0.0)
    return real(math.log(total)), real(math.log(total) - weighted / total)


def plain_row_shift(x, shift, theta):
    """(m, c) of the tile functions, from the row state of a ratio or pointwise normaliser."""
    return shift, prim.exp(-shift)


def threshold_row_shift(x, shift, theta):
    """(m, c) of the tile functions, from the row state of a threshold normaliser: the maximum, and τ − gain·maximum.

    τ is refined where its rounding, which is as large as that of the logits, would show in the weights.
    """
    top = row_maximum(x)
    if not (abs(top) < real(math.inf)):
        return real(0.0), shift
    gain = tile.gain(theta)
    tau = shift - gain * top
    if abs(shift) > 4.0:
        tau = refine_threshold(x, top, tau, theta, gain)
    return top, tau


def ratio_factor(inverse):
    """What turns u into p: 1/Z for ratios, 1 for the others."""
    if tile.is_ratio:
        return inverse
    return real(1.0)


def delta_factor(y, m, c, theta, inverse):
    """c_j of δ = Σ c_j·dp_j, before the division by Σg′ for threshold normalisers."""
    if tile.is_ratio:
        return tile.weight(y, m, c, theta) * inverse
    if tile.is_coupled:
        return tile.weight_slope(y, m, c, theta)
    return real(0.0)


def finish_delta(total, inverse):
    """δ from its sum: threshold normalisers divide by Σg′."""
    if tile.is_ratio:
        return real(total)
    return real(total * inverse)
