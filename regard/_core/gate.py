"""The output gate, o ← σ(g)·o (arXiv 2505.06708), applied once around any backend.

    backward    do ← do·σ(g)        dg = do·o·σ(g)·(1 − σ(g)), summed over the width where a head has one gate

Statistics are those of the weights: the gate changes none. On a GPU one kernel each way (`_backends/gpu/gate.py`) reads
and writes every number once; elsewhere torch computes the formula.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
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
