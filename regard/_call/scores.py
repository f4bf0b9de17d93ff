"""From q and k to the normaliser's input: scale · q kᵀ, soft cap, + bias, mask, ÷ temperature, in this order.

>>> from regard._call.scores import resolve_scale
>>> resolve_scale(None, 64), resolve_scale("inverse", 64), resolve_scale("none", 64)
(0.125, 0.015625, 1.0)
"""

from __future__ import annotations

import math
import numbers
import sys
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

SCALES = {
    "sqrt": lambda d: 1.0 / math.sqrt(d) if d else 1.0,
    "inverse": lambda d: 1.0 / d if d else 1.0,
    "none": lambda d: 1.0,
}


def resolve_scale(scale: float | str | Tensor | None, head_dim: int) -> float | Tensor:
    """None is 1/√d; a word is looked up; a number or a tensor (one entry per head) stays."""
    if scale is None:
        scale = "sqrt"
    if isinstance(scale, str):
        if scale not in SCALES:
            raise ValueError(f"scale {scale!r} is unknown; give a number, a tensor per head, or one of {list(SCALES)}")
        return SCALES[scale](head_dim)
    if isinstance(scale, Tensor):
        return scale
    if not is_real(scale):
        raise TypeError(f"scale must be None, a number, a word or a tensor, got {type(scale).__name__}")
    if not is_finite(scale):
        raise ValueError(f"scale must be finite, got {scale!r}")
    if abs(scale) > 1e20:
        raise ValueError(f"scale must lie within ±1e+20, got {float(scale):g}")
    return float(scale)


def is_real(x: Any) -> bool:
    """True for an int or float, numpy's too; not for a bool or a Fraction."""
    return isinstance(x, numbers.Real) and not isinstance(x, (bool, Fraction))


def is_positive(x: Any) -> bool:
    """True for a real number that is above 0, and finite, in float64."""
    return is_real(x) and is_finite(x) and float(x) > 0


def is_finite(number: float) -> bool:
    """True for a number that float64 holds. (A compiled graph cannot call isfinite on a symbol.)"""
    beyond = isinstance(number, int) and abs(number) > sys.float_info.max
    return -math.inf < number < math.inf and not beyond


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """c·tanh(x/c): the identity near 0, never beyond ±c."""
    return x if cap is None else cap * torch.tanh(x / cap)
