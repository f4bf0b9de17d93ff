"""Rows of a map by its own `series`, where the fused kernels would magnify rounding: plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(s: Tensor, choice, theta: Tensor | None, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    theta = choice.theta if theta is None else theta[:, None]
    with torch.no_grad():
        hidden = s if mask is None else s.masked_fill(~mask, float("-inf"))
        top = hidden.amax(-1, keepdim=True) if s.shape[-1] else hidden.sum(-1, keepdim=True)
        hidden = hidden - top.masked_fill(top.abs() == float("inf"), 0.0)  # a product rounds by the score, or overflows
        return choice.series(hidden * scale, mask, theta), s.new_zeros((2, s.shape[0]))


def backward(dp: Tensor, saved: Tensor, state: Tensor, choice, theta, mask, scale: float) -> Tensor:
    from regard._core.ops.rows import differentiable_vjp

    with torch.no_grad():
        ds = differentiable_vjp(dp, saved, state, mask, theta, choice.spec, scale)
        return ds.masked_fill(saved.isnan(), float("nan"))
