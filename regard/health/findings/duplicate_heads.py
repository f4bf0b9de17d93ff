"""Duplicate heads: two heads of a layer with the same distribution on row after row.

Rows are told by entropy ratio, sharpness, logit variance and distance; heads are twins if on each of the four

    Σ (f_g − f_h)² < 0.005 · mean of Σ (f − f̄)²  over the rows,

0 for copies and about 2 for strangers; 0.005 leaves 0.25 % of unshared variance, a correlation above 0.997. Heads in
one layer of trained models are often prunable (arXiv 1905.10650), but seldom equal row by row. Heads whose logits do
not vary are not compared: uniform rows are alike whoever makes them, and *diffuse* tells of them. Nor are those whose
logits vary by more than their queries and keys can make them: a bias that the heads share (the −100 of Swin's windows)
makes them alike.
"""

from __future__ import annotations

from regard.health.findings._finding import finding
from regard.health.findings._variance import by_bias
from regard.health.readings.heads import TWINS

KIND = "duplicate heads"
UNIFORM = 1e-8  # of the mean logit variance: below it strangers come out as twins


def find(heads):
    found = [
        (head, len(head.twins))
        for head in heads
        if head.twins
        and head.can_be_judged
        and head.statistics.mean("logit_variance") > UNIFORM
        and not by_bias([head])
    ]
    pairs = sorted({(head.index, *sorted((head.head, twin))) for head, _ in found for twin in head.twins})
    shown = ", ".join(f"layer {index} heads {a} and {b}" for index, a, b in pairs[:4]) + (
        ", …" if len(pairs) > 4 else ""
    )
    return finding(
        KIND,
        "warning",
        found,
        f"The same distribution row by row: {shown}.",
        f"squared difference < {TWINS:g} of the rows' own variation, in entropy ratio, sharpness, logit variance and "
        "distance",
        "Remove one of each pair, or break the symmetry: check that heads were not initialised or tied alike.",
    )
