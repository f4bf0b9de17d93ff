"""Calls that take the Hopper forward, for tests on a GPU."""

from __future__ import annotations

import torch
from attention_data import Poisoned, make

from regard._backends.gpu.attention import launch, registry
from regard._backends.gpu.attention.hopper import launch as hopper

SHAPES = (  # no length is a multiple of 16, for which Triton would compile another kernel
    dict(b=2, h=4, g=2, m=1000, n=1000),
    dict(b=1, h=4, g=2, m=300, n=777),
    dict(b=1, h=4, g=2, m=777, n=300),
    dict(b=1, h=4, g=2, m=65, n=3),
)


def poison(monkeypatch) -> None:
    """Fills fresh tensors with NaN and sends small calls to the kernel itself: no tape, no limit on scores."""
    for module in (launch, hopper):
        monkeypatch.setattr(module, "torch", Poisoned())
    monkeypatch.setattr(launch, "_has_tape", lambda problem: False)  # a tape would not see what a test patches
    monkeypatch.setattr(registry, "FEW_SCORES", 0)


def make_taken(seed, name="softmax", **options):
    """A problem of bfloat16 tensors on the GPU that takes the Hopper forward."""
    problem = make(seed, name, device="cuda", **dict(dtype=torch.bfloat16) | options)
    assert registry.choose(problem).name == "hopper"
    return problem


def take_warpgroups(monkeypatch, which: str) -> None:
    """Sends rows of every length to programs of one warpgroup, or of several."""
    most = dict.fromkeys((64, 128), 10**6 if which == "one" else 0)
    monkeypatch.setattr(hopper, "SHORT_ROWS", most)
    monkeypatch.setattr(hopper, "SHORT_PLAIN_ROWS", most)
