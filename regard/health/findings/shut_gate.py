"""Shut gate: the head's output gate is near 0 in almost every row, so the head contributes almost nothing.

Trained gates are sparse, with means around 0.1 (arXiv 2505.06708); a head that is shut everywhere is unused.
"""

from regard.health.findings._finding import Finding, Heads, make_finding
from regard.health.measurement.gates import NEAR_ZERO

KIND = "shut gate"
SHUT = 0.98


def find(heads: Heads) -> list[Finding]:
    found = [(head, head.gate_near_zero) for head in heads if head.can_be_judged and head.gate_near_zero > SHUT]
    return make_finding(
        KIND, "note", found,
        f"The output gate is below {NEAR_ZERO:g} in {{percent}} of its numbers.",
        f"share of gates below {NEAR_ZERO:g} > {SHUT} (trained gates have means around 0.1, arXiv 2505.06708)",
        "Harmless if intended. Otherwise examine other text, start the gate's bias higher, or prune the head.",
    )  # fmt: skip
