"""Weights of one warpgroup's 64 rows of a tile of scores, and the sums over them, in registers.

A thread adds its own keys of a row; the four threads of a row combine their sums once, at the end (`fragment.py`).

u is measured in a shift that moves only when a score lies C.SLACK powers of two above it. The sums so far are rescaled
then; in all other tiles nothing is multiplied and no thread waits for another.

A tile may be weighed in several splits, so that the tensor cores get a part of p·v between them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.forward.online import find_shift, terms
from regard._backends.gpu.attention.hopper import logistic
from regard._backends.gpu.attention.hopper.fragment import (
    accumulate,
    cells,
    first_octet,
    key_in_octet,
    key_in_pair,
    octet_start,
    per_lane,
    per_row,
    zeros,
)
from regard._backends.gpu.attention.hopper.ptx import reciprocal, row_max, shift_code, shift_constraints
from regard._backends.gpu.attention.tiles import HIDDEN, LOG2E


class RowSums(NamedTuple):
    """Sums that a warpgroup carries from tile to tile, [M, 4]: one per row and lane."""

    top: Any  # max y
    shift: Any  # equal in a row's four lanes
    z: Any  # Σ v; for sigmoids the margin of `logistic`
    log_u: Any
    square: Any
    distance: Any
    mean: Any  # Σ y
    m2: Any  # Σ y²
    first: Any  # y of the first key, once its tile was processed; in lane 0, with a window in any one lane


class TileSums(NamedTuple):
    """Sums over the splits of a tile that were weighed so far, [M, 4]."""

    u: Any
    v: Any
    positions: Any  # Σ u·(octet + pair) or Σ u·|i − j|, see `sum_positions`
    log_u: Any
    square: Any
    mean: Any
    m2: Any


@gluon.jit
def empty_rows(N: gl.constexpr, LAYOUT: gl.constexpr, F: gl.constexpr):
    """RowSums of no keys; LAYOUT is the layout of N keys."""
    none = gl.sum(gl.sum(cells(zeros(N, LAYOUT)), 1), 2)
    top = none + HIDDEN
    return RowSums(top, find_shift(top, none + 1.0, F), none, none, none, none, none, none, none)


@gluon.jit
def mask_keys(s, first, last, start, opt, C: gl.constexpr):
    """Scores of the tile at key `start`, with HIDDEN for keys outside first ≤ j < last."""
    y = cells(s)
    visible = octet_start(y) < per_row(last - start, y) - key_in_octet(y)
    if opt.left is not None or C.INTERVAL:
        visible = visible & (octet_start(y) >= per_row(first - start, y) - key_in_octet(y))
    return gl.reshape(gl.where(visible, y, HIDDEN), s.shape)


@gluon.jit
def cap_scores(s, opt):
    """c·tanh(scale·s/c) of the products s, as c − 2c/(1 + exp(2·scale·s/c)); tanh.approx would be wrong by 2⁻¹¹."""
    if opt.cap is not None:
        cap = tiles.number(opt.cap, gl.float32)
        e = gl.exp2(s * (tiles.number(opt.scale, gl.float32) * (2.0 * LOG2E) / cap))
        s = reciprocal(1.0 + e) * (-2.0 * cap) + cap
    return s


@gluon.jit
def update_shift(s, r, b2, first_key, start, opt, C: gl.constexpr, FIXED_SHIFT: gl.constexpr, EDGE: gl.constexpr):
    """(rescaling factor, RowSums) for tile s: raises the shift where a score is too far above it."""
    NEED: gl.constexpr = C.NEED
    F: gl.constexpr = C.F
    SLACK: gl.constexpr = C.SLACK
    FLOOR: gl.constexpr = -(2.0**100) if F.exponential or F.shift == "max" else 0.0  # as in find_shift
    y = cells(s)
    top, shift, z, log_u, square, distance = r.top, r.shift, r.z, r.log_u, r.square, r.distance
    factor = z * 0.0 + 1.0
    MOVES: gl.constexpr = F.family == "ratio" and F.shift != "none" and not FIXED_SHIFT
    if NEED.top or MOVES:
        largest = gl.convert_layout(row_max(y), z.type.layout)
        top = gl.maximum(top, largest)
        if MOVES:
            if NEED.log_u or NEED.square or NEED.distance:
                shift, factor, z, log_u, square, distance = gl.inline_asm_elementwise(
                    shift_code(4, SLACK, FLOOR), shift_constraints(4),
                    [largest, b2, shift, z, log_u, square, distance],
                    (gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32), True, 2,
                )  # fmt: skip
            else:
                shift, factor, z = gl.inline_asm_elementwise(
                    shift_code(1, SLACK, FLOOR), shift_constraints(1), [largest, b2, shift, z],
                    (gl.float32, gl.float32, gl.float32), True, 2,
                )  # fmt: skip
    first = r.first
    if NEED.first and (opt.left is not None or C.INTERVAL):
        if EDGE:  # every row's first key lies in such a tile
            hit = octet_start(y) == per_row(first_key - start, y) - key_in_octet(y)
            first += gl.convert_layout(accumulate(gl.where(hit, y, 0.0), first, True), first.type.layout)
    elif NEED.first:
        first_y, _ = gl.split(first_octet(y))
        first = gl.where(start == 0, gl.convert_layout(first_y, first.type.layout), first)
    return factor, RowSums(top, shift, z, log_u, square, distance, r.mean, r.m2, first)


@gluon.jit
def empty_tile(r):
    """TileSums of no keys, in the layout of r."""
    LAYOUT: gl.constexpr = r.z.type.layout
    none = zeros(4, LAYOUT)
    return TileSums(none, none, none, none, none, none, none)


@gluon.jit
def weigh_split(y, r, x, i, a, theta, start, r0, BASE: gl.constexpr, C: gl.constexpr, EDGE: gl.constexpr):
    """(u, x + sums) of one split y of the tile at key `start`; the split begins at its key BASE."""
    NEED: gl.constexpr = C.NEED
    F: gl.constexpr = C.F
    FIRST: gl.constexpr = BASE == 0
    mean, m2 = x.mean, x.m2
    if NEED.moments:  # before the weights: later it would keep all scores in registers
        visible_y = y
        if EDGE and (not C.DIAGONAL_FIRST or C.RAGGED):
            visible_y = gl.where(y == HIDDEN, 0.0, y)
        mean = accumulate(visible_y, mean, FIRST)
        m2 = accumulate(visible_y * visible_y, m2, FIRST)
    u, v, power = compute_weights(y, per_lane(a), per_lane(a * LOG2E), per_lane(r.shift), theta, F)
    if EDGE and (not C.DIAGONAL_FIRST or C.RAGGED):
        u = gl.where(y == HIDDEN, 0.0, u)
        v = gl.where(y == HIDDEN, 0.0, v)
    sum_u, sum_v, positions, log_u, square = x.u, x.v, x.positions, x.log_u, x.square
    if F.exponential:
        sum_u = accumulate(u, sum_u, FIRST)
        sum_v = sum_u
    elif F.family == "ratio" or F.log_odds is not None:
        sum_v = accumulate(v, sum_v, FIRST)
    if NEED.distance:
        positions = sum_positions(u, positions, per_row(i - start, y) - key_in_octet(y), start, r0, BASE, C, EDGE)
    if NEED.log_u:
        log_u = accumulate(u * power, log_u, FIRST)
    if NEED.square:
        square = accumulate(u * u, square, FIRST)
    return gl.reshape(u, [y.shape[0], y.shape[1] * 8]), TileSums(sum_u, sum_v, positions, log_u, square, mean, m2)


@gluon.jit
def add_tile(r, x, i, start, r0, C: gl.constexpr, EDGE: gl.constexpr):
    """r + x. Sums are kept per tile first because one chain over a long row would lose digits."""
    NEED: gl.constexpr = C.NEED
    z, log_u, square, distance, mean, m2 = r.z, r.log_u, r.square, r.distance, r.mean, r.m2
    if C.F.family == "ratio" or C.F.log_odds is not None:
        z += x.v
    if NEED.log_u:
        log_u += x.log_u
    if NEED.square:
        square += x.square
    if NEED.distance:
        distance = add_distance(x, distance, i, start, r0, C, EDGE)
    if NEED.moments:
        mean += x.mean
        m2 += x.m2
    return RowSums(r.top, r.shift, z, log_u, square, distance, mean, m2, r.first)


@gluon.jit
def compute_weights(y, a, b2, shift, theta, F: gl.constexpr):
    """(u, v, log2 e) of scores y; u of a signed map may be negative, which `round_weights` clips."""
    if F.log_odds is not None:
        u = logistic.reciprocal(gl.exp2(F.log_odds(y * b2, theta)))
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
def choose_method(s, r, a, theta, dtype: gl.constexpr, C: gl.constexpr):
    """Method of `logistic` for the weights of tile s; 0 for maps without log-odds."""
    F: gl.constexpr = C.F
    method = 0
    if F.log_odds is not None:
        b, g = odds_line(a, theta, F)
        method = logistic.choose_method(cells(s), b, g, r.z, dtype == gl.float16)
    return method


@gluon.jit
def weigh_sigmoid(y, x, a, theta, method, dtype: gl.constexpr, C: gl.constexpr):
    """(u, x + margin) of one split y, for sigmoids without statistics."""
    F: gl.constexpr = C.F
    b, g = odds_line(a, theta, F)
    u, gained = logistic.weigh(y, b, g, method, dtype == gl.float16)
    gained = x.v + gl.convert_layout(gained, x.v.type.layout)
    return gl.reshape(u, [y.shape[0], y.shape[1] * 8]), TileSums(
        x.u, gained, x.positions, x.log_u, x.square, x.mean, x.m2
    )


@gluon.jit
def odds_line(a, theta, F: gl.constexpr):
    """(b, g) of −log2 odds = y·b + g for a score y."""
    g = -F.log_odds(0.0, theta)
    return a * (LOG2E * (-F.log_odds(1.0, theta) - g)), g


@gluon.jit
def sum_positions(u, before, ahead, start, r0, BASE: gl.constexpr, C: gl.constexpr, EDGE: gl.constexpr):
    """before + Σ u·(octet + pair), or Σ u·|i − j| in a tile with keys on both sides of a row; i − j = ahead − octet."""
    FIRST: gl.constexpr = BASE == 0
    away = ahead.to(gl.float32) - octet_start(u, BASE).to(gl.float32)
    if EDGE and C.CAUSAL:
        x = accumulate(u * away, before, FIRST)
    elif EDGE and (C.DIAGONAL_FIRST or C.INTERVAL):
        x = accumulate(u * gl.abs(away), before, FIRST)
    else:
        x = accumulate(u * (octet_start(u, BASE) + key_in_pair(u)).to(gl.float32), before, FIRST)
        if not C.CAUSAL and not C.DIAGONAL_FIRST and not C.INTERVAL:
            if start == r0 // C.BN * C.BN:
                x = accumulate(u * gl.abs(away), before, FIRST)
    return x


@gluon.jit
def add_distance(x, before, i, start, r0, C: gl.constexpr, EDGE: gl.constexpr):
    """before + Σ u·|i − j| of a tile. If its keys lie on one side of the rows, Σ u·i is i·Σu."""
    LAYOUT: gl.constexpr = x.u.type.layout
    distance_sum = x.positions
    if not EDGE or not (C.CAUSAL or C.DIAGONAL_FIRST or C.INTERVAL):
        row = gl.expand_dims(gl.convert_layout(i, gl.SliceLayout(1, LAYOUT)), 1)
        lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, LAYOUT)), 0)
        ahead = (row - 2 * lane).to(gl.float32) - start.to(gl.float32)
        distance_sum = ahead * x.u - x.positions
        if C.INTERVAL:
            distance_sum = gl.abs(distance_sum)
        elif not C.CAUSAL:
            distance_sum = distance_sum * gl.where(start <= r0, 1.0, -1.0)
            if not C.DIAGONAL_FIRST:
                distance_sum = gl.where(start == r0 // C.BN * C.BN, x.positions, distance_sum)
    return before + distance_sum
