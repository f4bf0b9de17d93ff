"""Scale off: the scale of the call is not 1/√d and the logit variance shows it, or the norms of q and k have grown.

Two quantities decide: scale·√d of the call, and the layer's logit variance, where 1/√d aims at 1: the smaller of the
measured one and of the one predicted from norms (scale²·E‖q‖²·E‖k − k̄‖²/d), medians over the layer's heads. Positional
heads do not count. docs/health.md has the table; checks/repairs.py tries other scales on the model's loss.
`diffuse` alone names a temperature, from the measured variance.
"""

import math
import re
from collections import Counter

from regard.health.checks.finding import (
    LARGE_SCALE,
    LOGIT_LIMIT,
    Finding,
    Head,
    Heads,
    exclude_positional,
    group_by_layer,
    make_finding,
    variances,
)  # fmt: skip
from regard.health.checks.rule import Rule

RULE = Rule(
    "RG401", "scale off", "scores are scaled by 1/√d", "warning", needs="attention calls",
    proves="Proves that the call's scale, or the norms of q and k, make logits of this size; trained models may "
    "reach such sizes.",
    cause="Scores are multiplied by 1/√d twice, or not at all, or the norms of q and k have grown.",
    fix="Multiply the scores by 1/√d exactly once.",
    what_if=("scale=sqrt", "qk_norm"), explains=("RG301", "RG302", "RG303", "RG305", "RG306"),
)  # fmt: skip
RULES = (RULE,)
LARGE, UNSURE = 8.0, 3.0  # variance of a layer with a large scale: a warning above, and a note
SMALL = 1.0 / 32.0  # both variances below
NUMBER = re.compile(r"\d+")  # of a layer, in its name
LAYERS = 3  # of a model whose scales are compared, at least
GROWN, GROWN_HEAD = 70.0, 256.0  # both variances of a layer, or of one head; sound layers reach 65, a head of MiniLM 64

SIZE = "(logit variance {range}, where 1/√d aims at 1; the norms of q and k predict it)."


def find(heads: Heads) -> list[Finding]:
    high: list = []
    unsure: list = []
    low: list = []
    small_norms: list = []
    grown: list = []
    sharp: list = []  # heads whose norms have grown, and whose logits are within what runs survive
    others = find_other_scales(heads)
    for members in group_by_layer(exclude_positional(heads)):
        if math.isnan(members[0].scale) and members[0].predicted_variance == members[0].predicted_variance:
            continue  # a learned scale, or one that the class means, as under QK-norm: the logits are judged instead
        numbers = [(head, head.statistics.mean("logit_variance")) for head in members]
        above, below = [pair for pair in numbers if pair[1] > 1.0], [pair for pair in numbers if pair[1] < 1.0]
        scale, (least, most) = known_scale(members[0]), sorted(variances(members))
        if scale > LARGE_SCALE and least > UNSURE:
            (high if least > LARGE else unsure).extend(above)
            continue
        limit = 1.0 if least > GROWN else GROWN_HEAD
        largest = max(head.statistics.max("max_logit") for head in members)
        large = [(head, x) for head, x in numbers if x > limit and not head.predicted_variance <= limit]
        (grown if largest > LOGIT_LIMIT else sharp).extend(large)
        if most < SMALL:
            (low if scale < 1.0 / LARGE_SCALE else small_norms).extend(below)
    return [
        *make_finding(
            RULE, "warning", high,
            f"Scores are {describe_factor(high)} times too large: their scale is {name_scale(high)} {SIZE}",
            f"scale > {LARGE_SCALE:g}/√d and logit variance of the layer, measured and predicted, > {LARGE:g}",
            "Check that scores are multiplied by 1/√d exactly once; try what_if=['scale=sqrt', 'qk_norm'].",
        ),
        *make_finding(
            RULE, "warning", others,
            f"The scale of these layers differs from that of the others: it is {name_scale(others)}.",
            "a scale that fewer than half of the layers of one head width have, while the others agree",
            "Check that every layer multiplies its scores by the same scale, 1/√d.",
        ),
        *make_finding(
            RULE, "note", unsure,
            f"The logit variance is {{range}}, where 1/√d aims at 1, and the call's scale is too large if nothing else "
            f"scales the queries: it is {name_scale(unsure)}.",
            f"scale > {LARGE_SCALE:g}/√d and logit variance of the layer, measured and predicted, > {UNSURE:g}",
            "Check that the queries are multiplied by 1/√d before the call. If they are, ignore this: trained models "
            "reach such variances.",
        ),
        *make_finding(
            RULE, "warning", low,
            f"Scores are too small: their scale is {name_scale(low)} {SIZE}",
            f"scale < 1/({LARGE_SCALE:g}·√d) and logit variance of the layer, measured and predicted, < 1/32",
            "Check that scores are not divided twice (1/d for 1/√d); try what_if=['scale=sqrt'].",
        ),
        *make_finding(
            RULE, "note", small_norms,
            f"Queries and keys are too small, or already scaled {SIZE}" + describe_large_scale(small_norms),
            "logit variance of the layer, measured and predicted, < 1/32; the call's scale is not small",
            "A model freshly initialised with small weights starts like this. Otherwise check that queries are not "
            "multiplied by 1/√d before a call that does so too. The finding `diffuse` names a temperature to try.",
        ),
        *make_finding(
            RULE, "warning", grown,
            f"The norms of queries and keys have grown: 1/√d is too large for them {SIZE}",
            f"logit variance of a layer, measured and predicted, > {GROWN:g}, or of one head > {GROWN_HEAD:g}, and a "
            f"logit > {LOGIT_LIMIT:g}; the scale is below {LARGE_SCALE:g}/√d",
            "Go back to a checkpoint from before the norms grew; train with warm-up, a lower rate and QK-norm from the "
            "start. On this model try what_if=['qk_norm'] or regard.qk_clip.",
            cause="The norms of queries and keys have grown, by a high learning rate or without a bound.",
            fix="Train with QK-norm, warm-up or a lower rate from a checkpoint before; regard.qk_clip bounds them now.",
            what_if=("qk_norm",),
        ),
        *make_finding(
            RULE, "note", sharp, f"The norms of queries and keys have grown {SIZE}",
            f"as above, and no logit > {LOGIT_LIMIT:g}",
            "Trained heads that look at one key are so. Watch the largest logit while training goes on.",
        ),
    ]  # fmt: skip


def describe_factor(found: list) -> str:
    """The scale of the first head found over 1/√d."""
    return f"{found[0][0].scale:.2g}" if found else ""


def describe_large_scale(found: list) -> str:
    """Names a scale above 1/√d, which small queries and keys hide until they grow; nothing for another scale."""
    large = [pair for pair in found if known_scale(pair[0]) > LARGE_SCALE]
    return f" The scale is {name_scale(large)}: too large if nothing scales the queries before." if large else ""


def known_scale(head: Head) -> float:
    """scale·√d of the call; NaN where it is learned, and under a what-if, which may have another."""
    return head.scale if head.predicted_variance == head.predicted_variance else math.nan


def find_other_scales(heads: Heads) -> list:
    """(head, scale·√d) of layers whose scale is not that of most layers of their kind, where all of those agree."""
    kinds: dict[tuple[str, int], dict[int, float]] = {}
    for head in heads:
        if (scale := known_scale(head)) == scale:
            kinds.setdefault((NUMBER.sub("#", head.layer), head.head_dim), {})[head.index] = round(scale, 3)
    others: set[int] = set()
    for scales in kinds.values():
        usual, count = Counter(scales.values()).most_common(1)[0]
        if len(scales) >= LAYERS and 2 * count > len(scales) and len(set(scales.values())) == 2:
            others |= {index for index, scale in scales.items() if scale != usual}
    return [(head, head.scale) for head in heads if head.index in others]


def name_scale(found: list) -> str:
    """The scale of the first head found, by the formula that it equals, and over 1/√d.

    >>> from types import SimpleNamespace
    >>> from regard.health.checks.scale_off import name_scale
    >>> name_scale([(SimpleNamespace(scale=8.0, head_dim=64, index=0), 70.0)])
    '1, which is 8/√d'
    """
    if not found:
        return ""
    head = found[0][0]
    d, hidden = head.head_dim, head.head_dim * sum(other.index == head.index for other, _ in found)
    value = head.scale / d**0.5
    names = {"1": 1.0, "1/d": 1 / d, "√d": d**0.5, "1/√hidden": hidden**-0.5, "d": float(d)}
    name = next((name for name, known in names.items() if abs(value / known - 1) < 0.02), None)
    times = f"{head.scale:.2g}/√d"
    return f"{name}, which is {times}" if name else times
