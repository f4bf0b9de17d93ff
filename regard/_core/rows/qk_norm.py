"""QK-norm: queries and keys over their root mean square.

    backward    dx = r·(dy − y·mean(y·dy)),   y = r·x,   r = 1/√(mean x² + ε²)

On a GPU one kernel each way (`_backends/gpu/qk_norm.py`) reads and writes every number once, whatever its strides;
elsewhere torch's `rms_norm` computes it.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from regard._core.derivatives.autograd import FusedFormula
from regard._facts import is_plain_eager


def qk_norm(q: Tensor, k: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """q and k over their root mean square: with the scale 1/√d logits are √d·cos, whatever the norms were.

    >>> import regard, torch
    >>> q, k = regard.nn.qk_norm(1e4 * torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16))
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
    return divide_by_root_mean_square(q, float(eps)), divide_by_root_mean_square(k, float(eps))


def divide_by_root_mean_square(x: Tensor, eps: float) -> Tensor:
    """x/√(mean x² + eps²) over the last dim, in x's dtype; sums in float32 or wider."""
    if not x.shape[-1]:
        return x
    if x.ndim == 4 and x.is_cuda and x.dtype != torch.float64 and type(x) is Tensor and is_plain_eager():
        from regard._backends.gpu import qk_norm as kernels

        return FusedFormula.apply(kernels, norm_rows, (eps,), x)
    return norm_rows(x, eps)


def norm_rows(x: Tensor, eps: float) -> Tensor:
    """x/√(mean x² + eps²) by torch, without autocast, which would store float32 copies."""
    with torch.autocast(x.device.type, enabled=False) if torch.is_autocast_enabled(x.device.type) else nullcontext():
        return rms_norm(x, x.shape[-1:], eps=eps * eps)
