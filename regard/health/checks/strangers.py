"""Strangers: in one layer q and k do not know of each other, while in the model's other layers they do.

Trained queries and keys agree in direction, so the logit variance is larger than their norms predict. The ratio of the
two, median over a layer's heads, was at least 1.22 in 94 layers of sound trained models, and below 1.15 where heads
were rolled, shards exchanged or stacked weights misread. A layer at its random start has it too. Under
rotary positions and QK-norm sound layers are near 1.5, so only models whose median layer is above 2 are judged.
"""

from __future__ import annotations

import re
from statistics import median

from regard.health.checks.finding import (
    Finding,
    Heads,
    group_by_layer,
    is_from_bias,
    make_finding,
    mean_key_share,
    variances,
)  # fmt: skip
from regard.health.checks.rule import Rule

RULE = Rule(
    "RG310", "q and k are strangers", "q and k of a layer belong together",
    "warning", needs="attention calls of three layers or more",
    proves="Proves that q and k of this layer agree no more than chance while those of other layers do.",
    cause="Heads were rolled or sharded in another order, a stacked matrix was read in another order, or the "
    "layer never learned.",
    fix="Check how this layer's q and k weights were loaded.",
)  # fmt: skip
RULES = (RULE,)
STRANGERS, USUAL = 1.15, 2.0  # ratio of a layer, and of the model's median layer
LEAST_VARIANCE = 1e-3  # below it both are rounding, or the layer is diffuse
NUMBER = re.compile(r"\d+")  # of a layer, in its name
LAYERS = 2  # of a model besides the first, at least


def find(heads: Heads) -> list[Finding]:
    kinds: dict[str, list[Heads]] = {}
    for members in group_by_layer(heads):
        kinds.setdefault(NUMBER.sub("#", members[0].layer), []).append(members)
    found: list = []
    for alike in kinds.values():
        later = alike[1:]  # the first layer of sound models has 1.1 to 1.5
        layers = [(members, ratio) for members in later if (ratio := agreement(members)) is not None]
        if len(layers) >= LAYERS and median(ratio for _, ratio in layers) >= USUAL:
            found += [(head, ratio) for members, ratio in layers if ratio < STRANGERS for head in members]
    return make_finding(
        RULE, "warning", found,
        "The logit variance is {range} times what the norms of q and k alone predict, while in the model's other "
        "layers they agree: here q and k do not belong together, or the layer never learned.",
        f"measured over predicted logit variance of a layer < {STRANGERS:g}, of the median layer > {USUAL:g}",
        "Check how this layer's weights were loaded: heads rolled or sharded in another order, a stacked q, k, v "
        "matrix read in another order, or a layer left at its random start.",
    )  # fmt: skip


def agreement(members: Heads) -> float | None:
    """Measured over predicted logit variance, medians over a layer's heads; None if it says nothing."""
    measured, predicted = variances(members)
    is_known = predicted > 0.0 and all(head.predicted_variance == head.predicted_variance for head in members)
    if not is_known or measured < LEAST_VARIANCE or is_from_bias(members):
        return None
    return measured / (predicted * mean_key_share(members))
