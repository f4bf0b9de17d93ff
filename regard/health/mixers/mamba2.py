"""Mamba 2: h ← exp(−exp(A)·Δ)·h + Δ·B x, with Δ = softplus(δ + bias) per head, the last columns of the projection."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import softplus

NAME = "Mamba2"
TAPS = ("in_proj",)


def matches(module: nn.Module) -> bool:
    a = getattr(module, "A_log", None)
    return isinstance(a, Tensor) and a.ndim == 1 and hasattr(module, "in_proj") and hasattr(module, "dt_bias")


def read(module: Any, taps: dict[str, Tensor]) -> tuple[Tensor | None, None]:
    """(log decay [tokens, heads], None)."""
    projected = taps.get("in_proj")
    if projected is None:
        return None, None
    if isinstance(factor := getattr(module, "mup_vector", None), Tensor):
        projected = projected * factor
    step = softplus(projected[..., -module.A_log.shape[0] :].float() + module.dt_bias.float())
    low, high = getattr(module, "time_step_limit", (0.0, float("inf")))
    return -module.A_log.float().exp() * step.clamp(low, high), None
