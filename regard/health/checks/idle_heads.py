"""Heads that could go: at one fixed distance, on the sink alone, or behind a gate that is shut.

A few previous-token heads are ordinary and useful in trained models (arXiv 1905.09418). They are reported from two
and an eighth of a layer's heads on, because a shift or a short convolution could replace them. Trained models switch
heads off this way: attention sinks, arXiv 2309.17453; active-dormant heads, arXiv 2410.13835. Trained gates are
sparse, with means around 0.1 (arXiv 2505.06708); a head that is shut everywhere is unused.
"""

from regard.health.checks.finding import CROWD, SHARP, STEADY, Finding, Heads, make_finding, positional_heads
from regard.health.checks.rule import Rule
from regard.health.measure.norms import NEAR_ZERO

POSITIONAL = Rule(
    "RG307", "positional", "layers attend to more than one distance", "note", needs="attention calls",
    proves="Proves that these heads look at one distance on this text, which is useful in trained models.",
    cause="The heads learned a shift.",
    fix="Keep them if the task is local; otherwise a relative position bias or a short convolution is cheaper.",
    references=("arXiv 1905.09418",),
)  # fmt: skip


def find_positional(heads: Heads) -> list[Finding]:
    return make_finding(
        POSITIONAL, "note", [(head, head.statistics["distance"].quantile(0.5)) for head in positional_heads(heads)[0]],
        "Most rows attend to one distance, {range} tokens away.",
        f"mean max_weight > {SHARP} and {STEADY:.0%} of the rows near the median distance, in at least 2 and "
        f"{CROWD:.1%} of a layer's heads (arXiv 1905.09418)",
    )  # fmt: skip


DORMANT = Rule(
    "RG308", "sink-dormant", "heads put weight on more than the sink", "note", needs="attention calls",
    proves="Proves that the weight lies on the first key or a learned sink on this text; trained models switch "
    "heads off this way.",
    cause="The head has nothing to say about this text.",
    fix="Let the head attend to nothing (normalizer=softmax1), examine other text, or prune it.",
    references=("arXiv 2309.17453", "arXiv 2410.13835"),
    what_if=("normalizer=softmax1",),
)  # fmt: skip
SINK_MASS = 0.98


def find_dormant(heads: Heads) -> list[Finding]:
    judged = [(head, head.statistics) for head in heads if head.can_be_judged]
    masses = ((head, max(x.mean("first_key_mass"), 1.0 - x.mean("mass"))) for head, x in judged)
    return make_finding(
        DORMANT, "note", [(head, mass) for head, mass in masses if mass > SINK_MASS],
        "On average {percent} of the weight is on the first key or a learned sink.",
        f"mean first_key_mass, or mean weight left to a sink, > {SINK_MASS} (arXiv 2410.13835)",
    )  # fmt: skip


GATED = Rule(
    "RG309", "shut gate", "output gates open", "note", needs="attention calls of a gated layer",
    proves="Proves that the gate is shut on this text.",
    cause="The gate was trained or initialised shut.",
    fix="Examine other text, start the gate's bias higher, or prune the head.",
    references=("arXiv 2505.06708",),
)  # fmt: skip
SHUT = 0.98


def find_shut(heads: Heads) -> list[Finding]:
    found = [(head, head.gate_near_zero) for head in heads if head.can_be_judged and head.gate_near_zero > SHUT]
    return make_finding(
        GATED, "note", found,
        f"The output gate is below {NEAR_ZERO:g} in {{percent}} of its numbers.",
        f"share of gates below {NEAR_ZERO:g} > {SHUT} (trained gates have means around 0.1, arXiv 2505.06708)",
    )  # fmt: skip


RULES = (POSITIONAL, DORMANT, GATED)


def find(heads: Heads) -> list[Finding]:
    return [*find_positional(heads), *find_dormant(heads), *find_shut(heads)]
