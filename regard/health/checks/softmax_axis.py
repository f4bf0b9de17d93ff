"""Softmax over another axis than the keys, and weights that were changed after it: rows do not add up to 1."""

from __future__ import annotations

from collections.abc import Sequence

from regard.health.capture.handwritten import CHANGED, RUNS_OVER
from regard.health.checks.finding import LAYERS, Finding, Layers, fill_finding
from regard.health.checks.rule import Rule

NEEDS = "attention written with torch's own functions"
AXIS = Rule(
    "RG710", "softmax over another axis", "the softmax runs over the keys", "critical", NEEDS,
    "scores q kᵀ went through a softmax over another axis than the one that is summed with the values",
    "softmax(dim=…) counts from the wrong end, or q and k were multiplied in the other order.",
    "Use softmax(dim=-1) on scores [batch, heads, queries, keys].",
    explains=("RG1", "RG2", "RG3", "RG620", "RG701", "RG8"),
)  # fmt: skip
SUMS = Rule(
    "RG711", "weights do not add up to 1", "weights of a query add up to 1", "warning", NEEDS,
    "the weights that multiply the values are not those of the softmax and their rows do not add up to 1; some models "
    "are made so, with a gate on the weights",
    "The mask is applied to the weights after the softmax, or they are scaled.",
    "Hide keys before the softmax: scores.masked_fill(~visible, -inf).softmax(-1).",
    explains=("RG10", "RG206", "RG211", "RG212", "RG22", "RG23", "RG24"),
)  # fmt: skip
RULES = (AXIS, SUMS)


def find_in_layers(layers: Layers) -> list[Finding]:
    return [*report(AXIS, layers, RUNS_OVER), *report(SUMS, layers, CHANGED)]


def report(rule: Rule, layers: Layers, mark: str) -> list[Finding]:
    """[Finding] about the layers that could not be measured for this reason."""
    found: Sequence = [layer for layer in layers if layer.reason is not None and mark in layer.reason]
    if not found:
        return []
    first = found[0]
    text = first.reason[first.reason.index(mark) :]
    evidence = f"In {first.label or 'the model'}, {text}; so in {len(found)} of {len(layers)} layers."
    return [fill_finding(rule, rule.severity, (), evidence, scope=LAYERS, layer=first.name)]
