"""One warpgroup and its 64 rows of a tile of scores, in registers: weights and the sums of `statistics.Sums`.

A thread of the tensor core's result holds two rows, of every eight keys two neighbours. So a tile [M, N] is looked at
as cells [M, N/8, 4, 2], octet · lane · pair: a thread sums its keys of a row in one chain, the four of a row meet once,
at the end, and what depends on octet and pair is a constant in the instruction.

u is measured in a shift that follows the scores only when it falls C.LAZY powers of two behind a thread's largest: what
was summed before is then faded, and in the tiles between nothing is multiplied and no thread asks another.

A tile is weighed in pieces, between which the tensor cores are given a piece of p·v each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.hopper import logistic
from regard._backends.gpu.attention.hopper.ptx import (
    cells,
    first_octet,
    following,
    following_registers,
    largest,
    per_lane,
)
from regard._backends.gpu.attention.online import find_shift, terms
from regard._backends.gpu.attention.tiles import HIDDEN, LOG2E

ROWS = gl.constexpr(64)


class Tally(NamedTuple):
    """What a warpgroup carries from tile to tile beside o and p, [M, 4]: four lanes to a row."""

    top: Any  # max y
    shift: Any  # the same in all four
    z: Any  # of maps with odds: `logistic`'s margin
    log_u: Any
    square: Any
    distance: Any
    mean: Any  # Σ y
    m2: Any  # Σ y²
    first: Any  # in lane 0: y of the first key, once its tile has come


@gluon.jit
def zeros(N: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.zeros([ROWS, N], gl.float32, LAYOUT)


@gluon.jit
def nothing(N: gl.constexpr, LAYOUT: gl.constexpr, F: gl.constexpr):
    """The tally before any key; LAYOUT is that of N keys, a piece."""
    none = gl.sum(gl.sum(cells(zeros(N, LAYOUT)), 1), 2)
    top = none + HIDDEN
    return Tally(top, find_shift(top, none + 1.0, F), none, none, none, none, none, none, none)


@gluon.jit
def per_row(x, like):
    """[M] as [M, 1, 1, 1]."""
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, like.type.layout))))
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 1), 2), 3)


@gluon.jit
def octet(like, BASE: gl.constexpr = 0):
    """BASE + 0, 8, 16, … as [1, N/8, 1, 1]."""
    x = gl.arange(0, like.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, like.type.layout))))
    return BASE + 8 * gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 2), 3)


@gluon.jit
def pair(like):
    """0, 1, a key's place in its pair, as [1, 1, 1, 2]."""
    x = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, like.type.layout))))
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 1), 2)


@gluon.jit
def within(like):
    """0 … 7, a key's place in its octet, as [1, 1, 4, 2]."""
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, like.type.layout))))
    lane = gl.expand_dims(gl.expand_dims(gl.expand_dims(lane, 0), 1), 3)
    return 2 * lane + pair(like)


@gluon.jit
def pieces(s, N: gl.constexpr):
    """The keys of a tile s [M, keys] in N equal parts, each as cells."""
    if N == 1:
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, s.shape[1], 16])
        parts = (cells(gl.convert_layout(s, LAYOUT)),)
    else:
        half = gl.reshape(s, [s.shape[0], 2, s.shape[1] // 2])
        lower, upper = gl.split(gl.permute(half, [0, 2, 1]))
        parts = pieces(lower, N // 2) + pieces(upper, N // 2)
    return parts


@gluon.jit
def shown(s, last, start):
    """The scores of the keys from `start` on, HIDDEN from `last` on."""
    y = cells(s)
    return gl.reshape(gl.where(octet(y) < per_row(last - start, y) - within(y), y, HIDDEN), s.shape)


@gluon.jit
def raised(s, r, b2, start, C: gl.constexpr, STILL: gl.constexpr):
    """(fade, tally) before a tile s is weighed: unless it stays, the shift follows a score too far above it."""
    NEED: gl.constexpr = C.NEED
    F: gl.constexpr = C.F
    LAZY: gl.constexpr = C.LAZY
    FLOOR: gl.constexpr = -(2.0**100) if F.exponential or F.shift == "max" else 0.0  # as in frame_of
    y = cells(s)
    top, shift, z, log_u, square, distance = r.top, r.shift, r.z, r.log_u, r.square, r.distance
    fade = z * 0.0 + 1.0
    FOLLOWS: gl.constexpr = F.family == "ratio" and F.shift != "none" and not STILL
    if NEED.top or FOLLOWS:
        most = gl.convert_layout(largest(y), z.type.layout)
        top = gl.maximum(top, most)
        if FOLLOWS:
            if NEED.log_u or NEED.square or NEED.distance:
                shift, fade, z, log_u, square, distance = gl.inline_asm_elementwise(
                    following(4, LAZY, FLOOR), following_registers(4),
                    [most, b2, shift, z, log_u, square, distance],
                    (gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32), True, 2,
                )  # fmt: skip
            else:
                shift, fade, z = gl.inline_asm_elementwise(
                    following(1, LAZY, FLOOR), following_registers(1), [most, b2, shift, z],
                    (gl.float32, gl.float32, gl.float32), True, 2,
                )  # fmt: skip
    first = r.first
    if NEED.first:
        head, _ = gl.split(first_octet(y))
        first = gl.where(start == 0, gl.convert_layout(head, first.type.layout), first)
    return fade, Tally(top, shift, z, log_u, square, distance, r.mean, r.m2, first)


class Part(NamedTuple):
    """Sums over the first pieces of a tile, as far as one thread has them: [M, 4]."""

    u: Any
    v: Any
    places: Any  # Σ u·(octet + pair), or Σ u·|i − j|
    log_u: Any
    square: Any
    mean: Any
    m2: Any


@gluon.jit
def blank(r):
    """The sums before the first piece of a tile; r is the tally."""
    LAYOUT: gl.constexpr = r.z.type.layout
    none = zeros(4, LAYOUT)
    return Part(none, none, none, none, none, none, none)


@gluon.jit
def onto(x, before, FIRST: gl.constexpr):
    """before + Σ over a thread's numbers of a row, [M, N/8, 4, 2] → [M, 4], in one chain of additions; at FIRST Σ."""
    if not FIRST:
        x = gl.where((octet(x) == 0) & (pair(x) == 0), x + per_lane(before), x)
    x = gl.reshape(gl.permute(x, [0, 2, 1, 3]), [x.shape[0], 4, x.shape[1] * 2])
    LAYOUT: gl.constexpr = before.type.layout
    return gl.convert_layout(gl.sum(x, 2), LAYOUT)


@gluon.jit
def weigh(y, r, x, i, a, theta, start, r0, near, BASE: gl.constexpr, C: gl.constexpr, EDGE: gl.constexpr):
    """(u, sums) of a piece y, from its key BASE on, of the tile of keys from `start` on; x are the sums before.

    The moments of tiles that are not `near` come from elsewhere.
    """
    NEED: gl.constexpr = C.NEED
    F: gl.constexpr = C.F
    FIRST: gl.constexpr = BASE == 0
    mean, m2 = x.mean, x.m2
    if NEED.moments and C.SPAN >= 0:
        if near:  # first: a branch that came later would have to keep all scores until then
            bare = y
            if EDGE and not C.OWN:
                bare = gl.where(y == HIDDEN, 0.0, y)
            mean = onto(bare, mean, FIRST)
            m2 = onto(bare * bare, m2, FIRST)
    u, v, power = weights(y, per_lane(a), per_lane(a * LOG2E), per_lane(r.shift), theta, F)
    if EDGE and not C.OWN:
        u = gl.where(y == HIDDEN, 0.0, u)
        v = gl.where(y == HIDDEN, 0.0, v)
    sum_u, sum_v, places, log_u, square = x.u, x.v, x.places, x.log_u, x.square
    if F.exponential:
        sum_u = onto(u, sum_u, FIRST)
        sum_v = sum_u
    elif F.family == "ratio" or F.log_odds is not None:
        sum_v = onto(v, sum_v, FIRST)
    if NEED.distance:
        places = stretch(u, places, per_row(i - start, y) - within(y), start, r0, BASE, C, EDGE)
    if NEED.log_u:
        log_u = onto(u * power, log_u, FIRST)
    if NEED.square:
        square = onto(u * u, square, FIRST)
    return gl.reshape(u, [y.shape[0], y.shape[1] * 8]), Part(sum_u, sum_v, places, log_u, square, mean, m2)


@gluon.jit
def joined(r, x, i, start, r0, C: gl.constexpr, EDGE: gl.constexpr):
    """The tally with a tile's sums: one chain over all tiles would lose digits on long rows."""
    NEED: gl.constexpr = C.NEED
    z, log_u, square, distance, mean, m2 = r.z, r.log_u, r.square, r.distance, r.mean, r.m2
    if C.F.family == "ratio" or C.F.log_odds is not None:
        z += x.v
    if NEED.log_u:
        log_u += x.log_u
    if NEED.square:
        square += x.square
    if NEED.distance:
        distance = far(x, distance, i, start, r0, C, EDGE)
    if NEED.moments and C.SPAN >= 0:
        mean += x.mean
        m2 += x.m2
    return Tally(r.top, r.shift, z, log_u, square, distance, mean, m2, r.first)


@gluon.jit
def weights(y, a, b2, shift, theta, F: gl.constexpr):
    """(u, v, log2 e) of scores y in a shift, in the map's cheapest form; u may come signed, for `rounded` to clip."""
    if F.log_odds is not None:
        u = logistic.quotient(gl.exp2(F.log_odds(y * b2, theta)))
        v = u
        power = u
    elif F.signed is not None:
        power = y * b2 - shift
        u = F.signed(gl.exp2(power), y * a, tiles.unshift(shift))
        v = gl.abs(u)
    else:
        u, v, power = terms(y, a, b2, shift, theta, F)
    return u, v, power


@gluon.jit
def manner(s, r, a, theta, dtype: gl.constexpr, C: gl.constexpr):
    """How the weights of a map with odds are found in a tile s."""
    F: gl.constexpr = C.F
    way = 0
    if F.log_odds is not None:
        b, g = line(a, theta, F)
        way = logistic.manner(cells(s), b, g, r.z, dtype == gl.float16)
    return way


@gluon.jit
def weigh_odds(y, x, a, theta, way, dtype: gl.constexpr, C: gl.constexpr):
    """`weigh` of maps with odds, without statistics."""
    F: gl.constexpr = C.F
    b, g = line(a, theta, F)
    u, met = logistic.weighed(y, b, g, way, dtype == gl.float16)
    met = x.v + gl.convert_layout(met, x.v.type.layout)
    return gl.reshape(u, [y.shape[0], y.shape[1] * 8]), Part(x.u, met, x.places, x.log_u, x.square, x.mean, x.m2)


@gluon.jit
def line(a, theta, F: gl.constexpr):
    """−log2 odds = y·b + g of a score y."""
    g = -F.log_odds(0.0, theta)
    return a * (LOG2E * (-F.log_odds(1.0, theta) - g)), g


@gluon.jit
def stretch(u, before, ahead, start, r0, BASE: gl.constexpr, C: gl.constexpr, EDGE: gl.constexpr):
    """Σ u·(octet + pair); where keys may lie around a row Σ u·|i − j|, i − j = ahead − octet."""
    FIRST: gl.constexpr = BASE == 0
    away = ahead.to(gl.float32) - octet(u, BASE).to(gl.float32)
    if EDGE and C.BEHIND:
        x = onto(u * away, before, FIRST)
    elif EDGE and C.OWN:
        x = onto(u * gl.abs(away), before, FIRST)
    else:
        x = onto(u * (octet(u, BASE) + pair(u)).to(gl.float32), before, FIRST)
        if not C.BEHIND and not C.OWN:
            if start == r0 // C.BN * C.BN:
                x = onto(u * gl.abs(away), before, FIRST)
    return x


@gluon.jit
def far(x, before, i, start, r0, C: gl.constexpr, EDGE: gl.constexpr):
    """before + Σ u·|i − j| of a tile. Where its keys lie to one side of the rows, Σ u·i is taken as i·Σu."""
    LAYOUT: gl.constexpr = x.u.type.layout
    moved = x.places
    if not EDGE or not (C.BEHIND or C.OWN):
        row = gl.expand_dims(gl.convert_layout(i, gl.SliceLayout(1, LAYOUT)), 1)
        lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, LAYOUT)), 0)
        ahead = (row - 2 * lane).to(gl.float32) - start.to(gl.float32)
        moved = ahead * x.u - x.places
        if not C.BEHIND:
            moved = moved * gl.where(start <= r0, 1.0, -1.0)
            if not C.OWN:
                moved = gl.where(start == r0 // C.BN * C.BN, x.places, moved)
    return before + moved
