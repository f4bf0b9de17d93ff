"""normaliser(z / T) for every T ≥ 0: the quotient where it exists, the limits at 0 and inf, row by row.

A quotient rounds by the size of the score, a difference does not. So a shift-invariant map (softmax, the threshold
maps) has its maximum subtracted before the division, and another is divided in float64. Hidden scores and −inf are not
divided at all, because the derivative of their quotient in T, 0·inf, would be NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard._facts import accumulator, readable, widen
from regard.normalizers import Choice

Rows = Callable[[Tensor, float], Tensor]  # (z, scale) → normaliser(scale·z)


def apply_temperature(
    z: Tensor, choice: Choice, theta: Any, t: float | Tensor, visible: Tensor | None, rows: Rows
) -> Tensor:
    """p = normaliser(z / t) over the last dimension; t is a number, or a tensor of size 1 there."""
    if choice.scale_free:
        p = rows(z, 1.0)
        if not isinstance(t, Tensor):
            return p
        return with_zero_gradient(p if readable(t) else nan_where_invalid(p, t), t)
    if isinstance(t, Tensor):
        return _divide_rows(z, choice, theta, t, visible, rows)
    if t in (0.0, math.inf):
        return temperature_limit(z, choice, theta, visible, cold=t == 0.0)
    return rows(z, 1.0 / t)


def temperature_limit(z: Tensor, choice: Choice, theta: Any, visible: Tensor | None, cold: bool) -> Tensor:
    """The weights as T → 0 (`cold`) or T → inf; towards 0 they are constant almost everywhere, with a gradient of 0."""
    if z.shape[-1] == 0:
        return with_zero_gradient(torch.zeros_like(z), z)
    theta = choice.theta if theta is None else theta
    bad = (z.isnan() | (z == math.inf)) if visible is None else (z.isnan() | (z == math.inf)) & visible
    if cold:
        p = choice.normalizer.cold(widen(z.detach()), visible, theta)
    else:
        p = choice.normalizer.hot(widen(z), visible, theta)
    return with_zero_gradient(p.to(z.dtype).masked_fill(bad.any(-1, keepdim=True), math.nan), z)


def divide_visible(z: Tensor, t: float | Tensor, visible: Tensor | None = None) -> Tensor:
    """z / t; what is not finite, or hidden, stays as it is and takes no part in the gradient of t."""
    counted = z.abs() < math.inf if visible is None else (z.abs() < math.inf) & visible
    return torch.where(counted, (z.where(counted, 0.0) / t).to(z.dtype), z)


def subtract_max(z: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(z − top, top): top is the largest visible score of the row, a constant; 0 where that is not finite."""
    top = (z if visible is None else z.masked_fill(~visible, -math.inf)).detach().amax(-1, keepdim=True)
    top = torch.where(top.abs() < math.inf, top, 0.0)
    return z - top, top


def scale_scores(z: Tensor, choice: Choice, scale: float | Tensor) -> Tensor:
    """scale·z for the reference, which takes no scale: from the row's maximum on where the map is shift-invariant."""
    most = torch.finfo(z.dtype).max
    wide = subtract_max(z)[0] if z.shape[-1] and choice.is_shift_invariant else z
    return torch.where(z.abs() < math.inf, (wide * scale).clamp(-most, most), z * scale)


def _divide_rows(z: Tensor, choice: Choice, theta: Any, t: Tensor, visible: Tensor | None, rows: Rows) -> Tensor:
    """Weights of rows divided by their own temperature; 0 and inf are limits, anything below 0 or NaN gives NaN."""
    if z.numel() == 0:
        return rows(z, 1.0)
    cold, hot = t == 0.0, t == math.inf
    regular = ~(cold | hot)
    if choice.is_shift_invariant:
        wide, _ = subtract_max(z.to(accumulator(z.dtype)), visible)
    else:
        wide = widen(z)
    p = rows(divide_visible(wide, t.where(regular, 1.0), visible), 1.0).to(z.dtype)
    if not readable(regular) or not bool(regular.all()):
        p = torch.where(cold, temperature_limit(z, choice, theta, visible, cold=True), p)
        p = torch.where(hot, temperature_limit(z, choice, theta, visible, cold=False), p)
        p = nan_where_invalid(p, t)
    return p


def nan_where_invalid(p: Tensor, t: Tensor) -> Tensor:
    """NaN in rows whose temperature is below 0 or NaN: a GPU's values cannot be checked before."""
    return p.masked_fill(~(t >= 0.0), math.nan)


def with_zero_gradient(p: Tensor, x: Tensor) -> Tensor:
    """p, with a gradient of 0 towards x."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return p
    return p + (0.0 * x.masked_fill(~(x.abs() < math.inf), 0.0)).to(p.dtype)
