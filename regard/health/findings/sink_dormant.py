"""Sink-dormant: the head puts its weight on the first key or a learned sink, and so contributes almost nothing.

Trained models switch heads off this way: attention sinks, arXiv 2309.17453; active-dormant heads, arXiv 2410.13835.
"""

from regard.health.findings._finding import Finding, Heads, make_finding

KIND = "sink-dormant"
SINK_MASS = 0.98


def find(heads: Heads) -> list[Finding]:
    judged = [(head, head.statistics) for head in heads if head.can_be_judged]
    masses = ((head, max(x.mean("first_key_mass"), 1.0 - x.mean("mass"))) for head, x in judged)
    return make_finding(
        KIND, "note", [(head, mass) for head, mass in masses if mass > SINK_MASS],
        "On average {percent} of the weight is on the first key or a learned sink.",
        f"mean first_key_mass, or mean weight left to a sink, > {SINK_MASS} (arXiv 2410.13835)",
        "Harmless if intended. Otherwise let the head attend to nothing (what_if=['normalizer=softmax1']), examine "
        "other text, or prune it.",
    )  # fmt: skip
