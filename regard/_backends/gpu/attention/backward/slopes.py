"""ds = a·dp − b·δ of a tile, for every family: row state, weights recomputed, and slopes."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard._backends.gpu.attention import tiles, visibility
from regard._backends.gpu.attention.tiles import LOG2E
from regard._backends.gpu.rows.terms import expm1_terms


class Rows(NamedTuple):
    """What backward knows of a query, each [M]: its state, its visible keys, the terms of its statistics' gradients."""

    a: Any  # s = a·y
    shift: Any  # log2 units (ratio), τ (threshold)
    inverse: Any  # 1/Z, or nothing that is looked at
    delta: Any
    first: Any
    last: Any
    beta: Any
    gamma: Any
    epsilon: Any


class State(NamedTuple):
    """Pointers to [B, H, M] rows: forward's state, δ, and the terms of statistics' gradients (None: there are none)."""

    shift: Any  # log2 units (ratio), τ (threshold)
    inverse: Any  # 1/Z; None: −log2 Z is part of the shift, or no tile asks
    delta: Any
    beta: Any
    gamma: Any
    epsilon: Any


@triton.jit
def load_rows(state, b, h, i, n, opt, C: tl.constexpr, ALL: tl.constexpr):
    """Load what is known of rows i; ALL: every one of them exists."""
    row = (tiles.wide(b) * opt.heads + h) * opt.queries + i
    first, last = visibility.visible_range(b, h, i, opt, n)
    shift = load_number(state.shift, row, i, opt, ALL)
    inverse = shift
    if state.inverse is not None:
        inverse = load_number(state.inverse, row, i, opt, ALL)
    delta = load_number(state.delta, row, i, opt, ALL)
    beta, gamma, epsilon = delta, delta, delta
    if state.beta is not None:
        beta = load_number(state.beta, row, i, opt, ALL)
        gamma = load_number(state.gamma, row, i, opt, ALL)
        epsilon = load_number(state.epsilon, row, i, opt, ALL)
    a = tiles.row_factor(b, h, i, opt, C.ACC, C.LINEAR)
    return Rows(a, shift, inverse, delta, first, last, beta, gamma, epsilon)


@triton.jit
def load_number(ptr, row, i, opt, ALL: tl.constexpr):
    """Load one number of each row."""
    if ALL:
        number = tl.load(ptr + row)
    else:
        number = tl.load(ptr + row, mask=i < opt.queries, other=0.0)
    return number


@triton.jit
def broadcast_rows(r, KEYS_FIRST: tl.constexpr):
    """Expand rows over a tile [M, N], or [N, M] where keys come first."""
    if KEYS_FIRST:
        laid = Rows(r.a[None, :], r.shift[None, :], r.inverse[None, :], r.delta[None, :], r.first[None, :],
                    r.last[None, :], r.beta[None, :], r.gamma[None, :], r.epsilon[None, :])  # fmt: skip
    else:
        laid = Rows(r.a[:, None], r.shift[:, None], r.inverse[:, None], r.delta[:, None], r.first[:, None],
                    r.last[:, None], r.beta[:, None], r.gamma[:, None], r.epsilon[:, None])  # fmt: skip
    return laid


@triton.jit
def weigh(y, visible, r, theta, F: tl.constexpr, Z_IN_SHIFT: tl.constexpr, NEAR: tl.constexpr):
    """Recompute the weights: (p, a, b, log2 e), a and b the two slopes of ds = a·dp − b·δ.

    NEAR: a numerator that is a difference keeps its digits near 0; 16 bits do not show it.
    """
    power = y * (r.a * LOG2E) - r.shift
    if F.family == "pointwise":
        p = tl.where(visible, F.weigh(y * r.a, theta), 0.0)
        up = tl.where(visible, F.slope(y * r.a, theta), 0.0)
        down = up * 0.0
    elif F.family == "threshold":
        t = tiles.positive_part(y * (r.a * F.gain(theta)) - r.shift)
        up = tl.where(visible, F.slope(t, theta), 0.0)
        if F.is_power and F.order == 0:  # g = g′·t: no second logarithm and power
            p = tl.where(visible, up * t, 0.0)
        else:
            p = tl.where(visible, F.weigh(t, theta), 0.0)
        down = up
    elif F.exponential:
        p = tl.where(visible, tl.exp2(power), 0.0)
        if not Z_IN_SHIFT:
            p = p * r.inverse
        up = p
        down = p
    else:
        e = tl.exp2(power)
        c = tiles.unshift(r.shift)
        near, low = expm1_terms(e, y * r.a, c, F.differs and NEAR)
        p = tl.where(visible, F.numerator(near, y * r.a, low) * r.inverse, 0.0)
        up = tl.where(visible, F.numerator_slope(e, y * r.a, c) * r.inverse, 0.0)
        down = tl.where(visible, F.denominator_slope(e, y * r.a, c) * r.inverse, 0.0)
    return p, up, down, power


@triton.jit
def slope_tile(y, visible, dp, p, up, down, power, r, F: tl.constexpr, STATS_GRAD: tl.constexpr):
    """Return ds of a tile, 0 where a key is hidden."""
    if F.family == "threshold" or (F.family == "ratio" and F.exponential):
        ds = up * (dp - r.delta)
    else:
        ds = up * dp - down * r.delta
    if STATS_GRAD:
        ds += p * (r.beta * power) + (r.gamma * y + r.epsilon)
    return tl.where(visible, ds, 0.0)
