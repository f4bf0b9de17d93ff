"""log Σ exp(z/T) and log softmax(z/T): the maximum is subtracted before the division, which would round by it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard._call.validation import (
    check_device,
    check_dim,
    check_scores,
    check_temperature,
    column_of,
    under_autocast,
)
from regard._core.rows.temperature_limits import divide_visible, subtract_max
from regard._facts import accumulator, readable


def logsumexp(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0) -> Tensor:
    """log Σ_j exp(z_j/T), the dimension removed. 0 < T < inf, for there is no limit at either end.

    >>> import regard, torch
    >>> regard.logsumexp(torch.tensor([1000.0, 1000.0]))
    tensor(1000.6932)

    Returns:
        log Σ exp, in z's dtype, without `dim`; −inf for rows of −inf.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: `dim` is out of range, or `temperature` is not positive and finite.
    """
    rows, t, _ = _check(z, dim, temperature)
    nothing = (rows == -math.inf).all(-1)
    rows = rows.masked_fill(nothing[..., None], 0.0)  # −inf has no gradient of 0
    if t is None:
        return torch.logsumexp(rows, -1).masked_fill(nothing, -math.inf)
    below, top = subtract_max(rows.to(accumulator(rows.dtype)))
    total = (top / t + torch.logsumexp(divide_visible(below, t), -1, keepdim=True)).squeeze(-1)
    if isinstance(t, Tensor):
        total = total.masked_fill(~_is_inside(t).squeeze(-1), math.nan)
    return total.masked_fill(nothing, -math.inf).to(rows.dtype)


def log_softmax(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0) -> Tensor:
    """z_i/T − log Σ_j exp(z_j/T), without forming the weights. 0 < T < inf, as of `logsumexp`.

    A row of −inf, in which softmax weighs nothing, is −inf with a gradient of 0 (torch's is NaN).

    >>> import regard, torch
    >>> regard.log_softmax(torch.tensor([0.0, -1000.0]))
    tensor([    0., -1000.])

    Returns:
        The logarithms of the weights, in the shape and dtype of `z`.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: `dim` or `temperature` lies outside its range.
    """
    rows, t, axis = _check(z, dim, temperature)
    nothing = (rows == -math.inf).all(-1, keepdim=True)
    rows = rows.masked_fill(nothing, 0.0)
    if t is None:
        result = torch.log_softmax(rows, -1)
    else:
        below, _ = subtract_max(rows.to(accumulator(rows.dtype)))
        result = torch.log_softmax(divide_visible(below, t), -1).to(rows.dtype)
        if isinstance(t, Tensor):
            result = result.masked_fill(~_is_inside(t), math.nan)
    result = result.masked_fill(nothing, -math.inf)
    return result.movedim(-1, axis) if z.ndim else result.reshape(())


def _is_inside(t: Any) -> Any:
    return (t > 0.0) & (t < math.inf)


def _check(z: Tensor, dim: int, temperature: float | Tensor) -> tuple[Tensor, float | Tensor | None, int]:
    """Return (z with `dim` last, the temperature moved alike, the dimension); None where nothing is to be divided."""
    check_scores(z, "z")
    axis = check_dim(z, dim)
    t = check_temperature(temperature)
    inside = _is_inside(t)
    if inside is False or (isinstance(inside, Tensor) and readable(inside) and not bool(inside.all())):
        raise ValueError("temperature must be positive and finite here, where there is no limit; got 0 or inf")
    z = under_autocast(z)
    rows = z.movedim(axis, -1) if z.ndim else z.reshape(1)
    if isinstance(t, Tensor):
        check_device(t, "temperature", z)
        t = column_of(t, "temperature", z.shape if z.ndim else rows.shape, axis)
    plain = rows.shape[-1] == 0 or (not isinstance(t, Tensor) and t == 1.0)
    return rows, None if plain else t, axis
