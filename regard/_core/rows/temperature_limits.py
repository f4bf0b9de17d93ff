"""normaliser(z / T) for every T ≥ 0: the quotient where it can be formed, the limits at 0 and inf, row by row.

A quotient rounds by the size of the score, a difference does not. So a map that moves with its scores (softmax, the
threshold maps) has its maximum subtracted first, and another is divided in float64 unless its scores are small. What
weighs nothing, −inf or hidden, is not divided at all: its quotient's derivative in T, 0·inf, would be NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard._core.dtypes import accumulator
from regard._core.readable import readable
from regard.normalizers import Choice

Rows = Callable[[Tensor, float], Tensor]  # (z, scale) → normaliser(scale·z)
FAR = 1e6  # exp(−FAR) is 0 in float64
EXTREME = 1e30
NEAR = 32.0  # quotients up to it round no worse than differences do


def tempered(z: Tensor, choice: Choice, theta, t: float | Tensor, visible: Tensor | None, rows: Rows) -> Tensor:
    """p = normaliser(z / t) over the last dimension; t a number, or a tensor of size 1 there."""
    if choice.scale_free:
        p = rows(z, 1.0)
        if not isinstance(t, Tensor):
            return p
        return attached(p if readable(t) else _lost(p, t), t)
    if isinstance(t, Tensor):
        return _by_row(z, choice, theta, t, visible, rows)
    if t == math.inf or t * torch.finfo(torch.float64).max < 1.0:  # 0, or 1/t overflows
        return limit(z, choice, theta, visible, cold=t != math.inf)
    if is_extreme(t):
        return rows(z.double(), 1.0 / t).to(z.dtype)
    return rows(z, 1.0 / t)


def limit(z: Tensor, choice: Choice, theta, visible: Tensor | None, cold: bool) -> Tensor:
    """What the weights tend to; towards T = 0 they are constant almost everywhere, and their gradient is 0."""
    if z.shape[-1] == 0:
        return attached(torch.zeros_like(z), z)
    theta = choice.theta if theta is None else theta
    bad = (z.isnan() | (z == math.inf)) if visible is None else (z.isnan() | (z == math.inf)) & visible
    if cold:
        p = choice.normalizer.cold(z.detach().double(), visible, theta)
    else:
        p = choice.normalizer.hot(z.double(), visible, theta)
    return attached(p.to(z.dtype).masked_fill(bad.any(-1, keepdim=True), math.nan), z)


def quotient(z: Tensor, t: float | Tensor, visible: Tensor | None = None, most: float | None = None) -> Tensor:
    """z / t, no larger than `most`; what is not finite, or hidden, stays, and takes no part in the gradient of t."""
    counted = z.abs() < math.inf if visible is None else (z.abs() < math.inf) & visible
    divided = (z.where(counted, 0.0) / t).to(z.dtype)
    return torch.where(counted, divided if most is None else divided.clamp(-most, most), z)


def below_top(z: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(z − top, top), top the largest visible score of the row, or 0 where that is not finite; a constant."""
    top = (z if visible is None else z.masked_fill(~visible, -math.inf)).detach().amax(-1, keepdim=True)
    top = torch.where(top.abs() < math.inf, top, 0.0)
    return z - top, top


def scaled(z: Tensor, choice: Choice, scale: float | Tensor) -> Tensor:
    """scale·z for the reference, which takes no scale: from the row's maximum on if that is all the same, and finite
    where z is."""
    wide, most, least = z, torch.finfo(z.dtype).max, torch.finfo(z.dtype).tiny
    if z.shape[-1] and moves_with_its_scores(choice):
        wide = below_top(z)[0]
    elif z.shape[-1] and choice.family == "ratio":  # what overflows stays apart: the largest score becomes `most`
        scale = (most / z.detach().amax(-1, keepdim=True).clamp_min(least)).clamp_max(scale)  # −0 would turn it round
    return torch.where(z.abs() < math.inf, (wide * scale).clamp(-most, most), z * scale)


def _by_row(z: Tensor, choice: Choice, theta, t: Tensor, visible: Tensor | None, rows: Rows) -> Tensor:
    """Rows divided by their own temperature; 0 and inf are limits, anything below 0 or NaN gives NaN."""
    if z.numel() == 0:
        return rows(z, 1.0)
    cold, hot = t == 0.0, t == math.inf
    wide = z.to(accumulator(z.dtype))
    if moves_with_its_scores(choice):
        wide, _ = below_top(wide, visible)
    elif choice.family != "pointwise" and torch.float64 in (z.dtype, t.dtype):  # no quotient may tell scores apart
        most = wide.detach().abs().masked_fill(~(wide.detach().abs() < math.inf), 0.0).amax(-1, keepdim=True)
        cold = cold | (most.double() / t == math.inf)
    plain = ~(cold | hot)
    p = rows(_row_quotient(wide, choice, t.where(plain, 1.0), visible), 1.0).to(z.dtype)
    if not readable(plain) or not bool(plain.all()):
        p = torch.where(cold, limit(z, choice, theta, visible, cold=True), p)
        p = torch.where(hot, limit(z, choice, theta, visible, cold=False), p)
        p = _lost(p, t)
    return p


def _row_quotient(wide: Tensor, choice: Choice, t: Tensor, visible: Tensor | None) -> Tensor:
    """wide / t: at once where a look shows that all of it is finite and nothing overflows, else entry by entry."""
    moves, pointwise = moves_with_its_scores(choice), choice.family == "pointwise"
    if readable(wide) and readable(t):
        low, high = wide.detach().aminmax()
        most, least = FAR if moves else EXTREME if pointwise else NEAR, t.detach().amin()
        if least * least == 0.0:  # 1/t², which is in the gradient of t, would overflow
            t = t.double()
        fine = moves or pointwise or bool(t.detach().amax() <= EXTREME)  # else float32 may have no such small quotient
        if fine and torch.maximum(high, -low) < most * least:  # not so if one is NaN
            return (wide / t).to(wide.dtype)
    if moves:
        return quotient(wide.masked_fill(wide <= -FAR * t, -math.inf), t, visible)  # far below: no weight, no overflow
    return quotient(wide.double(), t, visible, torch.finfo(torch.float64).max if pointwise else None)


def _lost(p: Tensor, t: Tensor) -> Tensor:
    """Rows whose temperature is below 0 or NaN, where that could not be looked at before: NaN."""
    return p.masked_fill(~(t >= 0.0), math.nan)


def attached(p: Tensor, x: Tensor) -> Tensor:
    """p, with a gradient of 0 towards x."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return p
    return p + (0.0 * x.masked_fill(~(x.abs() < math.inf), 0.0)).to(p.dtype)


def is_extreme(t: float) -> bool:
    """A scale 1/t beyond EXTREME, or below its inverse, leaves float32 no room: rows are computed in float64."""
    return t * EXTREME < 1.0 or t > EXTREME


def moves_with_its_scores(choice: Choice) -> bool:
    """Does a number added to all scores change nothing? So it is for softmax and the threshold maps."""
    return choice.family == "threshold" or (choice.softmax_family and choice.shift == "max")
