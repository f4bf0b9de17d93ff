"""A layer's logit variance, measured and predicted from the norms of q and k: medians over its heads."""

from __future__ import annotations

import math
from statistics import median

from regard.health.findings._finding import HeadList, Heads, once

LARGE_SCALE = 1.5  # scale · √d above which a scale is suspected too large; below the inverse, too small
NORM_RATIO = 1.1  # measured over predicted variance, up to which norms alone explain it
BIAS_FACTOR = 16.0  # over the bound of `is_from_bias`: with an outlying first key, causal rows see ln n times more


@once
def group_by_layer(heads: Heads) -> list[HeadList]:
    """The heads that can be judged, one list per layer."""
    layers: dict[int, HeadList] = {}
    for head in heads:
        if head.can_be_judged:
            if head.index not in layers:
                layers[head.index] = HeadList()
            layers[head.index].append(head)
    return list(layers.values())


@once
def median_of(members: Heads, name: str) -> float:
    """The median over heads of a statistic's mean."""
    return median(head.statistics.mean(name) for head in members)


@once
def variances(members: Heads) -> tuple[float, float]:
    """(measured, predicted) logit variance; a what-if has no norms, so both are the measured one."""
    measured = median_of(members, "logit_variance")
    known = [head.predicted_variance for head in members if not math.isnan(head.predicted_variance)]
    return measured, median(known) if known else measured


def is_from_norms(members: Heads, ratio: float = NORM_RATIO) -> bool:
    """True if q and k of these norms, in unrelated directions, would have the layer's variance."""
    measured, predicted = variances(members)
    gain, gain_ratio = median_of(members, "gradient_gain"), median_of(members, "gain_ratio")
    few_keys = min(gain / gain_ratio, 1.0) if gain_ratio > 0.0 else 1.0  # E(1 − 1/n): n keys vary less than many
    return measured < ratio * predicted * few_keys and not math.isnan(members[0].predicted_variance)


def is_from_bias(members: Heads) -> bool:
    """True if the variance exceeds what q·k can have: Var(q·k) ≤ E‖q‖²·E‖k − k̄‖², which is d times the prediction."""
    measured, predicted = variances(members)
    return measured > BIAS_FACTOR * members[0].head_dim * predicted
