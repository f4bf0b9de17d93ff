"""Diffuse: every row is nearly uniform, so the head averages its values and its scores have no effect.

For Gaussian logits H ≈ ln n − σ²/2: an entropy ratio above 0.99 at 128 keys is a logit standard deviation under 0.3.
It is a note, because heads of sound models average too: by design, and whole layers early in training. It is a warning
where every row has equal logits, which no head has by design. The note says if the whole model looks untrained: in
every layer the variance is below 2 and the scale not small, and in half of them the norms of q and k explain it.
"""

from regard.health.checks.finding import (
    LARGE_SCALE,
    Finding,
    Head,
    Heads,
    group_by_layer,
    is_from_bias,
    is_from_norms,
    make_finding,
    median_of,
)  # fmt: skip
from regard.health.checks.rule import Rule

RULE = Rule(
    "RG306", "diffuse", "rows are not uniform", "warning", needs="attention calls",
    proves="Proves that the head averages its values on this text; heads of sound models do so too, by design "
    "or early in training.",
    cause="The scale is too small, the head is unused, or the model is not trained.",
    fix="Try the temperature that brings the logit variance to 1, or prune the head.",
)  # fmt: skip
RULES = (RULE,)
MEAN, LOW = 0.99, 0.98
CONSTANT = 1e-9  # logit variance below which all logits of a row are equal up to rounding
BEHIND = 0.25  # head's over layer's variance, below which the layer does not excuse the head
UNTRAINED_VARIANCE, UNTRAINED_RATIO = 2.0, 1.25  # logit variance, and its ratio to the one predicted from norms
EVIDENCE = "Rows are close to uniform: the mean entropy ratio is {range}."
THRESHOLD = f"mean entropy_ratio > {MEAN} and 5th percentile > {LOW}"
REMEDY = (
    "In a trained model the scale is too small or the head is unused: try what_if=['{}'], which brings the "
    "logit variance to 1, or prune it. A freshly initialised model starts like this."
)


def find(heads: Heads) -> list[Finding]:
    found = [(head, head.statistics.mean("entropy_ratio")) for head in heads if is_diffuse(head)]
    fresh = {id(head) for head in untrained_heads(heads)} if found else set()
    untrained = [pair for pair in found if id(pair[0]) in fresh]
    others = [pair for pair in found if id(pair[0]) not in fresh and not has_constant_logits(pair[0])]
    return [
        *find_warnings(heads),
        *make_diffuse("note", others, THRESHOLD),
        *make_diffuse("note", untrained, f"{THRESHOLD}; the model looks untrained"),
    ]


def find_warnings(heads: Heads) -> list[Finding]:
    """What `find` returns without its notes."""
    constant = [
        (head, head.statistics.mean("entropy_ratio"))
        for head in heads
        if has_constant_logits(head) and is_diffuse(head)
    ]
    return make_diffuse("warning", constant, f"logit_variance < {CONSTANT:g} in every row")


def make_diffuse(severity: str, found: list[tuple[Head, float]], threshold: str) -> list[Finding]:
    """The finding, with the temperature that brings the median logit variance of these heads to 1, 0.01 at least."""
    heads = [head for head, _ in found]
    change = f"temperature={max(median_of(heads, 'logit_variance') ** 0.5, 0.01) if heads else 0.5:.2g}"
    return make_finding(RULE, severity, found, EVIDENCE, threshold, REMEDY.format(change), what_if=(change,))


def is_diffuse(head: Head) -> bool:
    if not head.can_be_judged or head.statistics.mean("entropy_ratio") <= MEAN:
        return False
    return head.statistics.min("entropy_ratio") > LOW or head.statistics["entropy_ratio"].quantile(0.05) > LOW


def untrained_heads(heads: Heads) -> list[Head]:
    """The heads of a model that looks untrained, except those with far less variance than their layer."""
    layers = [members for members in group_by_layer(heads) if not is_from_bias(members)]  # Swin adds −100 to hide keys
    measured = [median_of(members, "logit_variance") for members in layers]
    for members, variance in zip(layers, measured, strict=True):
        if members[0].scale < 1.0 / LARGE_SCALE or not 0.0 < variance < UNTRAINED_VARIANCE:
            return []
    if 2 * sum(not is_from_norms(members, UNTRAINED_RATIO) for members in layers) > len(layers):
        return []
    return [
        head
        for members, variance in zip(layers, measured, strict=True)
        for head in members
        if head.statistics.mean("logit_variance") > BEHIND * variance
    ]


def has_constant_logits(head: Head) -> bool:
    """True if all logits of a row are equal, in every row: queries of zero or equal keys, never by design."""
    return head.statistics.max("logit_variance") < CONSTANT
