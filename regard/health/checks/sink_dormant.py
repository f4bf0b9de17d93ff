"""Sink-dormant: the head puts its weight on the first key or a learned sink, and so contributes almost nothing.

Trained models switch heads off this way: attention sinks, arXiv 2309.17453; active-dormant heads, arXiv 2410.13835.
"""

from regard.health.checks.finding import Finding, Heads, make_finding
from regard.health.checks.rule import Rule

RULE = Rule(
    "RG308", "sink-dormant", "heads put weight on more than the sink", "note", needs="attention calls",
    proves="Proves that the weight lies on the first key or a learned sink on this text; trained models switch "
    "heads off this way.",
    cause="The head has nothing to say about this text.",
    fix="Let the head attend to nothing (normalizer=softmax1), examine other text, or prune it.",
    references=("arXiv 2309.17453", "arXiv 2410.13835"),
    what_if=("normalizer=softmax1",),
)  # fmt: skip
RULES = (RULE,)
SINK_MASS = 0.98


def find(heads: Heads) -> list[Finding]:
    judged = [(head, head.statistics) for head in heads if head.can_be_judged]
    masses = ((head, max(x.mean("first_key_mass"), 1.0 - x.mean("mass"))) for head, x in judged)
    return make_finding(
        RULE, "note", [(head, mass) for head, mass in masses if mass > SINK_MASS],
        "On average {percent} of the weight is on the first key or a learned sink.",
        f"mean first_key_mass, or mean weight left to a sink, > {SINK_MASS} (arXiv 2410.13835)",
    )  # fmt: skip
