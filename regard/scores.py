"""From q and k to the normaliser's input: scale · q kᵀ, soft cap, + bias, mask, ÷ temperature, in this order.

>>> from regard.scores import resolve_scale
>>> resolve_scale(None, 64), resolve_scale("inverse", 64), resolve_scale("none", 64)
(0.125, 0.015625, 1.0)
"""

from __future__ import annotations

import math
import numbers
import sys
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

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
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale must be None, a number, a word or a tensor, got {type(scale).__name__}")
    if not is_finite(scale):
        raise ValueError(f"scale must be finite, got {scale!r}")
    if abs(scale) > 1e20:
        raise ValueError(f"scale must lie within ±1e+20, got {float(scale):g}")
    return float(scale)


def is_finite(number: float) -> bool:
    """True for a number that float64 holds. (A compiled graph cannot call isfinite on a symbol.)"""
    beyond = isinstance(number, (int, Fraction)) and abs(number) > sys.float_info.max
    return -math.inf < number < math.inf and not beyond


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """c·tanh(x/c): the identity near 0, never beyond ±c."""
    return x if cap is None else cap * torch.tanh(x / cap)


def qk_norm(q: Tensor, k: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """q and k over their root mean square: with the scale 1/√d logits are √d·cos, whatever the norms were.

    >>> import regard, torch
    >>> q, k = regard.qk_norm(1e4 * torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16))
    >>> _, stats = regard.attention(q, k, k, return_stats=("max_logit",))
    >>> bool((stats.max_logit <= 4.0 + 1e-4).all())
    True

    `eps`² is added inside the root, so that a token of zeros has a finite gradient.
    Learned gains, if wanted, are `scale`, a tensor per head; `regard.nn.MultiheadAttention(score="cosine")` has them.

    Returns:
        (q, k), each with a root mean square of 1 over its last dimension, in its own dtype.

    Raises:
        TypeError: `q` or `k` is not a dense float tensor.
        ValueError: `eps` is not a positive number.
    """
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 < eps < math.inf:
        raise ValueError(f"eps must be a positive number, got {eps!r}")
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout != torch.strided or not x.is_floating_point() or x.dtype.itemsize == 1 or x.ndim == 0:
            raise TypeError(f"{name} must be a dense tensor (…, D) of float16 or wider, got {x.dtype}, {x.layout}")

    def normed(x: Tensor) -> Tensor:
        if not x.shape[-1]:
            return x
        if torch.is_autocast_enabled(x.device.type):  # which would store float32 copies; the kernel sums in float32
            with torch.autocast(x.device.type, enabled=False):
                return rms_norm(x, x.shape[-1:], eps=eps * eps)
        return rms_norm(x, x.shape[-1:], eps=eps * eps)

    return normed(q), normed(k)
