"""s ← p and dp ← ds = a·dp − b·δ in place, for each row of a block; δ = Σ c·dp. And dropout.

Templates like those of `attention_rows`. Where the slopes follow from the weights, the weights are written first and
the scores need not be kept; statistics' gradients, temperature's gradient and maps without that property need them.
"""

from __future__ import annotations

import math

import numpy as np

from regard._backends.cpu.attention.forward_rows import CHUNK, boosted, count_and_mean, interval, maximum_of, opened
from regard._backends.cpu.jit.compile import real, tile, words
from regard._core.philox import KEY_A, KEY_B, ROUND_A, ROUND_B


def backward_from_weights(s, dp, i0, rows, j0, left, right, limit, parameter, frame, z, delta):
    """s ← p and dp ← a·(dp − δ), where the slope a = b follows from the weight."""
    theta = real(parameter)
    for r in range(s.shape[0]):
        first, last = interval(i0 + r % rows, j0, left, right, limit, s.shape[1])
        x = opened(s, r, first, last)
        g = opened(dp, r, first, last)
        boost, inverse, steepest = inverted(z[r])
        m, c = framed(x, frame[r], theta)
        extra = slope_argument(steepest, theta)
        total = np.float64(0.0)
        for start in range(0, len(x), CHUNK):
            chunk, dchunk = x[start : start + CHUNK], g[start : start + CHUNK]
            part = real(0.0)
            for j in range(len(chunk)):
                u = words.where(chunk[j] == real(-math.inf), 0.0, tile.weight(chunk[j], m, c, theta))
                p = boost * u * scaled(inverse)
                part = words.accumulate(part, share_of(p, extra) * dchunk[j])
                chunk[j] = p
            total += part
        shift = real(settled(total, inverse))
        delta[r] = shift
        for j in range(len(x)):
            g[j] = tile.slope_of_weight(x[j], extra) * (g[j] - shift)


def backward_from_scores(s, dp, i0, rows, j0, left, right, limit, parameter, frame, z, delta, upstream, pull):
    """s ← p and dp ← a·dp − b·δ + what the statistics' gradients add; pull = Σ ds·s.

    upstream [3, rows]: gradients of logit_variance, logsumexp and entropy.
    """
    theta = real(parameter)
    for r in range(s.shape[0]):
        first, last = interval(i0 + r % rows, j0, left, right, limit, s.shape[1])
        x = opened(s, r, first, last)
        g = opened(dp, r, first, last)
        boost, inverse, steepest = inverted(z[r])
        m, c = framed(x, frame[r], theta)
        total = np.float64(0.0)
        for start in range(0, len(x), CHUNK):
            chunk, dchunk = x[start : start + CHUNK], g[start : start + CHUNK]
            part = real(0.0)
            for j in range(len(chunk)):
                share = share_of_score(chunk[j], m, c, theta, boost, inverse)
                part = words.accumulate(part, words.where(chunk[j] == real(-math.inf), 0.0, share) * dchunk[j])
            total += part
        shift = real(settled(total, inverse))
        delta[r] = shift
        top, log_total, entropy, mean, by_variance = real(0.0), real(0.0), real(0.0), real(0.0), real(0.0)
        by_lse, by_entropy = real(0.0), real(0.0)
        if tile.watched:
            top = maximum_of(x)
            n, average = count_and_mean(x)
            mean = real(average)
            log_total, entropy = entropy_of(x, top)
            by_variance = real(2.0 * upstream[0, r] / max(n, np.float64(1.0)))
            by_lse, by_entropy = upstream[1, r], upstream[2, r]
        pulled = np.float64(0.0)
        for start in range(0, len(x), CHUNK):
            chunk, dchunk = x[start : start + CHUNK], g[start : start + CHUNK]
            part = real(0.0)
            for j in range(len(chunk)):
                y = chunk[j]
                hidden = y == real(-math.inf)
                y = words.where(hidden, 0.0, y)
                p = boost * tile.weight(y, m, c, theta) * scaled(inverse)
                d = (tile.rise(y, m, c, theta) * dchunk[j] - tile.fall(y, m, c, theta) * shift) * scaled(steepest)
                if tile.watched:
                    log_p = (y - top) - log_total
                    d += by_lse * p + by_variance * (y - mean)
                    d -= by_entropy * words.exp(log_p) * (log_p + entropy)
                d = words.where(hidden, 0.0, d)
                part = words.accumulate(part, d * y)
                dchunk[j] = d
                chunk[j] = words.where(hidden, 0.0, p)
            pulled += part
        pull[r] = pulled


def entropy_of(x, top):
    """(log Σ exp(x − top), entropy) of the softmax of a row."""
    total, weighted = np.float64(0.0), np.float64(0.0)
    for start in range(0, len(x), CHUNK):
        chunk = x[start : start + CHUNK]
        some, part = real(0.0), real(0.0)
        for j in range(len(chunk)):
            d = words.maximum(chunk[j] - top, tile.lowest)
            e = words.exp(d)
            some = words.accumulate(some, e)
            part = words.accumulate(part, e * d)
        total += some
        weighted += part
    if total == 0.0:
        return real(0.0), real(0.0)
    return real(math.log(total)), real(math.log(total) - weighted / total)


def framed(x, frame, theta):
    """(m, c) of the tile functions. Threshold maps: the maximum and τ − maximum, set right by Newton steps where
    τ's own rounding, in the scores' magnitude, would show in the weights: one, unless little is left of τ."""
    if tile.ratio or not tile.coupled:
        return frame, words.exp(-frame)
    top = maximum_of(x)
    if not (abs(top) < real(math.inf)):
        return real(0.0), frame
    tau = frame - tile.level(top, theta)
    if abs(frame) > 4.0:
        if not (real(-1.0) <= tau < real(0.0)):
            tau = real(-1.0)  # from where the steps rise to the root
        for _ in range(20):
            step = newton_step(x, top, tau, theta)
            tau = real(max(tau + step, -1.0))
            if abs(step) <= -1e-4 * tau:
                break
    return top, tau


def newton_step(x, top, tau, theta):
    """(Σp − 1) / |d Σp/dτ|."""
    values, slopes = sums_at(x, top, tau, theta)
    return (values - 1.0) * tile.level(1.0, theta) / slopes


def sums_at(x, m, c, theta):
    """(Σp, Σg′) of scores at a threshold."""
    values, slopes = np.float64(0.0), np.float64(0.0)
    for start in range(0, len(x), CHUNK):
        chunk = x[start : start + CHUNK]
        value, slope = real(0.0), real(0.0)
        for j in range(len(chunk)):
            value = words.accumulate(value, tile.weight(chunk[j], m, c, theta))
            slope = words.accumulate(slope, tile.rise(chunk[j], m, c, theta))
        values += value
        slopes += slope
    return values, slopes


def share_of_score(y, m, c, theta, boost, inverse):
    """The same from the score."""
    if tile.ratio:
        return boost * tile.weight(y, m, c, theta) * inverse
    if tile.coupled:
        return tile.rise(y, m, c, theta)
    return real(0.0)


def inverted(z):
    """(boost, 1/(boost·Z), 1/Z), the last one finite: of logits next to 0 it is the largest number."""
    boost = real(1.0)
    if tile.ratio:
        boost = boosted(z)
    inverse = real(1.0) / (boost * z) if z != real(0.0) else real(0.0)
    return boost, inverse, min(boost * inverse, real(tile.largest))


def scaled(inverse):
    """What turns u into p: 1/Z for the ratios, nothing for the rest."""
    if tile.ratio:
        return inverse
    return real(1.0)


def slope_argument(inverse, theta):
    """The second argument of slope_of_weight: 1/Z for the ratios, else the parameter."""
    if tile.ratio:
        return inverse
    return theta


def share_of(p, extra):
    """c_j of δ = Σ c_j·dp_j, before its division by Σg′ for the threshold maps."""
    if tile.ratio:
        return p
    if tile.coupled:
        return tile.slope_of_weight(p, extra)
    return real(0.0)


def settled(total, inverse):
    """δ from the sum: the threshold maps divide by Σg′."""
    if tile.ratio:
        return total
    return total * inverse


def drop(s, i0, rows, j0, base, queries, seed, threshold, factor):
    """s ← factor·s where the random word of (seed, row, key) is at least the threshold, else 0."""
    for r in range(s.shape[0]):
        row = np.uint64(base + (r // rows) * queries + i0 + r % rows)
        x = s[r]
        for j in range(len(x)):
            x[j] = x[j] * factor if random_word(seed, row, np.uint64(j0 + j)) >= threshold else 0.0


def random_word(seed, row, key):
    """The first word of `regard._core.philox.words`."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = key, row & low, row >> half, np.uint64(0)
    k0, k1 = seed & low, seed >> half
    for _ in range(10):
        a, b = c0 * np.uint64(ROUND_A), c2 * np.uint64(ROUND_B)
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & low, (a >> half) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + np.uint64(KEY_A)) & low, (k1 + np.uint64(KEY_B)) & low
    return c0
