"""Tangents of an attention problem, held against torch.func.jvp of the dense float64 reference."""

from __future__ import annotations

import dataclasses

import torch
from attention_data import ROUNDING, relative

from regard import reference
from regard._call.problem import Along, Problem


def make_along(problem: Problem, names: str = "qkv", offset: float = 0.0, seed: int = 1) -> Along:
    """Random tangents of the tensors in `names`; `offset` is added to that of every key."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name in names:
        x = getattr(problem, name)
        tangent = torch.randn(x.shape, generator=generator, dtype=torch.float64) + (offset if name == "k" else 0.0)
        drawn[name] = tangent.to(x.dtype).to(x.device)
    return Along(**drawn)


def find_tangent(problem: Problem, along: Along) -> torch.Tensor:
    """o′ in float64."""
    names = [name for name in "qkv" if getattr(along, name) is not None]

    def attend(*moved):
        return reference.of_whole(dataclasses.replace(problem, **dict(zip(names, moved, strict=True))))[0]

    primals = tuple(getattr(problem, name).double() for name in names)
    return torch.func.jvp(attend, primals, tuple(getattr(along, name).double() for name in names))[1]


def check_tangent(backend, problem: Problem, names: str = "qkv", offset: float = 0.0, slack: float = 1.0) -> None:
    """o′ of a backend against float64."""
    problem = dataclasses.replace(problem, stats=())
    along = make_along(problem, names, offset)
    ours = backend.tangent(problem, backend.forward(problem), along)
    truth = find_tangent(problem, along)
    assert ours.dtype == problem.q.dtype and ours.shape == truth.shape
    error = relative(ours, truth)
    assert error <= 4 * slack * ROUNDING[problem.q.dtype], error
