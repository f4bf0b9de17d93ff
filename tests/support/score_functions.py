"""Score functions that the tests share, what they are in torch, and a check of a backend that computes them."""

from __future__ import annotations

import dataclasses

import torch
from attention_data import FLOOR, ROUNDING, relative

import regard
from regard import reference
from regard._call.problem import Problem, Upstream
from regard.normalizers import jit, tl


@jit
def fade(s, i, j, h, rate):
    return s - rate * tl.log(1.0 + tl.abs(i - j))


@jit
def constant_slope(s, i, j, h, rate):
    return 1.0


@jit
def alibi(s, i, j, h, slope):
    return s - slope * tl.abs(i - j)


@jit
def clamp(s, i, j, h, low, high):
    """Clamp to [low, high], wider by a tenth for each position between query and key; head 1 is left alone."""
    room = 0.1 * tl.abs(i - j)
    return tl.where(h == 1, s, tl.minimum(tl.maximum(s, low - room), high + room))


@jit
def clamp_slope(s, i, j, h, low, high):
    room = 0.1 * tl.abs(i - j)
    return tl.where((h == 1) | ((s > low - room) & (s < high + room)), 1.0, 0.0)


@jit
def bend(s, i, j, h):
    """A smooth function of the score alone, steeper above 0."""
    return s + tl.where(j > i, 0.5, 0.25) * tl.sqrt(1.0 + s * s)


@jit
def bend_slope(s, i, j, h):
    return 1.0 + tl.where(j > i, 0.5, 0.25) * s / tl.sqrt(1.0 + s * s)


FADE = regard.bias.ScoreFunction(fade, constant_slope, (0.3,))
CLAMP = regard.bias.ScoreFunction(clamp, clamp_slope, (-1.0, 2.0))
BEND = regard.bias.ScoreFunction(bend, bend_slope)
CAP = regard.bias.ScoreFunction.soft_cap(torch.tensor([1.5]))  # one tensor: not the option softcap
ALL = {"fade": FADE, "clamp": CLAMP, "bend": BEND, "cap": CAP}


def written_out(name: str, s: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """The functions of `ALL` with their own parameters, on scores (…, H, M, N), as one writes them in torch."""
    away, first = (i - j).abs(), torch.arange(s.shape[-3])[:, None, None] == 1
    if name == "fade":
        return s - 0.3 * torch.log(1.0 + away)
    if name == "clamp":
        return torch.where(first, s, torch.maximum(torch.minimum(s, 2.0 + 0.1 * away), -1.0 - 0.1 * away))
    if name == "cap":
        return 1.5 * torch.tanh(s / 1.5)
    return s + torch.where(j > i, 0.5, 0.25) * torch.sqrt(1.0 + s * s)


def with_score(p: Problem, name: str) -> Problem:
    """The problem with a function of `ALL`."""
    params = (x.to(p.q.device) if isinstance(x, torch.Tensor) else x for x in ALL[name].params)
    score = ALL[name].with_params(*params)
    return dataclasses.replace(p, score=score, score_params=score.stack_params(p.q.shape[1], p.q, p.accumulator))


def check(backend, p: Problem, slack: float = 1.0) -> None:
    """Output, statistics and gradients of q, k and v by a backend against the float64 reference."""
    inputs = {name: getattr(p, name).detach().double().requires_grad_() for name in ("q", "k", "v")}
    o, stats = reference.of_problem(dataclasses.replace(p, **inputs))
    answer = backend.forward(p)
    assert relative(answer.o, o.detach()) <= slack * ROUNDING[p.q.dtype], relative(answer.o, o.detach())
    fine = 3e-3 if p.choice.family == "threshold" and p.q.element_size() == 2 else 3e-4
    for name, ours, truth in zip(p.stats, answer.stats.double(), stats.detach(), strict=True):
        bare = ~torch.isfinite(truth)
        assert torch.equal(ours[bare], truth[bare]), name
        if p.choice.family == "threshold" and name in ("support", "gradient_gain"):
            continue  # a weight of 1e-8 may round to 0
        error = ((ours - truth).abs() / (truth.abs() + FLOOR[name]))[~bare]
        assert error.numel() == 0 or error.max() <= slack * fine, (name, float(error.max()))
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(answer.o)
    found = backend.backward(p, answer, Upstream(do))
    truth = torch.autograd.grad(o, list(inputs.values()), do.double())
    for name, right in zip(inputs, truth, strict=True):
        ours = getattr(found, name)
        assert relative(ours, right) <= 4 * slack * ROUNDING[p.q.dtype], (name, relative(ours, right))
