"""Forward row kernels: s ← u in place for each row of a block of logits, with the row state and the statistics' sums.

The weights p = u/Z stay unnormalised: the caller multiplies the row of u·v by `inverse` = 1/Z. These are templates:
`jit.compile.kernel` fills in `tile.…`, a normaliser's functions and flags that are constants of the compiled code.

A row sees one interval of the block's columns; −inf inside it is hidden too. What a row does not see becomes 0.
"""

from __future__ import annotations

import math

import numpy as np

from regard._backends.cpu.jit.compile import prim, real, tile
from regard._backends.cpu.threshold_solver import solve_row

CHUNK = 2048  # entries summed in the row's own precision before the sum joins a float64

# rows of `sums`: the fields of statistics.State, in order
N, TOP, TIES, MEAN, M2, SHIFT, FIRST, FIRST_U, U, V, LOG_U, SQUARE, SLOPE, CROSS, LSE, DISTANCE, SUPPORT = range(17)
FIELDS = 17


def visible_columns(geometry, r, n):
    """(i, first, last): the position that row r's distances count from, and the columns [first, last) that it sees.

    geometry: the first query's position, queries, the first key's position, how far a query sees to the left and to
    the right, rows per batch entry, 0, 0, and for each entry the position after its last key. Where rows have
    intervals, the zeros are the place from which on (lo, hi, i) are listed, positions all, and whether heads differ.
    """
    if geometry[6] > 0:
        listed = r if geometry[7] else r // geometry[5] * geometry[1] + r % geometry[1]
        at = geometry[6] + 3 * listed
        first = max(geometry[at] - geometry[2], 0)
        return geometry[at + 2], first, max(first, geometry[at + 1] - geometry[2])
    i = geometry[0] + r % geometry[1]
    limit = geometry[8 + r // geometry[5]]
    first = min(max(i - geometry[3] - geometry[2], 0), n)
    last = min(min(limit, i + geometry[4] + 1) - geometry[2], n)
    return i, first, max(first, last)


def parameter_of(parameter, r):
    """θ of row r; an array of one entry serves every row."""
    return real(parameter[min(r, len(parameter) - 1)])


def fill_zeros(x, first, last):
    for j in range(first, last):
        x[j] = 0.0


def zero_unseen(x, first, last):
    """Sets the columns outside [first, last), which the row does not see, to 0."""
    fill_zeros(x, 0, first)
    fill_zeros(x, last, len(x))


def row_maximum(x):
    top = real(-math.inf)
    for j in range(len(x)):
        top = prim.maximum(top, x[j])
    return top


def count_and_mean(x):
    """(number of entries above −inf, their mean)."""
    n, total = np.float64(0.0), np.float64(0.0)
    for start in range(0, len(x), CHUNK):
        chunk = x[start : start + CHUNK]
        some, part = real(0.0), real(0.0)
        for j in range(len(chunk)):
            visible = chunk[j] > real(-math.inf)
            some = prim.accumulate(some, prim.where(visible, 1.0, 0.0))
            part = prim.accumulate(part, prim.where(visible, chunk[j], 0.0))
        n += some
        total += part
    return n, total / max(n, np.float64(1.0))


def first_visible(x):
    for j in range(len(x)):
        if x[j] > real(-math.inf):
            return j
    return 0


def write_weightless_row(x, r, top, inverse, shift, z, sums):
    """An empty row (its maximum is −inf) has no weights; one with a NaN or +inf is NaN throughout."""
    value, n = real(0.0), 0
    if top != real(-math.inf):
        value = real(math.nan)
        for j in range(len(x)):
            n += x[j] != real(-math.inf)
    fill_zeros(x, 0, len(x))
    inverse[r], shift[r], z[r] = value, value, value
    if tile.has_stats:
        sums[:, r] = value
        sums[N, r] = n
        sums[TOP, r] = top


def forward_exponential(s, geometry, parameter, sink, inverse, shift, z, sums, packed):
    """u = exp(s − max), the softmax family; the sums leave out the maximum. A sink of −inf is none."""
    for r in range(s.shape[0]):
        i, first, last = visible_columns(geometry, r, s.shape[1])
        zero_unseen(s[r], first, last)
        x = s[r, first:last]
        top = row_maximum(x)
        if not (abs(top) < real(math.inf)):
            write_weightless_row(x, r, top, inverse, shift, z, sums)
            continue
        n, mean, start = np.float64(0.0), np.float64(0.0), 0
        if tile.has_stats:
            n, mean = count_and_mean(x)
            start = first_visible(x)
        key = geometry[2] + first
        total, below, log_u, square, ties, m2, distance = sum_exponentials(x, top, real(mean), real(key - i))
        sink_logit = np.float64(sink[min(r, len(sink) - 1)])
        m = np.float64(top)
        if tile.has_rest:
            m = max(m, np.float64(0.0))
        m = max(m, sink_logit)
        ratio = math.exp(np.float64(top) - m)
        rest = math.exp(sink_logit - m)
        if tile.has_rest:
            rest += tile.rest(real(math.exp(-m)))
        shift[r] = m
        z[r] = ratio * total + rest
        inverse[r] = ratio / (ratio * total + rest)
        if tile.has_stats:
            sums[N, r], sums[TOP, r], sums[TIES, r], sums[MEAN, r], sums[M2, r] = n, top, ties, mean, m2
            sums[SHIFT, r], sums[FIRST, r], sums[FIRST_U, r] = top, key + start, x[start]
            sums[U, r], sums[V, r], sums[SLOPE, r], sums[LSE, r] = below, below, below, below
            sums[LOG_U, r], sums[SQUARE, r], sums[CROSS, r] = log_u, square, square
            sums[DISTANCE, r], sums[SUPPORT, r] = distance, n


def sum_exponentials(x, top, mean, offset):
    """x ← e = exp(x − top); (Σe, Σ'e, Σ'e·log e, Σ'e², ties, Σ(x − mean)², Σe·|i − j|), ' without the maximum."""
    zero = np.float64(0.0)
    total, log_u, square, ties, m2, distance = zero, zero, zero, zero, zero, zero
    for start in range(0, len(x), CHUNK):
        chunk, away = x[start : start + CHUNK], offset + real(start)
        total_, log_, square_, ties_, m2_, distance_ = real(0.0), real(0.0), real(0.0), real(0.0), real(0.0), real(0.0)
        for j in range(len(chunk)):
            d = prim.maximum(chunk[j] - top, tile.lowest)
            e = prim.exp(d)
            if tile.sums_logits:
                gap = prim.where(chunk[j] > real(-math.inf), chunk[j] - mean, 0.0)
                m2_ = prim.accumulate(m2_, gap * gap)
            if tile.sums_distance:
                distance_ = prim.accumulate(distance_, e * abs(real(np.int32(j)) + away))
            if tile.sums_weights:
                lower = prim.where(d < 0.0, e, 0.0)
                total_ = prim.accumulate(total_, lower)
                log_ = prim.accumulate(log_, lower * d)
                square_ = prim.accumulate(square_, lower * lower)
                ties_ = prim.accumulate(ties_, prim.where(d < 0.0, 0.0, 1.0))
            else:
                total_ = prim.accumulate(total_, e)
            chunk[j] = e
        total += total_
        log_u += log_
        square += square_
        ties += ties_
        m2 += m2_
        distance += distance_
    if tile.sums_weights:
        return total + ties, total, log_u, square, ties, m2, distance
    return total, total - 1.0, log_u, square, np.float64(1.0), m2, distance


def forward_general(s, geometry, parameter, sink, inverse, shift, z, sums, packed):
    """The other ratios, p = u/Z with Z = Σv + rest, and the pointwise normalisers, where Z = 1."""
    for r in range(s.shape[0]):
        theta = parameter_of(parameter, r)
        i, first, last = visible_columns(geometry, r, s.shape[1])
        zero_unseen(s[r], first, last)
        x = s[r, first:last]
        top = row_maximum(x)
        if not (abs(top) < real(math.inf)):
            write_weightless_row(x, r, top, inverse, shift, z, sums)
            continue
        m = real(0.0)
        if tile.is_shifted:
            m = prim.maximum(top, tile.lowest_shift)
        c = prim.exp(-m)
        total = weigh_row(x, r, top, m, c, theta, i, geometry[2] + first, sums)
        shift[r], z[r], inverse[r] = m, 0.0, 1.0
        if tile.is_ratio:
            total += tile.rest(c)
            z[r] = total
            inverse[r] = finite_inverse(real(total))


def finite_inverse(z):
    """1/z, at most the largest number; 0 for z = 0."""
    return min(real(1.0) / z, real(tile.largest)) if z != real(0.0) else real(0.0)


def weigh_row(x, r, top, m, c, theta, i, key, sums):
    """x ← u and its sums; returns Σv."""
    n, mean, start = np.float64(0.0), np.float64(0.0), 0
    if tile.has_stats:
        n, mean = count_and_mean(x)
        start = first_visible(x)
    top_u, top_v = tile.weight(top, m, c, theta), tile.norm(top, m, c, theta)
    unit = real(1.0)
    if top_u > tile.smallest:
        unit = real(1.0) / top_u
    row = sum_weights(x, top, real(mean), m, c, theta, real(key - i), unit)
    u, v, log_u, square, slope, cross, lse, below, m2, distance, support = row
    if tile.has_stats:
        ties = np.float64(1.0)
        if tile.sums_weights:
            ties = n - below
        sums[N, r], sums[TOP, r], sums[TIES, r], sums[MEAN, r], sums[M2, r] = n, top, ties, mean, m2
        sums[SHIFT, r], sums[FIRST, r], sums[FIRST_U, r] = m, key + start, x[start]
        sums[U, r], sums[V, r], sums[LOG_U, r], sums[SQUARE, r] = u, v, log_u, square
        sums[SLOPE, r], sums[CROSS, r], sums[LSE, r], sums[DISTANCE, r] = slope, cross, lse, distance
        sums[SUPPORT, r] = n
        if tile.is_sparse:
            sums[SUPPORT, r] = support
        if tile.sums_weights:
            v += ties * top_v
        else:
            sums[U, r], sums[V, r], sums[LSE, r] = u - top_u, v - top_v, lse - 1.0
    return v


def sum_weights(x, top, mean, m, c, theta, offset, unit):
    """x ← u; returns its sums. With `sums_weights` all but the last four leave out the maximum.

    Squares are those of unit·u ≤ about 1: squares of small or large weights would leave float32's range.
    """
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
            weight = prim.where(hidden, 0.0, tile.weight(y, m, c, theta))
            norm = prim.where(hidden, 0.0, tile.norm(y, m, c, theta))
            if tile.sums_logits:
                gap = prim.where(hidden, 0.0, y - mean)
                m2_ = prim.accumulate(m2_, gap * gap)
            if tile.sums_distance:
                distance_ = prim.accumulate(distance_, weight * abs(real(np.int32(j)) + away))
            if tile.sums_weights:
                lower = (y < top) & (not hidden)
                support_ = prim.accumulate(support_, prim.where(hidden, 0.0, tile.has_weight(y, m, c, theta)))
                u_ = prim.accumulate(u_, prim.where(lower, weight, 0.0))
                v_ = prim.accumulate(v_, prim.where(lower, norm, 0.0))
                logarithm = prim.log(prim.maximum(weight, tile.smallest))
                log_ = prim.accumulate(log_, prim.where(lower, weight * logarithm, 0.0))
                share = weight * unit
                square_ = prim.accumulate(square_, prim.where(lower, share * share, 0.0))
                slope_ = prim.accumulate(slope_, prim.where(lower, tile.weight_slope(y, m, c, theta), 0.0))
                cross_ = prim.accumulate(cross_, prim.where(lower, tile.slope_product(y, m, c, theta), 0.0))
                below_ = prim.accumulate(below_, prim.where(lower, 1.0, 0.0))
                if tile.sums_exponentials:
                    lse_ = prim.accumulate(lse_, prim.where(lower, prim.exp(y - top), 0.0))
            else:
                u_ = prim.accumulate(u_, weight)
                v_ = prim.accumulate(v_, norm)
                if tile.sums_exponentials:
                    lse_ = prim.accumulate(lse_, prim.exp(y - top))
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


def forward_threshold(s, geometry, parameter, sink, inverse, shift, z, sums, packed):
    """p = value(max(gain·s − τ, 0)) with Σp = 1. The shift among the sums is τ − gain·max.

    packed: room for `solve_row`.
    """
    for r in range(s.shape[0]):
        theta = parameter_of(parameter, r)
        gain = tile.gain(theta)
        i, first, last = visible_columns(geometry, r, s.shape[1])
        zero_unseen(s[r], first, last)
        x = s[r, first:last]
        top = row_maximum(x)
        if not (abs(top) < real(math.inf)):
            write_weightless_row(x, r, top, inverse, shift, z, sums)
            continue
        tau, _, total, slopes = solve_row(x, top, gain, packed, theta, gain)
        weigh_row(x, r, top, top, tau, theta, i, geometry[2] + first, sums)
        shift[r] = gain * top + tau
        z[r] = slopes
        inverse[r] = 1.0 / total
        if tile.has_stats:
            sums[SHIFT, r] = tau
