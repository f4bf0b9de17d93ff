"""`attentions`: the kinds of attention that "what wins?" compares, as options of `make_attention`.

>>> from regard.lab.training.trials import variants
>>> variants.attentions(keys=128)["sigmoid"]
{'normalizer': 'sigmoid(bias=-4.852)'}
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any


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
