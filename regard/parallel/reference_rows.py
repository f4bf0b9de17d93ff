"""Whole rows by the float64 reference, with the functions of a backend: for what no kernel takes."""

from __future__ import annotations

from dataclasses import replace

import torch

from regard import reference
from regard._call.problem import Forward, Gradients, Problem, Upstream


def forward(problem: Problem) -> Forward:
    """Return the output and the statistics of rows that begin at `problem.first_query`; there is no row state."""
    with torch.no_grad():
        o, stats = reference.of_problem(problem)
    none = torch.zeros(problem.q.shape[:3], dtype=problem.accumulator, device=problem.q.device)
    return Forward(o, none, none, stats)


def backward(problem: Problem, forward: Forward, upstream: Upstream) -> Gradients:
    """Return the gradients of q, k, v and of the options that `upstream` asks for."""
    names = ["q", "k", "v", *(name for name in ("bias", "temperature", "sink") if getattr(upstream, name))]
    leaves = [getattr(problem, name).detach().requires_grad_() for name in names]
    with torch.enable_grad():
        o, stats = reference.of_problem(replace(problem, **dict(zip(names, leaves, strict=True))))
        pairs = [(o, upstream.o), *((stats[problem.stats.index(name)], x) for name, x in upstream.stats.items())]
    outputs, given = zip(*((x, dx.to(x.dtype)) for x, dx in pairs), strict=True)
    found = torch.autograd.grad(outputs, leaves, given, allow_unused=True)
    filled = (torch.zeros_like(x) if dx is None else dx for x, dx in zip(leaves, found, strict=True))
    return Gradients(**dict(zip(names, filled, strict=True)))
