"""Scale off: a layer's logit variance is far from the 1 that the scale 1/√d aims at, and the softmax suffers.

Both variances of a layer count, measured and predicted from the norms of q and k (scale²·E‖q‖²·E‖k − k̄‖²/d), because
single heads may be sharp when their directions agree. Training takes healthy layers past 8, so a large variance counts
only with one of three signs: the gradient gain is gone, the norms alone explain the variance (in heads of 32 and more;
narrow ones always look so), or every layer is affected. docs/health.md has the table and the models behind it.
"""

from typing import NamedTuple

from regard.health.findings._finding import Finding, Heads, exclude_positional, make_finding
from regard.health.findings._variance import LARGE_SCALE, group_by_layer, is_from_norms, median_of, variances

KIND = "scale off"


class Limits(NamedTuple):
    """A layer is off if both variances are above `variance` and the median gain ratio is below `gain`."""

    variance: float
    gain: float


USUAL = Limits(8.0, 0.05)  # a scale of 1/√d
SUSPECT = Limits(4.0, 0.3)  # a scale above LARGE_SCALE/√d
EVERY_LAYER = Limits(16.0, 0.6)  # passed in every layer, as in no healthy model
SMALL = 1.0 / 32.0  # both variances below
UNSURE = 3.0  # both variances above, in every layer, with a large scale: a note
SINGLE_HEAD = 256.0  # both variances of one head in a layer that is in order; MiniLM has one at 64
WIDE = 32  # head width from which on norms that explain the variance are a sign

EVIDENCE = "The logit variance is {range}, where 1/√d aims at 1, and the norms of q and k predict it: "
THRESHOLD = (
    f"logit variance of a layer, measured and predicted, > {USUAL.variance:g} (> {SUSPECT.variance:g} if the scale is "
    f"> {LARGE_SCALE:g}/√d) and little gradient gain or no more than the norms explain; > {EVERY_LAYER.variance:g} in "
    f"every layer; one head > {SINGLE_HEAD:g}"
)
SMALL_THRESHOLD = "logit variance of a layer, measured and predicted, < 1/32"


def find(heads: Heads) -> list[Finding]:
    high, low, unsure, single = [], [], [], []
    layers = group_by_layer(heads)
    all_high = len(layers) > 1 and all(exceeds(members, EVERY_LAYER) for members in layers)
    all_unsure = all(has_large_scale(members) and min(variances(members)) > UNSURE for members in layers)
    for members in layers:
        numbers = [(head, head.statistics.mean("logit_variance")) for head in members]
        above = [pair for pair in numbers if pair[1] > 1.0]  # not a head on the other side of 1 than its layer
        if all_high or is_high(members):
            high += above
        elif all_unsure:
            unsure += above
        else:
            if max(variances(members)) < SMALL:
                low += [pair for pair in numbers if pair[1] < 1.0]
            if norms_tell(members):
                single += [(head, x) for head, x in numbers if min(x, head.predicted_variance) > SINGLE_HEAD]
    if single:
        judged = {id(head) for head in exclude_positional(heads)}
        high += [pair for pair in single if id(pair[0]) in judged]
    small_scale = [pair for pair in low if pair[0].scale < 1.0 / LARGE_SCALE]
    small_norms = [pair for pair in low if not pair[0].scale < 1.0 / LARGE_SCALE]
    scale = f"{unsure[0][0].scale:.2g}/√d" if unsure else ""
    return [
        *make_finding(
            KIND,
            "warning",
            high,
            EVIDENCE + "the scale is too large.",
            THRESHOLD,
            "Check that scores are multiplied by 1/√d exactly once; try what_if=['scale=sqrt', 'qk_norm', "
            "'temperature=4'].",
        ),
        *make_finding(
            KIND,
            "note",
            unsure,
            f"The logit variance is {{range}}, where 1/√d aims at 1, and the call's scale is {scale}.",
            f"scale > {LARGE_SCALE:g}/√d and both variances > {UNSURE:g} in every layer",
            "Check that the queries are multiplied by 1/√d before the call. If they are, ignore this: trained models "
            "reach such variances.",
        ),
        *make_finding(
            KIND,
            "warning",
            small_scale,
            EVIDENCE + "the scale is too small.",
            SMALL_THRESHOLD,
            "Check that scores are not divided twice (1/d for 1/√d); try what_if=['scale=sqrt', 'temperature=0.5'].",
        ),
        *make_finding(
            KIND,
            "note",
            small_norms,
            EVIDENCE + "queries and keys are too small, or already scaled.",
            f"{SMALL_THRESHOLD}; the call's scale is not small",
            "A model freshly initialised with small weights starts like this. Otherwise check that queries are not "
            "multiplied by 1/√d before a call that does so too; try what_if=['temperature=0.5'].",
        ),
    ]


def exceeds(members: Heads, limits: Limits) -> bool:
    return min(variances(members)) > limits.variance and median_of(members, "gain_ratio") < limits.gain


def is_high(members: Heads) -> bool:
    """True if a layer's variance is too large by itself, whatever the other layers have."""
    limits = SUSPECT if has_large_scale(members) else USUAL
    from_norms = norms_tell(members) and is_from_norms(members) and min(variances(members)) > limits.variance
    return from_norms or exceeds(members, limits)


def has_large_scale(members: Heads) -> bool:
    return members[0].scale > LARGE_SCALE


def norms_tell(members: Heads) -> bool:
    """True if it means something that norms explain the variance: in narrow heads they always do."""
    return members[0].head_dim >= WIDE or has_large_scale(members)
