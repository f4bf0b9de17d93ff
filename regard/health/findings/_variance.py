"""A layer's logit variance, measured and as the norms of q and k alone predict it: medians over its heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

LARGE = 1.5  # scale over 1/√d, from which on it is a suspect; under its inverse, one of being too small
NORMS = 1.1  # variance over what the norms predict: up to here they alone made it
ROOM = 16.0  # over that bound: where the first key stands apart, causal rows see ln n times the variance of all keys


def by_layer(heads: Sequence) -> list[list]:
    """The heads that can be judged, layer by layer."""
    layers: dict[int, list] = {}
    for head in heads:
        if head.can_be_judged:
            layers.setdefault(head.index, []).append(head)
    return list(layers.values())


def variances(members: Sequence) -> tuple[float, float]:
    """(measured, predicted); a what-if has no norms of its own, and gives the measured one twice."""
    measured = median(head.statistics.mean("logit_variance") for head in members)
    known = [head.predicted_variance for head in members if not math.isnan(head.predicted_variance)]
    return measured, median(known) if known else measured


def by_norms(members: Sequence, times: float = NORMS) -> bool:
    """Is the variance of a layer that of directions which know nothing of each other?"""
    measured, predicted = variances(members)
    return measured < times * predicted * few_keys(members) and not math.isnan(members[0].predicted_variance)


def by_bias(members: Sequence) -> bool:
    """Is it more than queries and keys of these norms can make? Var(q·k) ≤ E‖q‖²·E‖k − k̄‖², d times the prediction."""
    measured, predicted = variances(members)
    return measured > ROOM * members[0].head_dim * predicted


def few_keys(members: Sequence) -> float:
    """E(1 − 1/n), by which the variance over n keys falls short of that over many."""
    gain, ratio = (median(head.statistics.mean(name) for head in members) for name in ("gradient_gain", "gain_ratio"))
    return min(gain / ratio, 1.0) if ratio > 0.0 else 1.0
