"""A temperature that follows the row's entropy."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Adaptive(nn.Module):
    """T = 1 / max(β(H), 1): sharpen the rows whose entropy H says that they have spread too far (arXiv 2410.01104).

    β is a polynomial in H, coefficients from the highest power down; rows with H ≤ `floor` keep T = 1. The published
    fit falls below 1 above H ≈ 5.94, where the remedy switches itself off. The entropy costs one more pass.
    """

    published = (-0.037, 0.481, -2.3, 4.917, -1.791)

    def __init__(self, coefficients: tuple[float, ...] = published, floor: float = 0.5) -> None:
        super().__init__()
        self.coefficients, self.floor = tuple(coefficients), floor

    def forward(self, visible_keys: Tensor, rows) -> Tensor:
        entropy = rows(("entropy",))["entropy"]
        beta = torch.zeros_like(entropy)
        for coefficient in self.coefficients:
            beta = beta * entropy + coefficient
        beta = torch.where(entropy > self.floor, beta.clamp_min(1.0), 1.0)
        return 1.0 / beta
