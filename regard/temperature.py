"""Temperatures that follow the row: policies that `regard.attention(temperature=…)` asks for one value per query.

A policy is called with the number of visible keys per query, [B, H, M], and a function that measures the row's
statistics with the temperature left at 1; it returns a tensor that broadcasts to [B, H, M]. Scores are divided by it.

>>> import regard, torch
>>> regard.temperature.SSMax(s=0.5)(torch.tensor([[[100.0]]]), None)
tensor([[[0.4343]]])
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

Measure = Callable[[tuple[str, ...]], dict[str, Tensor]]


class SSMax(nn.Module):
    """T = 1 / (s·log n): scalable softmax (arXiv 2501.19399), so that a row of n keys can stay as sharp as a short one.

    `s` is a number, or a tensor per head; `learn=True` makes it a parameter. n = 1 is treated as 2, where s·log n
    would be 0 and the row is one-hot anyway.
    """

    def __init__(self, s: float | Tensor = 0.43, learn: bool = False) -> None:
        super().__init__()
        value = torch.as_tensor(s, dtype=torch.float32)
        if not bool((value > 0).all()):
            raise ValueError(f"s must be positive, got {s!r}")
        if learn:
            self.s = nn.Parameter(value)
        else:
            self.register_buffer("s", value)

    def forward(self, visible_keys: Tensor, measure: Measure | None) -> Tensor:
        s = self.s if self.s.ndim == 0 else self.s[:, None]
        return 1.0 / (s.to(visible_keys) * torch.log(visible_keys.clamp_min(2.0)))


class Adaptive(nn.Module):
    """T = 1 / max(β(H), 1): sharpen the rows whose entropy H says that they have spread too far (arXiv 2410.01104).

    β is a polynomial in H, coefficients from the highest power down; rows with H ≤ `floor` keep T = 1. The published
    fit falls below 1 above H ≈ 5.94, where the remedy switches itself off. The entropy costs one more pass.
    """

    published = (-0.037, 0.481, -2.3, 4.917, -1.791)

    def __init__(self, coefficients: tuple[float, ...] = published, floor: float = 0.5) -> None:
        super().__init__()
        self.coefficients, self.floor = tuple(coefficients), floor

    def forward(self, visible_keys: Tensor, measure: Measure) -> Tensor:
        entropy = measure(("entropy",))["entropy"]
        beta = torch.zeros_like(entropy)
        for coefficient in self.coefficients:
            beta = beta * entropy + coefficient
        beta = torch.where(entropy > self.floor, beta.clamp_min(1.0), 1.0)
        return 1.0 / beta


def visible_keys(problem) -> Tensor:
    """[B, H, M]: how many keys each query of a problem sees, from the intervals alone where there is no dense mask."""
    batch, heads, queries = problem.q.shape[:3]
    keys, device = problem.k.shape[2], problem.q.device
    i = torch.arange(queries, device=device)
    left, right = problem.reach
    first = torch.zeros_like(i) if left is None else (i - left).clamp(0, keys)
    last = torch.full_like(i, keys) if right is None else (i + right + 1).clamp(0, keys)
    last = last.expand(batch, queries)
    if problem.key_lengths is not None:
        last = torch.minimum(last, problem.key_lengths.to(device)[:, None])
    if problem.mask is None and problem.bias is None:
        count = (last - first).clamp_min(0)[:, None, :].expand(batch, heads, queries)
        return count.to(problem.accumulator)
    shown = []
    for q0 in range(0, queries, 256):  # a block of queries at a time: never N × N
        block = slice(q0, q0 + 256)
        j = torch.arange(keys, device=device)
        seen = (j >= first[block, None]) & (j < last[:, None, block, None])
        if problem.mask is not None:
            seen = seen & problem.mask[:, :, block]
        if problem.bias is not None:
            seen = seen & (problem.bias[:, :, block] != -math.inf)
        shown.append(seen.sum(-1).expand(batch, heads, seen.shape[-2]))
    return torch.cat(shown, -1).to(problem.accumulator)
