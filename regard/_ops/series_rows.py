"""Rows of entmax for α next to 1, where the fused solvers' 1/(α−1) magnifies rounding: plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.normalizers import _near_softmax, softmax


def forward(s: Tensor, choice, theta: Tensor | None, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    alpha = choice.theta if theta is None else theta[:, None]
    with torch.no_grad():
        hidden = s if mask is None else s.masked_fill(~mask, float("-inf"))
        if theta is not None and s.device.type == "cpu" and bool((theta == 1.0).all()):  # where a look costs no sync
            p = softmax.reference(hidden * scale, mask, None)
        else:
            p = _near_softmax.value(hidden * scale, mask, alpha)
        return p, s.new_zeros((2, s.shape[0]))


def backward(dp: Tensor, saved: Tensor, state: Tensor, choice, theta, mask, scale: float) -> Tensor:
    from regard._ops.row_ops import differentiable_vjp

    with torch.no_grad():
        ds = differentiable_vjp(dp, saved, state, mask, theta, choice.spec, scale)
        return ds.masked_fill(saved.isnan(), float("nan"))
