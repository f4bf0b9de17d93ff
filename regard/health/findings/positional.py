"""Positional: many heads of a layer attend sharply at one fixed distance, whatever the tokens are.

A few previous-token heads are ordinary in trained models, and useful (arXiv 1905.09418); they are not held against a
layer. From an eighth of its heads on, and from two on, they are: a shift or a short convolution would do their work.
"""

from __future__ import annotations

from regard.health.findings._finding import BAND, CROWD, SHARP, STEADY, finding, positional_heads

KIND = "positional"


def find(heads):
    found = [(head, head.statistics["distance"].quantile(0.5)) for head in positional_heads(heads)[0]]
    return finding(
        KIND,
        "note",
        found,
        "Most rows look at one distance, {range} tokens away.",
        f"mean max_weight > {SHARP} and {STEADY:.0%} of the rows within half a token or {BAND:.0%} of the median "
        f"distance, in two and {CROWD:.1%} or more of a layer's heads (a few are ordinary, arXiv 1905.09418)",
        "Keep them if the task is local; otherwise a relative position bias or a short convolution does it for less.",
    )
