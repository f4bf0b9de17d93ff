"""Gated short convolutions of LFM2: out(C ∘ conv(B ∘ x)), which remember as many tokens as the kernel has taps."""

from __future__ import annotations

from torch import nn

NAME = "ShortConv"


def matches(module: nn.Module) -> bool:
    return type(module).__name__.endswith("ShortConv") and isinstance(getattr(module, "conv", None), nn.Conv1d)
