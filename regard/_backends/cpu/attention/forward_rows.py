"""s ← u in place, for each row of a block of logits; p = u/Z, and the sums that statistics are made of.

The weights stay unnormalised: the caller scales the row of u·v by `inverse` = 1/Z instead. These are templates:
`_compile.kernel` fills in `tile.…`, a normaliser's functions and flags that are known when compiling.

A block holds `rows` queries i0, i0 + 1, … of one or more heads below one another; its columns are the keys from j0
on. Each row sees one interval of them, and in it −inf is hidden too. What a row does not see becomes 0.
"""

from __future__ import annotations

import math

import numpy as np

from regard._backends.cpu.jit.compile import real, tile, words
from regard._backends.cpu.rows.threshold import solve

CHUNK = 2048  # entries summed in the row's own precision before the sum joins a float64

# places of the fields of statistics.State
N, TOP, TIES, MEAN, M2, FRAME, FIRST, FIRST_U, U, V, LOG_U, SQUARE, SLOPE, CROSS, LSE, DISTANCE, SUPPORT = range(17)


def interval(i, j0, left, right, limit, n):
    """The columns [first, last) that query i sees."""
    first = min(max(i - left - j0, 0), n)
    last = min(min(limit, i + right + 1) - j0, n)
    return first, max(first, last)


def blank(x, first, last):
    for j in range(first, last):
        x[j] = 0.0


def maximum_of(x):
    top = real(-math.inf)
    for j in range(len(x)):
        top = words.maximum(top, x[j])
    return top


def count_and_mean(x):
    """(number of entries above −inf, their mean)."""
    n, total = np.float64(0.0), np.float64(0.0)
    for start in range(0, len(x), CHUNK):
        chunk = x[start : start + CHUNK]
        some, part = real(0.0), real(0.0)
        for j in range(len(chunk)):
            seen = chunk[j] > real(-math.inf)
            some = words.accumulate(some, words.where(seen, 1.0, 0.0))
            part = words.accumulate(part, words.where(seen, chunk[j], 0.0))
        n += some
        total += part
    return n, total / max(n, np.float64(1.0))


def first_seen(x):
    for j in range(len(x)):
        if x[j] > real(-math.inf):
            return j
    return 0


def without_weights(x, r, top, inverse, shift, z, sums):
    """A row that sees no key (its maximum is −inf) weighs nothing; one with a NaN or an infinity is NaN throughout."""
    value, n = real(0.0), 0
    if top != real(-math.inf):
        value = real(math.nan)
        for j in range(len(x)):
            n += x[j] != real(-math.inf)
    blank(x, 0, len(x))
    inverse[r], shift[r], z[r] = value, value, value
    if tile.measured:
        sums[:, r] = value
        sums[N, r] = n
        sums[TOP, r] = top


def opened(s, r, first, last):
    """Blank what row r does not see; the rest of it."""
    x = s[r]
    blank(x, 0, first)
    blank(x, last, len(x))
    return x[first:last]


def forward_exponential(s, i0, rows, j0, left, right, limit, parameter, sink, inverse, shift, z, sums):
    """u = exp(s − max): the softmax family. The maximum itself stays out of the sums; sink −inf is none."""
    for r in range(s.shape[0]):
        i = i0 + r % rows
        first, last = interval(i, j0, left, right, limit, s.shape[1])
        x = opened(s, r, first, last)
        top = maximum_of(x)
        if not (abs(top) < real(math.inf)):
            without_weights(x, r, top, inverse, shift, z, sums)
            continue
        n, mean, start = np.float64(0.0), np.float64(0.0), 0
        if tile.measured:
            n, mean = count_and_mean(x)
            start = first_seen(x)
        centre, offset = real(mean), real(j0 + first - i)
        total, below, log_u, square, ties, m2, distance = exponential_sums(x, top, centre, offset)
        m = np.float64(top)
        if tile.silent:
            m = max(m, np.float64(0.0))
        m = max(m, np.float64(sink[r]))
        ratio = math.exp(np.float64(top) - m)
        rest = math.exp(np.float64(sink[r]) - m)
        if tile.silent:
            rest += tile.rest(real(math.exp(-m)))
        shift[r] = m
        z[r] = ratio * total + rest
        inverse[r] = ratio / (ratio * total + rest)
        if tile.measured:
            sums[N, r], sums[TOP, r], sums[TIES, r], sums[MEAN, r], sums[M2, r] = n, top, ties, mean, m2
            sums[FRAME, r], sums[FIRST, r], sums[FIRST_U, r] = top, j0 + first + start, x[start]
            sums[U, r], sums[V, r], sums[SLOPE, r], sums[LSE, r] = below, below, below, below
            sums[LOG_U, r], sums[SQUARE, r], sums[CROSS, r] = log_u, square, square
            sums[DISTANCE, r], sums[SUPPORT, r] = distance, n


def exponential_sums(x, top, mean, offset):
    """x ← e = exp(x − top); (Σe, Σ'e, Σ'e·log e, Σ'e², ties, Σ(x − mean)², Σe·|i − j|), ' without the maximum."""
    zero = np.float64(0.0)
    total, log_u, square, ties, m2, distance = zero, zero, zero, zero, zero, zero
    for start in range(0, len(x), CHUNK):
        chunk, away = x[start : start + CHUNK], offset + real(start)
        total_, log_, square_, ties_, m2_, distance_ = real(0.0), real(0.0), real(0.0), real(0.0), real(0.0), real(0.0)
        for j in range(len(chunk)):
            d = words.maximum(chunk[j] - top, tile.lowest)
            e = words.exp(d)
            if tile.moments:
                gap = words.where(chunk[j] > real(-math.inf), chunk[j] - mean, 0.0)
                m2_ = words.accumulate(m2_, gap * gap)
            if tile.travel:
                distance_ = words.accumulate(distance_, e * abs(real(np.int32(j)) + away))
            if tile.spread:
                lower = words.where(d < 0.0, e, 0.0)
                total_ = words.accumulate(total_, lower)
                log_ = words.accumulate(log_, lower * d)
                square_ = words.accumulate(square_, lower * lower)
                ties_ = words.accumulate(ties_, words.where(d < 0.0, 0.0, 1.0))
            else:
                total_ = words.accumulate(total_, e)
            chunk[j] = e
        total += total_
        log_u += log_
        square += square_
        ties += ties_
        m2 += m2_
        distance += distance_
    if tile.spread:
        return total + ties, total, log_u, square, ties, m2, distance
    return total, total - 1.0, log_u, square, np.float64(1.0), m2, distance


def forward_summed(s, i0, rows, j0, left, right, limit, parameter, sink, inverse, shift, z, sums):
    """The other ratios, p = u/Z with Z = Σv + rest, and the pointwise maps, where Z = 1."""
    theta = real(parameter)
    for r in range(s.shape[0]):
        i = i0 + r % rows
        first, last = interval(i, j0, left, right, limit, s.shape[1])
        x = opened(s, r, first, last)
        top = maximum_of(x)
        if not (abs(top) < real(math.inf)):
            without_weights(x, r, top, inverse, shift, z, sums)
            continue
        m = real(0.0)
        if tile.shifted:
            m = words.maximum(top, tile.lowest_shift)
        c = words.exp(-m)
        total = general_row(x, r, top, m, c, theta, i, j0 + first, sums)
        shift[r] = m
        if tile.ratio:
            total += tile.rest(c)
            z[r] = total
            boost = boosted(total)
            inverse[r] = 1.0 / (boost * total) if total != 0.0 else 0.0
            if boost != 1.0:
                for j in range(len(x)):
                    x[j] *= boost
        else:
            z[r] = 0.0
            inverse[r] = 1.0


def boosted(z):
    """A power of two for u and Z of logits next to 0, where 1/Z would overflow."""
    return real(2.0**64) if z < real(2.0**-96) else real(1.0)


def general_row(x, r, top, m, c, theta, i, key, sums):
    """x ← u, and its sums; Σv."""
    n, mean, start = np.float64(0.0), np.float64(0.0), 0
    if tile.measured:
        n, mean = count_and_mean(x)
        start = first_seen(x)
    top_u, top_v = tile.weight(top, m, c, theta), tile.norm(top, m, c, theta)
    unit = real(1.0)
    if top_u > tile.smallest:
        unit = real(1.0) / top_u
    row = general_sums(x, top, real(mean), m, c, theta, real(key - i), unit)
    u, v, log_u, square, slope, cross, lse, below, m2, distance, support = row
    if tile.measured:
        ties = np.float64(1.0)
        if tile.spread:
            ties = n - below
        sums[N, r], sums[TOP, r], sums[TIES, r], sums[MEAN, r], sums[M2, r] = n, top, ties, mean, m2
        sums[FRAME, r], sums[FIRST, r], sums[FIRST_U, r] = m, key + start, x[start]
        sums[U, r], sums[V, r], sums[LOG_U, r], sums[SQUARE, r] = u, v, log_u, square
        sums[SLOPE, r], sums[CROSS, r], sums[LSE, r], sums[DISTANCE, r] = slope, cross, lse, distance
        sums[SUPPORT, r] = n
        if tile.sparse:
            sums[SUPPORT, r] = support
        if not tile.spread:
            sums[U, r], sums[V, r], sums[LSE, r] = u - top_u, v - top_v, lse - 1.0
        if tile.spread:
            v += ties * top_v
    return v


def general_sums(x, top, mean, m, c, theta, offset, unit):
    """x ← u. With `spread` every sum but the last four leaves the maximum out. Squares are summed as those of unit·u,
    which is at most about 1: of small or large weights they would leave the range of a float32."""
    zero = np.float64(0.0)
    u, v, log_u, square, slope, cross = zero, zero, zero, zero, zero, zero
    lse, below, m2, distance, support = zero, zero, zero, zero, zero
    for start in range(0, len(x), CHUNK):
        chunk, away = x[start : start + CHUNK], offset + real(start)
        u_, v_, log_, square_, slope_, cross_ = real(0.0), real(0.0), real(0.0), real(0.0), real(0.0), real(0.0)
        lse_, below_, m2_, distance_, support_ = real(0.0), real(0.0), real(0.0), real(0.0), real(0.0)
        for j in range(len(chunk)):
            y = chunk[j]
            hidden = y == real(-math.inf)
            weight = words.where(hidden, 0.0, tile.weight(y, m, c, theta))
            norm = words.where(hidden, 0.0, tile.norm(y, m, c, theta))
            if tile.moments:
                gap = words.where(hidden, 0.0, y - mean)
                m2_ = words.accumulate(m2_, gap * gap)
            if tile.travel:
                distance_ = words.accumulate(distance_, weight * abs(real(np.int32(j)) + away))
            if tile.spread:
                lower = (y < top) & (not hidden)
                support_ = words.accumulate(support_, words.where(hidden, 0.0, tile.weighs(y, m, c, theta)))
                u_ = words.accumulate(u_, words.where(lower, weight, 0.0))
                v_ = words.accumulate(v_, words.where(lower, norm, 0.0))
                logarithm = words.log(words.maximum(weight, tile.smallest))
                log_ = words.accumulate(log_, words.where(lower, weight * logarithm, 0.0))
                share = weight * unit
                square_ = words.accumulate(square_, words.where(lower, share * share, 0.0))
                slope_ = words.accumulate(slope_, words.where(lower, tile.rise(y, m, c, theta), 0.0))
                cross_ = words.accumulate(cross_, words.where(lower, tile.cross(y, m, c, theta), 0.0))
                below_ = words.accumulate(below_, words.where(lower, 1.0, 0.0))
                if tile.lse:
                    lse_ = words.accumulate(lse_, words.where(lower, words.exp(y - top), 0.0))
            else:
                u_ = words.accumulate(u_, weight)
                v_ = words.accumulate(v_, norm)
                if tile.lse:
                    lse_ = words.accumulate(lse_, words.exp(y - top))
            chunk[j] = weight
        u += u_
        v += v_
        log_u += log_
        square += square_ / np.float64(unit) / np.float64(unit)
        slope += slope_
        cross += cross_
        lse += lse_
        below += below_
        m2 += m2_
        distance += distance_
        support += support_
    return u, v, log_u, square, slope, cross, lse, below, m2, distance, support


def forward_threshold(s, i0, rows, j0, left, right, limit, parameter, sink, inverse, shift, z, sums):
    """p = value(max(gain·s − τ, 0)) with Σp = 1, solved on the entries within 1 of the maximum.

    The shift among the sums is τ − gain·max.
    """
    theta = real(parameter)
    gain = tile.gain(theta)
    y = np.empty(s.shape[1] + tile.lanes, s.dtype)
    packed = np.empty(s.shape[1] + 2 * tile.lanes, s.dtype)
    for r in range(s.shape[0]):
        i = i0 + r % rows
        first, last = interval(i, j0, left, right, limit, s.shape[1])
        x = opened(s, r, first, last)
        top = maximum_of(x)
        if not (abs(top) < real(math.inf)):
            without_weights(x, r, top, inverse, shift, z, sums)
            continue
        for j in range(len(x)):
            y[j] = x[j]
        padded = (len(x) + tile.lanes - 1) // tile.lanes * tile.lanes
        for j in range(len(x), padded):
            y[j] = -math.inf
        tau, _, total, slopes = solve(y, padded, top, gain, packed, theta, gain)
        general_row(x, r, top, top, tau, theta, i, j0 + first, sums)
        shift[r] = gain * top + tau
        z[r] = slopes
        inverse[r] = 1.0 / total
        if tile.measured:
            sums[FRAME, r] = tau
