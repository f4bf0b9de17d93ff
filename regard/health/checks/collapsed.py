"""Collapsed: nearly every row puts nearly all its weight on one key.

A healthy sharp head still has some rows that spread, so the rule is on the 95th percentile of the entropy ratio. At 128
keys a ratio of 0.02 is about 98 % of the weight on one key. Entropy collapse: Zhai et al. 2023, arXiv 2303.06296.
"""

from regard.health.checks.finding import Finding, Heads, exclude_positional, make_finding
from regard.health.checks.rule import Rule

RULE = Rule(
    "RG302", "collapsed", "rows spread their weight", "critical", needs="attention calls",
    proves="Proves that nearly every row on this text has one key; it does not prove that training caused it.",
    cause="Entropy collapse: the logits of q and k outgrew the softmax.",
    fix="Go back to a checkpoint from before, and train with warm-up and QK-norm or a soft cap.",
    references=("arXiv 2303.06296",),
    what_if=("qk_norm", "softcap=30"),
    explains=("RG303",),
)  # fmt: skip
RULES = (RULE,)
RATIO = 0.02


def find(heads: Heads) -> list[Finding]:
    found = []
    for head in exclude_positional(heads):
        if head.statistics.mean("entropy_ratio") < RATIO + 0.05:  # necessary, and cheaper than a quantile
            high = head.statistics["entropy_ratio"].quantile(0.95)
            if high < RATIO:
                found.append((head, high))
    return make_finding(
        RULE, "critical", found,
        "Nearly every row puts all its weight on one key: the 95th percentile of the entropy ratio is {range}.",
        f"95th percentile of entropy_ratio < {RATIO} (entropy collapse, arXiv 2303.06296)",
        "If it happened in training, go back to a checkpoint from before; train with warm-up and QK-norm from the "
        "start, or with a soft cap (try what_if=['qk_norm', 'softcap=30']). Later remedies recover only a part.",
    )  # fmt: skip
