"""The output gate, o ← σ(g)·o (arXiv 2505.06708), applied once around any backend.

    backward    do ← do·σ(g)        dg = do·o·σ(g)·(1 − σ(g)), summed over the width where a head has one gate

Statistics are those of the weights: the gate changes none. On a GPU one kernel each way (`_backends/gpu/gate.py`) reads
and writes every number once; elsewhere torch computes the formula.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from regard._core.derivatives.autograd import is_batched
from regard._core.dtypes import accumulator
from regard._core.ops.backends import is_plain_eager
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
        lead = (*(1,) * (4 - o.ndim), *o.shape[:-1])
        four = math.prod(lead[:-2]), *lead[-2:]
        return FusedGate.apply(*(x.reshape(*four, x.shape[-1]) for x in (o, g))).reshape(o.shape)
    return multiply(o, g)


def multiply(o: Tensor, g: Tensor) -> Tensor:
    """The formula in torch's own operations, which have every derivative."""
    wide = accumulator(o.dtype)
    return (o.to(wide) * torch.sigmoid(g.to(wide))).to(o.dtype)


class FusedGate(torch.autograd.Function):
    """o·σ(g) of o [B, H, M, E] and g [B, H, M, 1 or E] by one Triton kernel each way."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, g: Tensor) -> Tensor:
        from regard._backends.gpu import gate

        ctx.save_for_backward(o, g)
        return gate.forward(o, g)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        from regard._backends.gpu import gate

        o, g = ctx.saved_tensors
        if not (torch.is_grad_enabled() or is_batched(do)):  # neither create_graph=True nor mapped
            return gate.backward(do, o, g)
        wide = accumulator(o.dtype)
        s, up = torch.sigmoid(g.to(wide)), do.to(wide)
        dg = up * o.to(wide) * s * (1.0 - s)
        dg = dg.sum(-1, keepdim=True) if g.shape[-1] == 1 != o.shape[-1] else dg
        return (up * s).to(o.dtype), dg.to(g.dtype)
