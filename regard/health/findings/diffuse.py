"""Diffuse: every row is nearly uniform, so the head averages its values and its scores decide nothing.

For Gaussian logits H ≈ ln n − σ²/2: a ratio above 0.99 at 128 keys is a standard deviation of the logits under 0.3.
"""

from __future__ import annotations

from regard.health.findings._finding import finding

KIND = "diffuse"
MEAN, LOW = 0.99, 0.98


def find(heads):
    found = []
    for head in heads:
        if not head.can_be_judged:
            continue
        mean, low = head.statistics.mean("entropy_ratio"), head.statistics.min("entropy_ratio")
        if mean > MEAN and (low > LOW or head.statistics["entropy_ratio"].quantile(0.05) > LOW):
            found.append((head, mean))
    return finding(
        KIND,
        "warning",
        found,
        "The mean entropy is {range} of ln(keys): close to uniform on every row.",
        f"mean entropy_ratio > {MEAN} with 5th percentile > {LOW} (Gaussian logits: H ≈ ln n − σ²/2)",
        "If the model is trained: the scale is too small or the head is unused; try what_if=['temperature=0.5', "
        "'ssmax'] or prune it. If it is freshly initialised, this is how it starts.",
    )
