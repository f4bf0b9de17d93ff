"""Faithful or silent: how far the output rebuilt from the measured weights is from the model's own."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

SAMPLED = 64  # rows of a long call on which the two are compared
# relative difference of one head's output, as the square root of the sums of squares
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
NOT_FINITE = "its output is not finite"
GPU_FLOAT32 = 5e-3  # products in TF32


def coarsest(*tensors: Tensor) -> torch.dtype:
    """The dtype with the fewest digits that a call goes through, autocast's included."""
    kinds = {x.dtype for x in tensors}
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in kinds:
        kinds.add(torch.get_autocast_dtype(kind))
    return max(kinds, key=lambda dtype: torch.finfo(dtype).eps)


def limit(dtype: torch.dtype, device: torch.device) -> float:
    """The relative difference from which on a layer is not measured."""
    return GPU_FLOAT32 if (dtype, device.type) == (torch.float32, "cuda") else TOLERANCE[dtype]


def sample(q: Tensor) -> Tensor:
    """64 rows spread over a long call."""
    return _spread(q.shape[2], SAMPLED, q.device)


@lru_cache(maxsize=8)
def _spread(length: int, count: int, device: torch.device) -> Tensor:
    return torch.linspace(0, length - 1, count).round().long().to(device)


def difference(own: Tensor, rebuilt: Tensor, rows: Tensor | None) -> Tensor:
    """Per head ‖own − rebuilt‖/‖own‖, both [B, H, M, E], on the rows [B, M] that count: [H]."""
    own = own[: len(rebuilt)].detach()
    if own.is_cuda and 0 < own.shape[2] <= SAMPLED:
        from regard.health.measurement import gpu_call

        return gpu_call.difference(own, rebuilt, rows)
    own, rebuilt = own.float(), rebuilt.float()
    if rows is not None:
        hidden = ~rows[:, None, :, None]
        own, rebuilt = own.masked_fill(hidden, 0.0), rebuilt.masked_fill(hidden, 0.0)
    size = own.square().sum((0, 2, 3)).sqrt()
    apart = (own - rebuilt).square().sum((0, 2, 3)).sqrt()
    return apart / torch.where(size > 0, size, 1.0)


def unfaithful(apart: float, limit: float) -> str | None:
    """Why a relative difference is too large, None if it is not."""
    if apart != apart:
        return NOT_FINITE
    if apart > limit:
        return f"the output rebuilt from the weights differs by {apart:.2g} from the model's own (limit {limit:g})"
    return None
