"""Formulas around attention that are fused on a GPU: the output gate, and QK-norm.

    gate      o ← σ(g)·o (arXiv 2505.06708)    do ← do·σ(g),  dg = do·o·σ(g)·(1 − σ(g)), summed where a head has one
    QK-norm   y = r·x,  r = 1/√(mean x² + ε²)   dx = r·(dy − y·mean(y·dy))

On a GPU one kernel each way (`_backends/gpu/gate.py`, `qk_norm.py`) reads and writes every number once; elsewhere torch
computes the formula. Statistics are those of the weights: the gate changes none.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from torch.overrides import handle_torch_function, has_torch_function

from regard._core.derivatives.autograd import FusedFormula
from regard._facts import accumulator, is_plain_eager
from regard.statistics import Statistics

Result = Tensor | tuple[Tensor, Statistics]


def gate_result(result: Result, gate: Tensor) -> Result:
    """What `regard.attention` returns, its output gated."""
    return apply_gate(result, gate) if isinstance(result, Tensor) else (apply_gate(result[0], gate), result[1])


def apply_gate(o: Tensor, gate: Tensor) -> Tensor:
    """o·σ(gate) of o (…, M, E) and logits that broadcast to (…, M), (…, M, 1) or (…, M, E), in o's dtype."""
    if not torch.compiler.is_compiling() and has_torch_function((o, gate)):
        return handle_torch_function(apply_gate, (o, gate), o, gate)  # `regard.health` reads gates there
    g = gate[..., None] if gate.ndim == o.ndim - 1 else gate
    g = g.expand(*o.shape[:-1], g.shape[-1])
    if o.is_cuda and o.dtype != torch.float64 and is_plain_eager():
        from regard._backends.gpu import gate as kernels

        lead = (*(1,) * (4 - o.ndim), *o.shape[:-1])
        four = math.prod(lead[:-2]), *lead[-2:]
        given = (x.reshape(*four, x.shape[-1]) for x in (o, g))  # [B, H, M, E] and [B, H, M, 1 or E]
        return FusedFormula.apply(kernels, multiply, (), *given).reshape(o.shape)
    return multiply(o, g)


def multiply(o: Tensor, g: Tensor) -> Tensor:
    """The formula in torch's own operations, which have every derivative."""
    wide = accumulator(o.dtype)
    return (o.to(wide) * torch.sigmoid(g.to(wide))).to(o.dtype)


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
