"""Score functions that the tests share, and what they are in torch."""

from __future__ import annotations

import torch

import regard
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


FADE = regard.ScoreFunction(fade, constant_slope, (0.3,))
CLAMP = regard.ScoreFunction(clamp, clamp_slope, (-1.0, 2.0))
BEND = regard.ScoreFunction(bend, bend_slope)
CAP = regard.ScoreFunction.soft_cap(torch.tensor([1.5]))  # one tensor: not the option softcap
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
