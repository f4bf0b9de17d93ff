"""Gated delta nets: S ← a·S(1 − b·k kᵀ) + b·v kᵀ, with a = exp(−exp(A)·softplus(α + bias)) and b = σ(β), per head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import softplus

NAME = "GatedDeltaNet"
TAPS = ("in_proj_ba", "in_proj_a", "in_proj_b", "a_proj", "b_proj")


def matches(module: nn.Module) -> bool:
    return hasattr(module, "A_log") and hasattr(module, "dt_bias") and any(hasattr(module, tap) for tap in TAPS)


def read(module: Any, taps: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """(log a, b), [tokens, heads]."""
    heads = module.A_log.shape[-1]
    if (both := taps.get("in_proj_ba")) is not None:  # heads that share a key stand together: their b, then their a
        groups = getattr(module, "num_k_heads", 1)
        b, a = both.unflatten(-1, (groups, -1)).chunk(2, -1)
        b, a = b.flatten(-2), a.flatten(-2)
    else:
        a, b = (taps.get(f"in_proj_{name}", taps.get(f"{name}_proj")) for name in "ab")
    if a is None or a.shape[-1] != heads:
        return None, None if b is None else b.float().sigmoid()
    decay = -module.A_log.float().exp() * softplus(a.float() + module.dt_bias.float())
    return decay, None if b is None else b.float().sigmoid()
