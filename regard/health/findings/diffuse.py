"""Diffuse: every row is nearly uniform, so the head averages its values and its scores decide nothing.

For Gaussian logits H ≈ ln n − σ²/2: a ratio above 0.99 at 128 keys is a standard deviation of the logits under 0.3.
A lone head of a layer that averages is often by design (it counts what came before): that is a note, unless its logits
are all the same to the last digit. So it is in a model that has learned nothing yet: in no layer is the scale small or
the variance of the logits 2 and more, and in half of the layers at least it is what the norms of q and k alone predict,
where those of a trained model know of each other. Layers whose variance is a bias's, added to the scores, say nothing
about that. A head whose variance is far below its layer's is not excused.
"""

from __future__ import annotations

from collections import Counter

from regard.health.findings._finding import CROWD, finding
from regard.health.findings._variance import LARGE, by_bias, by_layer, by_norms, variances

KIND = "diffuse"
MEAN, LOW = 0.99, 0.98
NOTHING = 1e-9  # of a logit variance: what rounding leaves
BEHIND = 0.25  # of its layer's variance
BEGUN, LEARNED = 2.0, 1.25  # logit variance, and that over what norms predict: beyond these, some training was had
TOLD = "The mean entropy is {range} of ln(keys): close to uniform on every row."
THRESHOLD = f"mean entropy_ratio > {MEAN} with 5th percentile > {LOW} (Gaussian logits: H ≈ ln n − σ²/2)"
REMEDY = (
    "If the model is trained: the scale is too small or the head is unused; try what_if=['temperature=0.5', 'ssmax'] "
    "or prune it. If it is freshly initialised, this is how it starts."
)
BEGINS = THRESHOLD + "; in few layers do queries and keys know of each other: the model is as it was initialised"


def find(heads):
    found, sizes = [], Counter(head.index for head in heads)
    for head in heads:
        if not head.can_be_judged:
            continue
        mean = head.statistics.mean("entropy_ratio")
        if mean > MEAN and _lowest(head) > LOW:
            found.append((head, mean))
    begins = {id(head) for head in beginners(heads)} if found else set()
    first = [one for one in found if id(one[0]) in begins]
    found = [one for one in found if id(one[0]) not in begins]
    count = Counter(head.index for head, _ in found)
    enough = {index: min(size, max(2, size * CROWD)) for index, size in sizes.items()}
    many = [one for one in found if count[one[0].index] >= enough[one[0].index] or says_nothing(one[0])]
    told = {id(head) for head, _ in many}
    lone = [one for one in found if id(one[0]) not in told]
    return [
        *finding(KIND, "warning", many, TOLD, THRESHOLD, REMEDY),
        *finding(KIND, "note", lone, TOLD, THRESHOLD + "; alone in its layer", REMEDY),
        *finding(KIND, "note", first, TOLD, BEGINS, REMEDY),
    ]


def beginners(heads) -> list:
    """The heads of a model that has learned nothing yet, but for those that fall far behind their layer."""
    layers = [members for members in by_layer(heads) if not by_bias(members)]  # Swin's windows add −100 to hide keys
    measured = [variances(members)[0] for members in layers]
    for members, variance in zip(layers, measured, strict=True):
        if members[0].scale < 1.0 / LARGE or not 0.0 < variance < BEGUN:
            return []
    if 2 * sum(not by_norms(members, LEARNED) for members in layers) > len(layers):
        return []
    return [
        head
        for members, variance in zip(layers, measured, strict=True)
        for head in members
        if head.statistics.mean("logit_variance") > BEHIND * variance
    ]


def says_nothing(head) -> bool:
    """Are the logits of every row all the same? Nobody designs that: its queries are zero, or its keys are equal."""
    return head.statistics.max("logit_variance") < NOTHING


def _lowest(head) -> float:
    """The 5th percentile, or the minimum where that is enough, which costs nothing."""
    low = head.statistics.min("entropy_ratio")
    return low if low > LOW else head.statistics["entropy_ratio"].quantile(0.05)
