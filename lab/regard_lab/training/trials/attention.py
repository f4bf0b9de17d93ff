"""`make_attention`: the attention module of a trial's options; `compared`: the kinds that "what wins?" compares."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any

from torch import nn

import regard.nn

PLACES = {"causal": ("causal",), "self": ("causal", "self"), "any": ("causal", "self", "cross")}


def make_attention(
    width: int, heads: int, options: Mapping[str, Any], place: str, bias: bool = False, index: int = 0
) -> nn.Module:
    """Return an attention module of `regard.nn`; `place` is "causal", "self" or "cross", `index` the layer's.

    Options are its arguments, and what does not go to it: `module`, its class (default MultiheadAttention); `needs`,
    "causal" or "self" if it is defined there alone, and elsewhere attention is plain; `paired`, True if it has half as
    many heads of two maps each; `indexed`, True if it takes `layer`.
    """
    chosen = dict(options)
    kind, needs = chosen.pop("module", "MultiheadAttention"), chosen.pop("needs", "any")
    paired, indexed = chosen.pop("paired", False), chosen.pop("indexed", False)
    if place not in PLACES[needs]:
        return regard.nn.MultiheadAttention(width, heads, bias=bias)
    if indexed:
        chosen["layer"] = index
    return getattr(regard.nn, kind)(width, heads // 2 if paired else heads, bias=bias, **chosen)


def mlp_width(width: int, attention: nn.Module) -> int:
    """Return the MLP's hidden width that gives a block as many parameters as plain attention with 4·width would.

    A gate per element, for example, has width² weights, and its MLP is width/2 narrower for it.
    """
    plain = 4 * width * width  # the four projections
    extra = sum(p.numel() for p in attention.parameters() if p.ndim > 1) - plain
    return 4 * width - round(extra / (2 * width))


def attentions(keys: int) -> dict[str, dict[str, Any]]:
    """Return name → options; the bias of sigmoid is −ln keys, as its paper has it."""
    return {
        "softmax": {},
        "softmax1": {"normalizer": "softmax1"},
        "sink": {"sink": True},
        "temperature": {"temperature": "learned"},
        "ssmax": {"temperature": "ssmax"},
        "qk-norm": {"score": "cosine"},
        "entmax-1.25": {"normalizer": "entmax(alpha=1.25)"},
        "entmax15": {"normalizer": "entmax15"},
        "entmax-learned": {"normalizer": "entmax(alpha=learned)"},
        "asentmax": {"normalizer": "entmax15", "temperature": "asentmax"},
        "sparsemax": {"normalizer": "sparsemax"},
        "relu": {"normalizer": "relu"},
        "softpick": {"normalizer": "softpick"},
        "sigmoid": {"normalizer": f"sigmoid(bias={-math.log(keys):.3f})"},
        "sigmoid-learned": {"normalizer": "sigmoid(bias=learned)"},
        "gate-head": {"gate": "head"},
        "gate-element": {"gate": "element"},
        "forgetting": {"forget_gate": True, "needs": "causal"},
        "differential": {"module": "DifferentialAttention", "needs": "self", "paired": True, "indexed": True},
        "stick-breaking": {"normalizer": "stickbreaking", "needs": "causal"},
    }


def compared(keys: int, names: Container[str] = (), but: Container[str] = ()) -> dict[str, dict[str, Any]]:
    """Return name → options of a trial, for the attentions of these names, or for all but some."""
    found = attentions(keys).items()
    return {name: {"attention": x} for name, x in found if name not in but and (not names or name in names)}
