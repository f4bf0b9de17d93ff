"""Sees the future when weights are asked for: output_attentions takes another path, whose mask may be missing."""

from dataclasses import replace

from regard.health.checks.finding import Finding
from regard.health.checks.rule import Rule
from regard.health.probe.library import is_library_code
from regard.health.probe.trial import WEIGHTS, Trial

RULE = Rule(
    "RG105", "sees the future with output_attentions", "later tokens do not change earlier outputs with weights asked",
    "critical", needs="a model whose forward takes output_attentions",
    proves="Proves that outputs depend on later tokens with output_attentions=True, and not without.",
    cause="The path that returns weights is another one, and builds its mask otherwise or not at all.",
    fix="Build one mask for both paths.",
    explains=("RG222",),
)  # fmt: skip
RULES = (RULE,)


def check(trial: Trial) -> list[Finding]:
    trial.require_causal()
    return [soften(trial, finding) for finding in trial.find_new_leak(RULE, WEIGHTS)]


def soften(trial: Trial, finding: Finding) -> Finding:
    """A note where transformers itself is so: its users ask for weights to look at them, not to train."""
    if not is_library_code(trial.model):
        return finding
    evidence = f"{finding.evidence} This is the library's own code: do not train or evaluate with output_attentions."
    return replace(finding, severity="note", evidence=evidence)
