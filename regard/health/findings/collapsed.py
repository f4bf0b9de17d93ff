"""Collapsed: nearly every row puts nearly all its weight on one key, whatever the input says.

The bound is on the 95th percentile of entropy / ln(keys): a healthy sharp head has rows that spread, a collapsed one
has none. The few previous-token heads of a layer are sharp by trade and are not counted (findings/positional.py). At
128 keys a ratio of 0.02 is an entropy of 0.1 nats, about 98 % of the weight on one key. The pathology: Zhai et al.
2023, arXiv 2303.06296.
"""

from __future__ import annotations

from regard.health.findings._finding import finding, free_heads

KIND = "collapsed"
RATIO = 0.02


def find(heads):
    found = []
    for head in free_heads(heads):
        if head.statistics.mean("entropy_ratio") < RATIO + 0.05:  # as it must be, and this costs nothing
            high = head.statistics["entropy_ratio"].quantile(0.95)
            if high < RATIO:
                found.append((head, high))
    return finding(
        KIND,
        "critical",
        found,
        "One key takes all: the 95th percentile of entropy / ln(keys) is {range}.",
        f"95th percentile of entropy_ratio < {RATIO} (entropy collapse, arXiv 2303.06296)",
        "Bound the logits: QK-norm, a soft cap or a higher temperature (try what_if=['qk_norm', 'softcap=30']), and a "
        "lower learning rate or weight decay on the query and key projections.",
    )
