"""Sink-dormant: the head parks its attention on the first key, or in a learned sink, and so does next to nothing.

Sinks are how trained models switch a head off (arXiv 2309.17453; "active-dormant heads", arXiv 2410.13835, where a
first-key mass near 1 marks the dormant phase). A note, not an illness: but the head's capacity is idle on this text.
"""

from __future__ import annotations

from regard.health.findings._finding import finding

KIND = "sink-dormant"
PARKED = 0.98


def find(heads):
    found = []
    for head in heads:
        if not head.can_be_judged:
            continue
        parked = max(head.statistics.mean("first_key_mass"), 1.0 - head.statistics.mean("mass"))
        if parked > PARKED:
            found.append((head, parked))
    return finding(
        KIND,
        "note",
        found,
        "On average {range} of the weight rests on the first key or in the sink.",
        f"mean first_key_mass, or mean weight left to a sink, > {PARKED} (active-dormant heads, arXiv 2410.13835)",
        "Harmless where it is meant; otherwise give the head a way to do nothing (what_if=['normalizer=softmax1']), "
        "examine on other text, or prune it.",
    )
