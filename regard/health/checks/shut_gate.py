"""Shut gate: the head's output gate is near 0 in almost every row, so the head contributes almost nothing.

Trained gates are sparse, with means around 0.1 (arXiv 2505.06708); a head that is shut everywhere is unused.
"""

from regard.health.checks.finding import Finding, Heads, make_finding
from regard.health.checks.rule import Rule
from regard.health.measure.norms import NEAR_ZERO

RULE = Rule(
    "RG309", "shut gate", "output gates open", "note", needs="attention calls of a gated layer",
    proves="Proves that the gate is shut on this text.",
    cause="The gate was trained or initialised shut.",
    fix="Examine other text, start the gate's bias higher, or prune the head.",
    references=("arXiv 2505.06708",),
)  # fmt: skip
RULES = (RULE,)
SHUT = 0.98


def find(heads: Heads) -> list[Finding]:
    found = [(head, head.gate_near_zero) for head in heads if head.can_be_judged and head.gate_near_zero > SHUT]
    return make_finding(
        RULE, "note", found,
        f"The output gate is below {NEAR_ZERO:g} in {{percent}} of its numbers.",
        f"share of gates below {NEAR_ZERO:g} > {SHUT} (trained gates have means around 0.1, arXiv 2505.06708)",
    )  # fmt: skip
