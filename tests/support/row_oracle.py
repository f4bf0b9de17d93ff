"""Rows of scores and their float64 answers."""

from __future__ import annotations

import torch

from regard._backends.cpu.rows import launch as rows

INF, NAN = float("inf"), float("nan")


def scores(r: int, n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows from flat (1e-3) to sharp (30), with ties."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.logspace(-3, 1.5, max(r, 1))[:r, None]
    s = torch.randn(r, n, generator=generator) * size
    s[:, n // 2 :: 7] = s[:, :1].clone()
    return s.to(dtype)


def both_ways(s, choice, dp, theta=None, mask=None, scale=1.0):
    p, state = rows.forward(s, choice, theta, mask, scale)
    saved = s if choice.slope_of_weight is None else p
    return p, rows.backward(dp, saved, state, choice, theta, mask, scale), state


def oracle(s, choice, dp, theta=None, scale=1.0, dtype=torch.float64):
    """The reference and its autograd in a given precision, from the very same (rounded) inputs."""
    x = s.to(dtype).requires_grad_()
    theta = choice.theta if theta is None else theta.to(dtype)[:, None]
    p = choice.reference(x * scale, None, theta)
    return p.detach(), torch.autograd.grad(p, x, dp.to(dtype))[0]
