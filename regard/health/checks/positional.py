"""Positional: many heads of a layer attend sharply at one fixed distance, whatever the tokens are.

A few previous-token heads are ordinary and useful in trained models (arXiv 1905.09418). They are reported from two and
an eighth of a layer's heads on, because a shift or a short convolution could replace them.
"""

from regard.health.checks.finding import CROWD, SHARP, STEADY, Finding, Heads, make_finding, positional_heads
from regard.health.checks.rule import Rule

RULE = Rule(
    "RG307", "positional", "layers attend to more than one distance", "note", needs="attention calls",
    proves="Proves that these heads look at one distance on this text, which is useful in trained models.",
    cause="The heads learned a shift.",
    fix="Keep them if the task is local; otherwise a relative position bias or a short convolution is cheaper.",
    references=("arXiv 1905.09418",),
)  # fmt: skip
RULES = (RULE,)


def find(heads: Heads) -> list[Finding]:
    return make_finding(
        RULE, "note", [(head, head.statistics["distance"].quantile(0.5)) for head in positional_heads(heads)[0]],
        "Most rows attend to one distance, {range} tokens away.",
        f"mean max_weight > {SHARP} and {STEADY:.0%} of the rows near the median distance, in at least 2 and "
        f"{CROWD:.1%} of a layer's heads (arXiv 1905.09418)",
    )  # fmt: skip
