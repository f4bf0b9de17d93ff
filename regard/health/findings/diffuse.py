"""Diffuse: every row is nearly uniform, so the head averages its values and its scores decide nothing.

For Gaussian logits H ≈ ln n − σ²/2: a ratio above 0.99 at 128 keys is a standard deviation of the logits under 0.3.
A lone head of a layer that averages is often by design (it counts what came before): that is a note.
"""

from __future__ import annotations

from collections import Counter

from regard.health.findings._finding import CROWD, finding

KIND = "diffuse"
MEAN, LOW = 0.99, 0.98
TOLD = "The mean entropy is {range} of ln(keys): close to uniform on every row."
THRESHOLD = f"mean entropy_ratio > {MEAN} with 5th percentile > {LOW} (Gaussian logits: H ≈ ln n − σ²/2)"
REMEDY = (
    "If the model is trained: the scale is too small or the head is unused; try what_if=['temperature=0.5', 'ssmax'] "
    "or prune it. If it is freshly initialised, this is how it starts."
)


def find(heads):
    found, sizes = [], Counter(head.index for head in heads)
    for head in heads:
        if not head.can_be_judged:
            continue
        mean = head.statistics.mean("entropy_ratio")
        if mean > MEAN and _lowest(head) > LOW:
            found.append((head, mean))
    count = Counter(head.index for head, _ in found)
    enough = {index: min(size, max(2, size * CROWD)) for index, size in sizes.items()}
    many = [one for one in found if count[one[0].index] >= enough[one[0].index]]
    lone = [one for one in found if count[one[0].index] < enough[one[0].index]]
    return [
        *finding(KIND, "warning", many, TOLD, THRESHOLD, REMEDY),
        *finding(KIND, "note", lone, TOLD, THRESHOLD + "; alone in its layer", REMEDY),
    ]


def _lowest(head) -> float:
    """The 5th percentile, or the minimum where that is enough, which costs nothing."""
    low = head.statistics.min("entropy_ratio")
    return low if low > LOW else head.statistics["entropy_ratio"].quantile(0.05)
