"""Running sums of a row's statistics inside a kernel, and `finish`, which turns them into statistics.

The sums are those of `regard.statistics.State`, in the shift of the kernel; sums marked ' exclude the row maximum, so
that nearly one-hot rows lose no digits. Logarithms are to the base 2 until `finish`. Sums that nobody asked for stay 0
and vanish at compile time.
"""

from __future__ import annotations

from collections import namedtuple
from functools import cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard._backends.gpu.attention import scores, tiles, visibility
from regard._backends.gpu.attention.tiles import HIDDEN, LN2
from regard.statistics import NAMES

Slots = namedtuple("Slots", NAMES)  # type: ignore[misc]  # where each statistic is stored; −1: nowhere


class Needs(NamedTuple):
    """Which sums a set of statistics takes."""

    top: bool
    shares: bool  # Σ'u, ties
    log_u: bool
    square: bool
    slope: bool
    lse: bool
    moments: bool
    distance: bool
    support: bool
    count: bool  # visible keys counted in the loop
    first: bool
    track_first: bool  # in the loop: a bias decides which key is the first


@cache
def slots(names: tuple[str, ...]) -> Slots:
    """Return where each statistic is stored."""
    return Slots(*(names.index(name) if name in names else -1 for name in NAMES))


def needs(names: tuple[str, ...], choice, dense: bool) -> Needs:
    """Return which sums these statistics take; `dense`: a bias may hide any key of any row."""
    wanted = set(names)
    entropy = bool(wanted & {"entropy", "effective_keys"})
    gain, participation = "gradient_gain" in wanted, "participation" in wanted
    exponential = choice.family == "ratio" and choice.exponential
    square = participation or (gain and exponential)
    slope = gain and not exponential
    lse = "logsumexp" in wanted and not exponential
    shares = entropy or square or slope or lse or gain or bool(wanted & {"mass", "distance", "first_key_mass"})
    sparse = choice.sparse and "support" in wanted
    return Needs(
        top=bool(wanted),
        shares=shares,
        log_u=entropy,
        square=square,
        slope=slope,
        lse=lse,
        moments=bool(wanted & {"mean_logit", "logit_variance"}),
        distance="distance" in wanted,
        support=sparse,
        count=dense and (bool(wanted) or not exponential),  # Z = 0 says where Σ exp has no key
        first="first_key_mass" in wanted,
        track_first=dense and "first_key_mass" in wanted,
    )


class Sums(NamedTuple):
    """The running sums of a block of rows: [M] or, until `sum_lanes`, [M, LANES]."""

    top: Any  # max y
    shift: Any  # log2 of what u is measured in (ratio)
    z: Any  # Σ v, all keys
    ties: Any  # keys with y = top
    u: Any  # Σ' u
    v: Any  # Σ' v
    log_u: Any  # Σ' u·log2 u
    square: Any  # Σ' u², see `square`
    slope: Any  # Σ' u′
    cross: Any  # Σ' v′·u, threshold: Σ' g′²
    lse: Any  # Σ' exp(s − top)
    distance: Any  # Σ u·|i − j|
    support: Any  # keys with u > 0
    n: Any  # visible keys
    first: Any  # the first visible key
    first_y: Any  # its y
    pivot: Any
    mean: Any  # Σ (y − pivot)
    m2: Any  # Σ (y − pivot)²


@triton.jit
def empty_sums(shift, C: tl.constexpr):
    """Return the sums of no keys."""
    zero = tiles.zeros(C.BM, C.LANES, C.ACC)
    hidden = tiles.full(C.BM, HIDDEN, C.ACC)
    nowhere = tiles.full(C.BM, 2147483647, tl.int32)
    return Sums(
        hidden, shift, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, nowhere,
        tiles.full(C.BM, 0.0, C.ACC), hidden, zero, zero,
    )  # fmt: skip


@triton.jit
def sum_lanes(r):
    """Add up the lanes of each row: every sum becomes [M]."""
    return Sums(
        r.top, r.shift, tl.sum(r.z, 1), tl.sum(r.ties, 1), tl.sum(r.u, 1), tl.sum(r.v, 1), tl.sum(r.log_u, 1),
        tl.sum(r.square, 1), tl.sum(r.slope, 1), tl.sum(r.cross, 1), tl.sum(r.lse, 1), tl.sum(r.distance, 1),
        tl.sum(r.support, 1), tl.sum(r.n, 1), r.first, r.first_y, r.pivot, tl.sum(r.mean, 1), tl.sum(r.m2, 1),
    )  # fmt: skip


@triton.jit
def first_scores(block, opt, C: tl.constexpr):
    """Compute y of each row's first key, where no matrix decides which that is: one dot product per row."""
    d = tl.arange(0, C.BD)
    k = block.k
    base = k.ptr + tiles.wide(block.b) * k.stride[0] + tiles.wide(block.h // opt.group) * k.stride[1]
    first = visibility.first_keys(block.b, block.h, block.i, block.first, block.last, opt)
    there = (first < block.last)[:, None] & (d[None, :] < C.D)
    where = base + tiles.wide(first)[:, None] * k.stride[2] + d[None, :] * k.stride[3]
    x = tl.sum(block.q.to(C.ACC) * tl.load(where, mask=there, other=0.0).to(C.ACC), 1)
    y, _ = scores.compute_scores(
        x, block.b, block.h, block.i, first, None, first, block.last, block.bias, (block.position, block.head), opt, C,
        False,
    )  # fmt: skip
    return y


@triton.jit
def log2_or_0(u):
    """Return log2(u), 0 where u = 0."""
    return tl.log2(tl.where(u > 0.0, u, 1.0))


@triton.jit
def square(u, F: tl.constexpr):
    """Return u²; in units of 2⁻⁸⁰ for pointwise maps, whose weights may all be tiny."""
    if F.family == "pointwise":
        u = u * 2.0**40
    return u * u


@triton.jit
def find_support(u, y, a, visible, C: tl.constexpr):
    """Return a tile that is above 0 where a key has weight; for ratios where u rises, however small exp(s − m) is."""
    if C.F.family == "ratio" and not C.F.exponential:
        u = tl.where(visible, C.F.numerator_slope(1.0, y * a[:, None], 1.0), 0.0)
    return u


@triton.jit
def update_counts(r, y, visible, j, top, u, C: tl.constexpr):
    """Return (support, n, first, first_y, pivot, mean, m2) after a tile: the sums that do not depend on the shift."""
    NEED: tl.constexpr = C.NEED
    support = r.support
    n = r.n
    first = r.first
    first_y = r.first_y
    pivot = r.pivot
    mean = r.mean
    m2 = r.m2
    if NEED.support:
        support += tiles.fold(tl.where(u > 0.0, 1.0, 0.0).to(y.dtype), C)
    if NEED.count:
        n += tiles.fold(tl.where(visible, 1.0, 0.0).to(y.dtype), C)
    if NEED.track_first:
        here = tl.min(tl.where(visible, j, 2147483647), 1)
        at = tl.sum(tl.where(j == here[:, None], y, 0.0), 1)
        first_y = tl.where(here < first, at, first_y)
        first = tl.minimum(first, here)
    if NEED.moments:
        pivot = tl.where(pivot <= HIDDEN, top, pivot)  # the first tile's maximum: near enough to the mean
        d = tl.where(visible, y - pivot[:, None], 0.0)
        mean += tiles.fold(d, C)
        m2 += tiles.fold(d * d, C)
    return support, n, first, first_y, pivot, mean, m2


@triton.jit
def sum_distances(u, i, j, start, sum_u, CAUSAL: tl.constexpr, C: tl.constexpr):
    """Return Σ_j u·|i − j| of a tile; if every key lies before its query, i is taken out of the inner sum."""
    if CAUSAL:
        ahead = (i - start).to(u.dtype)
        moved = ahead[:, None] * sum_u - tiles.fold(u * (j - start).to(u.dtype), C)
    else:
        moved = tiles.fold(u * tl.abs((i[:, None] - start).to(u.dtype) - (j - start).to(u.dtype)), C)
    return moved


@triton.jit
def store_statistic(ptr, row, rows, value, empty, bare, inside, SLOT: tl.constexpr):
    """Store one statistic, `bare` for empty rows, if it was asked for."""
    if SLOT >= 0:
        where = ptr + SLOT * tiles.wide(rows) + row
        tl.store(where, tl.where(empty, bare, value).to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def finish(
    ptr, row, inside, empty, r, a, n, u1, v1, d1, x1, first_u, rest, inverse, lse, opt, C: tl.constexpr, rows=None
):  # fmt: skip
    """Turn sums into statistics and store those asked for.

    u1, v1, d1, x1 are u, v, u′ and cross at the maximum, and p = u·inverse. `rest` is a ratio's 1 − Σv·inverse: the
    share of the sink and of softmax1's extra key. `rows` is the distance between two statistics in memory; None where
    each program has one block of C.BM rows.
    """
    SLOT: tl.constexpr = C.SLOT
    NEED: tl.constexpr = C.NEED
    if rows is None:
        rows = tl.num_programs(0) // tl.cdiv(opt.queries, C.BM) * tiles.wide(opt.queries)
    unit = tl.where(u1 > 0.0, u1, 1.0)
    ties = r.ties
    w = tl.where(inverse == inverse, r.u / unit, inverse)
    sane = w == w  # otherwise a logit is NaN or +inf, and w says so in all that follows
    alive = ((u1 > 0.0) | (sane == 0)) & (empty == 0)
    count = tl.where(alive, ties + w, 1.0)  # Σu / u_max ≥ 1
    store_statistic(ptr, row, rows, n, empty, 0.0, inside, SLOT.visible_keys)
    most = tl.where(sane | (r.top == float("inf")), r.top * a, w)  # a maximum passes NaN over
    store_statistic(ptr, row, rows, most, empty, -float("inf"), inside, SLOT.max_logit)
    if NEED.moments:
        many = tl.maximum(n, 1.0)
        off = r.mean / many
        store_statistic(ptr, row, rows, (r.pivot + off) * a, empty, 0.0, inside, SLOT.mean_logit)
        spread = at_least_0(r.m2 / many - off * off) * a * a
        store_statistic(ptr, row, rows, spread, empty, 0.0, inside, SLOT.logit_variance)
    store_statistic(ptr, row, rows, tl.where(sane, lse, w), empty, -float("inf"), inside, SLOT.logsumexp)
    store_statistic(ptr, row, rows, tl.where(alive, count * unit * inverse, 0.0), empty, 0.0, inside, SLOT.mass)
    if NEED.log_u:
        lower = LN2 * (r.log_u - log2_or_0(u1) * r.u) / unit
        entropy = at_least_0(log1p((ties - 1.0) + w) - lower / count)
        entropy = tl.where(alive, entropy, 0.0)
        store_statistic(ptr, row, rows, entropy, empty, 0.0, inside, SLOT.entropy)
        store_statistic(ptr, row, rows, tl.where(alive, tl.exp(entropy), 0.0), empty, 0.0, inside, SLOT.effective_keys)
    if SLOT.participation >= 0:
        whole = unit * 2.0**40 if C.F.family == "pointwise" else unit
        spread = count * count / tl.maximum(ties + r.square / whole / whole, 1.0)
        store_statistic(ptr, row, rows, tl.where(alive, spread, 0.0), empty, 0.0, inside, SLOT.participation)
    store_statistic(ptr, row, rows, tl.where(alive, u1 * inverse, 0.0), empty, 0.0, inside, SLOT.max_weight)
    if C.SPARSE:
        store_statistic(ptr, row, rows, tl.where(sane, r.support, w), empty, 0.0, inside, SLOT.support)
    else:
        store_statistic(ptr, row, rows, tl.where(sane, n, w), empty, 0.0, inside, SLOT.support)
    far = tl.where(alive, r.distance / (unit * count), 0.0)
    store_statistic(ptr, row, rows, far, empty, 0.0, inside, SLOT.distance)
    opening = tl.where(alive, first_u / (unit * count), 0.0)
    store_statistic(ptr, row, rows, opening, empty, 0.0, inside, SLOT.first_key_mass)
    if SLOT.gradient_gain >= 0:
        if C.F.family == "ratio":
            alike = d1 * v1 - x1  # 0 where v′ = u′, before anything is rounded
            d1 = d1 * inverse
            v1 = v1 * inverse
            others = rest + (ties - 1.0) * v1 + r.v * inverse  # 1 − v1, without the cancellation
            at_top = ties * (d1 * others + alike * inverse * inverse)
            gain = at_top + r.slope * inverse - r.cross * inverse * inverse
        elif C.F.family == "threshold":
            g = ties * d1 + r.slope
            pairs = ties * (ties - 1.0) * x1 + 2.0 * ties * d1 * r.slope + (r.slope * r.slope - r.cross)
            gain = tl.where(g > 0.0, pairs / tl.where(g > 0.0, g, 1.0), 0.0)
        else:
            gain = ties * d1 + r.slope
        store_statistic(ptr, row, rows, at_least_0(tl.where(sane, gain, w)), empty, 0.0, inside, SLOT.gradient_gain)


@triton.jit
def at_least_0(x):
    """Return max(x, 0), with NaN kept."""
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def log1p(x):
    """Return log(1 + x) for x ≥ 0 without losing a small x."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * x / tl.where(y == 1.0, 1.0, y - 1.0))
