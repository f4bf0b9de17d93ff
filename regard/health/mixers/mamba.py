"""Mamba: h ← exp(−exp(A)·Δ)·h + Δ·B x, with Δ = softplus(W δ + bias) per channel and a row of A of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear, softplus

NAME = "Mamba"
TAPS = ("x_proj", "dt_layernorm")


def matches(module: nn.Module) -> bool:
    a = getattr(module, "A_log", None)
    return isinstance(a, Tensor) and a.ndim >= 2 and hasattr(module, "conv1d")


def read(module: Any, taps: dict[str, Tensor]) -> tuple[Tensor | None, None]:
    """(log decay [tokens, channels] of the slowest state, None); None where Δ is not made as in Mamba."""
    projected, step = taps.get("x_proj"), taps.get("dt_layernorm")
    if projected is None or not isinstance(getattr(module, "dt_proj", None), nn.Linear):
        return None, None
    if step is None:
        if hasattr(module, "rms_eps"):  # Falcon Mamba norms δ without a module
            return None, None
        step = projected[..., : module.dt_proj.in_features]
    delta = softplus(linear(step, module.dt_proj.weight, module.dt_proj.bias).float())
    return -module.A_log.float().exp().amin(-1) * delta, None
