"""Positional: the head attends sharply at one fixed distance on nearly every row, whatever the tokens are.

Previous-token heads are ordinary in trained models and often useful; this one never deviates, so a shift or a
convolution would do its work. The bound is on the spread of the distance: 90 % of rows within half a token.
"""

from __future__ import annotations

from regard.health.findings._finding import can_be_judged, finding

KIND = "positional"
WIDTH = 0.5  # tokens between the 5th and the 95th percentile
SHARP = 0.9


def find(heads):
    found = []
    for head in filter(can_be_judged, heads):
        distance, top = head.statistics["distance"], head.statistics["max_weight"]
        width = distance.quantile(0.95) - distance.quantile(0.05)
        if top.mean > SHARP and width < max(WIDTH, 0.05 * distance.quantile(0.5)):
            found.append((head, distance.quantile(0.5)))
    return finding(
        KIND,
        "note",
        found,
        "90 % of the rows look {low} to {high} tokens away, within half a token.",
        f"mean max_weight > {SHARP} and 5th to 95th percentile of distance within {WIDTH} tokens or 5 %",
        "Keep it if the task is local; if many heads do the same, a relative position bias or a short convolution is cheaper.",
    )
