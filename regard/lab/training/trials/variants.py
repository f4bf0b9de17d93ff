"""`attentions`: the kinds of attention that "what wins?" compares, as options of `make_attention`.

>>> from regard.lab.training.trials import variants
>>> variants.attentions(keys=128)["sigmoid"]
{'normalizer': 'sigmoid(bias=-4.852)'}
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from regard.lab.training.trials.attention import make_attention


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


def available(keys: int, names: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Return the attentions, of these names or all, that this version of regard can make."""
    missing = find_missing()
    return {name: options for name, options in attentions(keys).items()
            if name not in missing and (not names or name in names)}  # fmt: skip


def find_missing() -> dict[str, str]:
    """Return name → why this version of regard cannot make it."""
    missing = {}
    for name, options in attentions(keys=16).items():
        try:
            make_attention(16, 2, options, "causal")
        except (AttributeError, TypeError, ValueError) as wrong:
            missing[name] = f"not in this version: {str(wrong).partition('; ')[0]}"
    return missing
