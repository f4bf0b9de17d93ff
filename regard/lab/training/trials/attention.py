"""`make_attention`: the attention module of a trial's options, and `mlp_width`, which keeps a block's size.

>>> from regard.lab.training.trials.attention import make_attention, mlp_width
>>> layer = make_attention(16, 2, {"normalizer": "entmax15"}, causal=True)
>>> layer.normalizer, mlp_width(16, layer)
('entmax15', 64)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

import regard.nn


def make_attention(width: int, heads: int, options: Mapping[str, Any], causal: bool, bias: bool = False) -> nn.Module:
    """Return an attention module of `regard.nn`.

    Args:
        width, heads: its size.
        options: arguments of the module. Two more: `module`, the name of its class (default MultiheadAttention), and
            `causal_only`, True if the options are defined for causal self-attention alone.
        causal: whether this is causal self-attention; if not, `causal_only` options give plain attention.
        bias: whether the projections have a bias.
    """
    chosen = dict(options)
    kind, causal_only = chosen.pop("module", "MultiheadAttention"), chosen.pop("causal_only", False)
    if causal_only and not causal:
        return regard.nn.MultiheadAttention(width, heads, bias=bias)
    return getattr(regard.nn, kind)(width, heads, bias=bias, **chosen)


def mlp_width(width: int, attention: nn.Module) -> int:
    """Return the MLP's hidden width that gives a block as many parameters as plain attention with 4·width would.

    A gate per element, for example, has width² weights, and its MLP is width/2 narrower for it.
    """
    plain = 4 * width * width  # the four projections
    extra = sum(p.numel() for p in attention.parameters() if p.ndim > 1) - plain
    return 4 * width - round(extra / (2 * width))
