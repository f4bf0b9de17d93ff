"""The known kinds of token mixers: how each is recognised, and what its submodules tell of its decay and gates.

`read` turns what the tapped submodules saw into (log decays [tokens, channels], write gates); None where it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

Taps = dict[str, Tensor]
Read = tuple[Tensor | None, Tensor | None]


class Kind(NamedTuple):
    """One kind: its name, the modules that are of it, the submodules ("name" or "name:input") that `read` looks at."""

    name: str
    matches: Callable[[nn.Module], bool]
    taps: tuple[str, ...] = ()
    read: Callable[[Any, Taps], Read] | None = None


DELTA_TAPS = ("in_proj_ba", "in_proj_a", "in_proj_b", "a_proj", "b_proj")


def is_gated_delta(module: nn.Module) -> bool:
    return hasattr(module, "A_log") and hasattr(module, "dt_bias") and any(hasattr(module, tap) for tap in DELTA_TAPS)


def read_gated_delta(module: Any, taps: Taps) -> Read:
    """S ← a·S(1 − b·k kᵀ) + b·v kᵀ, with a = exp(−exp(A)·softplus(α + bias)) and b = σ(β), per head."""
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


def is_mamba(module: nn.Module) -> bool:
    a = getattr(module, "A_log", None)
    return isinstance(a, Tensor) and a.ndim >= 2 and hasattr(module, "conv1d")


def read_mamba(module: Any, taps: Taps) -> Read:
    """h ← exp(−exp(A)·Δ)·h + Δ·B x, with Δ = softplus(W δ + bias) per channel; of its row of A the slowest."""
    projected, step = taps.get("x_proj"), taps.get("dt_layernorm")
    if projected is None or not isinstance(getattr(module, "dt_proj", None), nn.Linear):
        return None, None
    if step is None:
        if hasattr(module, "rms_eps"):  # Falcon Mamba norms δ without a module
            return None, None
        step = projected[..., : module.dt_proj.in_features]
    delta = softplus(linear(step, module.dt_proj.weight, module.dt_proj.bias).float())
    return -module.A_log.float().exp().amin(-1) * delta, None


def is_mamba2(module: nn.Module) -> bool:
    a = getattr(module, "A_log", None)
    return isinstance(a, Tensor) and a.ndim == 1 and hasattr(module, "in_proj") and hasattr(module, "dt_bias")


def read_mamba2(module: Any, taps: Taps) -> Read:
    """h ← exp(−exp(A)·Δ)·h + Δ·B x, with Δ = softplus(δ + bias) per head, the last columns of the projection."""
    projected = taps.get("in_proj")
    if projected is None:
        return None, None
    if isinstance(factor := getattr(module, "mup_vector", None), Tensor):
        projected = projected * factor
    step = softplus(projected[..., -module.A_log.shape[0] :].float() + module.dt_bias.float())
    low, high = getattr(module, "time_step_limit", (0.0, float("inf")))
    return -module.A_log.float().exp() * step.clamp(low, high), None


def is_rg_lru(module: nn.Module) -> bool:
    return hasattr(module, "rg_lru")


def read_rg_lru(module: Any, taps: Taps) -> Read:
    """Griffin's h ← a·h + √(1 − a²)·(i·x), with a = exp(−8·softplus(Λ)·σ(r)) and i = σ(g), per channel."""
    lru, x = module.rg_lru, taps.get("rg_lru")
    if x is None:
        return None, None
    blocks = x.flatten(0, -2).unflatten(-1, (lru.recurrent_gate_weight.shape[0], -1))

    def gate(name: str) -> Tensor:
        made = torch.einsum("thi,hij->thj", blocks, getattr(lru, f"{name}_weight")) + getattr(lru, f"{name}_bias")
        return made.flatten(1).float().sigmoid()

    return -8.0 * gate("recurrent_gate") * softplus(lru.recurrent_param.float()), gate("input_gate")


def is_short_conv(module: nn.Module) -> bool:
    """out(C ∘ conv(B ∘ x)) of LFM2, which remembers as many tokens as the kernel has taps."""
    return type(module).__name__.endswith("ShortConv") and isinstance(getattr(module, "conv", None), nn.Conv1d)


KINDS = (
    Kind("GatedDeltaNet", is_gated_delta, DELTA_TAPS, read_gated_delta),
    Kind("Mamba", is_mamba, ("x_proj", "dt_layernorm"), read_mamba),
    Kind("Mamba2", is_mamba2, ("in_proj",), read_mamba2),
    Kind("RG-LRU", is_rg_lru, ("rg_lru:input",), read_rg_lru),
    Kind("ShortConv", is_short_conv),
)
