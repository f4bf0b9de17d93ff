"""RG-LRU of Griffin: h ← a·h + √(1 − a²)·(i·x), with a = exp(−8·softplus(Λ)·σ(r)) and i = σ(g), per channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

NAME = "RG-LRU"
TAPS = ("rg_lru:input",)


def matches(module: nn.Module) -> bool:
    return hasattr(module, "rg_lru")


def read(module: Any, taps: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """(log a, i), [tokens, channels]."""
    lru, x = module.rg_lru, taps.get("rg_lru")
    if x is None:
        return None, None
    blocks = x.flatten(0, -2).unflatten(-1, (lru.recurrent_gate_weight.shape[0], -1))

    def gate(name: str) -> Tensor:
        made = torch.einsum("thi,hij->thj", blocks, getattr(lru, f"{name}_weight")) + getattr(lru, f"{name}_bias")
        return made.flatten(1).float().sigmoid()

    return -8.0 * gate("recurrent_gate") * softplus(lru.recurrent_param.float()), gate("input_gate")
