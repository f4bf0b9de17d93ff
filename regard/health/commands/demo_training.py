"""Trains one small model three times on the same text: with 1/√d, without, and without but under `regard.using`."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.health.models.tiny import TinyLM, encode
from regard.health.using import using

STEPS, RATE, SEQUENCES, LENGTH, WIDTH = 120, 1e-2, 16, 32, 64
LAST = 10  # steps whose mean loss is reported


class Training(NamedTuple):
    """One training: what was different, and the loss after it."""

    name: str
    loss: float


def train_three(text: str) -> list[Training]:
    """Train one model with 1/√d, without it, and mended, each from one start on one text; about 2 s each."""
    ids = encode(text)
    return [
        Training("with 1/√d", train(ids, "sqrt")),
        Training("without 1/√d", train(ids, "none")),
        Training("without 1/√d, under regard.using(model, scale='sqrt')", train(ids, "none", mended=True)),
    ]


def train(ids: Tensor, scale: str, mended: bool = False) -> float:
    """The mean loss of the last steps."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = TinyLM(layers=2, heads=1, width=WIDTH, length=LENGTH, scale=scale)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    with using(model, scale="sqrt") if mended else contextlib.nullcontext():
        for _ in range(STEPS):
            start = torch.randint(len(ids) - LENGTH - 1, (SEQUENCES, 1), generator=generator)
            windows = ids[start + torch.arange(LENGTH + 1)]
            loss = cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses[-LAST:]) / LAST
