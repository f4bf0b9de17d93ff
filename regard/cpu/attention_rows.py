"""One pass over each row of a block of logits, in place: weights, row state and the sums that statistics are made of.

    forward    s ← u (unnormalised), and 1/Z per row, by which the row of the product u·v is then scaled
    backward   s ← p, dp ← ds = a·dp − b·δ

These are templates: `_compile.kernel` fills in `tile.…` (a normaliser's functions, and flags known when compiling).
A block holds `rows` queries i0, i0 + 1, … of one or more heads below one another; its columns are the keys from j0
on. Each row sees one interval of them, and in it −inf is hidden too. What a row does not see becomes 0.
"""

from __future__ import annotations

import math

import numpy as np

from regard.cpu._compile import real, tile, words  # noqa: F401: open names of the templates

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
        some, part = real(0.0), real(0.0)
        for j in range(start, min(start + CHUNK, len(x))):
            seen = x[j] > real(-math.inf)
            some = words.accumulate(some, words.where(seen, 1.0, 0.0))
            part = words.accumulate(part, words.where(seen, x[j], 0.0))
        n += some
        total += part
    return n, total / max(n, np.float64(1.0))


def first_seen(x):
    for j in range(len(x)):
        if x[j] > real(-math.inf):
            return j
    return 0


def dead(r, inverse, frame, z, sums):
    """A row that sees no key."""
    inverse[r] = 0.0
    frame[r] = 0.0
    z[r] = 0.0
    if tile.measured:
        sums[:, r] = 0.0
        sums[TOP, r] = -math.inf
        sums[FIRST, r] = math.inf


def opened(s, r, i, first, last):
    """Blank what row r does not see; the rest of it."""
    x = s[r]
    blank(x, 0, first)
    blank(x, last, len(x))
    return x[first:last]


def forward_exponential(s, i0, rows, j0, left, right, limit, sink, inverse, frame, z, sums):
    """u = exp(s − max): the softmax family. The maximum itself stays out of the sums; sink −inf is none."""
    for r in range(s.shape[0]):
        i = i0 + r % rows
        first, last = interval(i, j0, left, right, limit, s.shape[1])
        x = opened(s, r, i, first, last)
        top = maximum_of(x)
        if top == real(-math.inf):
            blank(x, 0, len(x))
            dead(r, inverse, frame, z, sums)
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
            rest += math.exp(-m)
        if top == real(math.inf):
            rest = math.nan
        frame[r] = m
        z[r] = ratio * total + rest
        inverse[r] = ratio / (ratio * total + rest)
        if tile.measured:
            sums[N, r], sums[TOP, r], sums[TIES, r], sums[MEAN, r], sums[M2, r] = n, top, ties, mean, m2
            sums[FRAME, r], sums[FIRST, r], sums[FIRST_U, r] = m, j0 + first + start, ratio * x[start]
            sums[U, r], sums[V, r], sums[SLOPE, r], sums[LSE, r] = ratio * below, ratio * below, ratio * below, below
            sums[LOG_U, r] = ratio * (log_u + (np.float64(top) - m) * below)
            sums[SQUARE, r], sums[CROSS, r] = ratio * ratio * square, ratio * ratio * square
            sums[DISTANCE, r], sums[SUPPORT, r] = ratio * distance, n


def exponential_sums(x, top, mean, offset):
    """x ← e = exp(x − top); (Σe, Σ'e, Σ'e·log e, Σ'e², ties, Σ(x − mean)², Σe·|i − j|), ' without the maximum."""
    zero = np.float64(0.0)
    total, below, log_u, square, ties, m2, distance = zero, zero, zero, zero, zero, zero, zero
    for start in range(0, len(x), CHUNK):
        total_, log_, square_, ties_, m2_, distance_ = real(0.0), real(0.0), real(0.0), real(0.0), real(0.0), real(0.0)
        for j in range(start, min(start + CHUNK, len(x))):
            d = words.maximum(x[j] - top, tile.lowest)
            e = words.exp(d)
            if tile.moments:
                gap = words.where(x[j] > real(-math.inf), x[j] - mean, 0.0)
                m2_ = words.accumulate(m2_, gap * gap)
            if tile.travel:
                distance_ = words.accumulate(distance_, e * abs(real(np.int32(j)) + offset))
            if tile.spread:
                lower = words.where(d < 0.0, e, 0.0)
                total_ = words.accumulate(total_, lower)
                log_ = words.accumulate(log_, lower * d)
                square_ = words.accumulate(square_, lower * lower)
                ties_ = words.accumulate(ties_, words.where(d < 0.0, 0.0, 1.0))
            else:
                total_ = words.accumulate(total_, e)
            x[j] = e
        total += total_
        log_u += log_
        square += square_
        ties += ties_
        m2 += m2_
        distance += distance_
    if tile.spread:
        return total + ties, total, log_u, square, ties, m2, distance
    return total, total - 1.0, log_u, square, np.float64(1.0), m2, distance


def forward_summed(s, i0, rows, j0, left, right, limit, sink, inverse, frame, z, sums):
    """The other ratios, p = u/Z with Z = Σv + rest, and the pointwise maps, where Z = 1."""
    for r in range(s.shape[0]):
        i = i0 + r % rows
        first, last = interval(i, j0, left, right, limit, s.shape[1])
        x = opened(s, r, i, first, last)
        top = maximum_of(x)
        if top == real(-math.inf):
            blank(x, 0, len(x))
            dead(r, inverse, frame, z, sums)
            continue
        m = real(0.0)
        if tile.shifted:
            m = words.maximum(top, tile.lowest_shift)
        c = words.exp(-m)
        total = general_row(x, r, top, m, c, i, j0 + first, sums)
        frame[r] = m
        if tile.ratio:
            total += tile.rest(c)
            z[r] = total
            inverse[r] = 1.0 / total if total != 0.0 else 0.0
        else:
            z[r] = 0.0
            inverse[r] = 1.0
        if not top < real(math.inf):
            z[r], inverse[r] = math.nan, math.nan


def general_row(x, r, top, m, c, i, key, sums):
    """x ← u, and its sums; Σv."""
    n, mean, start = np.float64(0.0), np.float64(0.0), 0
    if tile.measured:
        n, mean = count_and_mean(x)
        start = first_seen(x)
    top_u, top_v = tile.weight(top, m, c), tile.norm(top, m, c)
    row = general_sums(x, top, real(mean), m, c, real(key - i))
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


def general_sums(x, top, mean, m, c, offset):
    """x ← u. With `spread` every sum but the last four leaves the maximum out."""
    zero = np.float64(0.0)
    u, v, log_u, square, slope, cross = zero, zero, zero, zero, zero, zero
    lse, below, m2, distance, support = zero, zero, zero, zero, zero
    for start in range(0, len(x), CHUNK):
        u_, v_, log_, square_, slope_, cross_ = real(0.0), real(0.0), real(0.0), real(0.0), real(0.0), real(0.0)
        lse_, below_, m2_, distance_, support_ = real(0.0), real(0.0), real(0.0), real(0.0), real(0.0)
        for j in range(start, min(start + CHUNK, len(x))):
            y = x[j]
            hidden = y == real(-math.inf)
            weight = words.where(hidden, 0.0, tile.weight(y, m, c))
            norm = words.where(hidden, 0.0, tile.norm(y, m, c))
            if tile.moments:
                gap = words.where(hidden, 0.0, y - mean)
                m2_ = words.accumulate(m2_, gap * gap)
            if tile.travel:
                distance_ = words.accumulate(distance_, weight * abs(real(np.int32(j)) + offset))
            if tile.spread:
                lower = (y < top) & (not hidden)
                support_ = words.accumulate(support_, words.where(weight > 0.0, 1.0, 0.0))
                u_ = words.accumulate(u_, words.where(lower, weight, 0.0))
                v_ = words.accumulate(v_, words.where(lower, norm, 0.0))
                logarithm = words.log(words.maximum(weight, tile.smallest))
                log_ = words.accumulate(log_, words.where(lower, weight * logarithm, 0.0))
                square_ = words.accumulate(square_, words.where(lower, weight * weight, 0.0))
                slope_ = words.accumulate(slope_, words.where(lower, tile.rise(y, m, c), 0.0))
                cross_ = words.accumulate(cross_, words.where(lower, tile.cross(y, m, c), 0.0))
                below_ = words.accumulate(below_, words.where(lower, 1.0, 0.0))
                if tile.lse:
                    lse_ = words.accumulate(lse_, words.where(lower, words.exp(y - top), 0.0))
            else:
                u_ = words.accumulate(u_, weight)
                v_ = words.accumulate(v_, norm)
                if tile.lse:
                    lse_ = words.accumulate(lse_, words.exp(y - top))
            x[j] = weight
        u += u_
        v += v_
        log_u += log_
        square += square_
        slope += slope_
        cross += cross_
        lse += lse_
        below += below_
        m2 += m2_
        distance += distance_
        support += support_
    return u, v, log_u, square, slope, cross, lse, below, m2, distance, support


def backward_from_weights(s, dp, i0, rows, j0, left, right, limit, frame, z, delta):
    """s ← p and dp ← a·(dp − δ), where the slope a = b follows from the weight."""
    for r in range(s.shape[0]):
        first, last = interval(i0 + r % rows, j0, left, right, limit, s.shape[1])
        x = opened(s, r, i0, first, last)
        g = opened(dp, r, i0, first, last)
        m, inverse = frame[r], inverted(z[r])
        c = words.exp(-m)
        extra = slope_argument(inverse)
        total = np.float64(0.0)
        for start in range(0, len(x), CHUNK):
            part = real(0.0)
            for j in range(start, min(start + CHUNK, len(x))):
                p = words.where(x[j] == real(-math.inf), 0.0, tile.weight(x[j], m, c)) * scaled(inverse)
                part = words.accumulate(part, share_of(p, extra) * g[j])
                x[j] = p
            total += part
        shift = real(settled(total, inverse))
        delta[r] = shift
        for j in range(len(x)):
            g[j] = tile.slope_of_weight(x[j], extra) * (g[j] - shift)


def backward_from_scores(s, dp, i0, rows, j0, left, right, limit, frame, z, delta, upstream, pull):
    """s ← p and dp ← a·dp − b·δ + what the statistics' gradients add; pull = Σ ds·s.

    upstream [3, rows]: gradients of logit_variance, logsumexp and entropy.
    """
    for r in range(s.shape[0]):
        first, last = interval(i0 + r % rows, j0, left, right, limit, s.shape[1])
        x = opened(s, r, i0, first, last)
        g = opened(dp, r, i0, first, last)
        m, inverse = frame[r], inverted(z[r])
        c = words.exp(-m)
        total = np.float64(0.0)
        for start in range(0, len(x), CHUNK):
            part = real(0.0)
            for j in range(start, min(start + CHUNK, len(x))):
                share = tile.share(x[j], m, c, inverse)
                part = words.accumulate(part, words.where(x[j] == real(-math.inf), 0.0, share) * g[j])
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
            part = real(0.0)
            for j in range(start, min(start + CHUNK, len(x))):
                y = x[j]
                hidden = y == real(-math.inf)
                y = words.where(hidden, 0.0, y)
                p = tile.weight(y, m, c) * scaled(inverse)
                d = tile.rise(y, m, c) * scaled(inverse) * g[j] - tile.fall(y, m, c) * scaled(inverse) * shift
                if tile.watched:
                    log_p = (y - top) - log_total
                    d += by_lse * p + by_variance * (y - mean)
                    d -= by_entropy * words.exp(log_p) * (log_p + entropy)
                d = words.where(hidden, 0.0, d)
                part = words.accumulate(part, d * y)
                g[j] = d
                x[j] = words.where(hidden, 0.0, p)
            pulled += part
        pull[r] = pulled


def entropy_of(x, top):
    """(log Σ exp(x − top), entropy) of the softmax of a row."""
    total, weighted = np.float64(0.0), np.float64(0.0)
    for start in range(0, len(x), CHUNK):
        some, part = real(0.0), real(0.0)
        for j in range(start, min(start + CHUNK, len(x))):
            d = words.maximum(x[j] - top, tile.lowest)
            e = words.exp(d)
            some = words.accumulate(some, e)
            part = words.accumulate(part, e * d)
        total += some
        weighted += part
    if total == 0.0:
        return real(0.0), real(0.0)
    return real(math.log(total)), real(math.log(total) - weighted / total)


def inverted(z):
    return real(1.0) / z if z != real(0.0) else real(0.0)


def scaled(inverse):
    """What turns u into p: 1/Z for the ratios, nothing for the rest."""
    if tile.ratio:
        return inverse
    return real(1.0)


def slope_argument(inverse):
    """The second argument of slope_of_weight: 1/Z for the ratios, else the parameter."""
    if tile.ratio:
        return inverse
    return tile.theta


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
