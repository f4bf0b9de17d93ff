"""Sees the future with gradient checkpointing: a layer that is run through `checkpoint` loses its mask."""

from regard.health.checks.finding import Finding
from regard.health.checks.rule import Rule
from regard.health.probe.trial import CHECKPOINTING, Trial

RULE = Rule(
    "RG104", "sees the future with checkpointing", "later tokens do not change earlier outputs with checkpointing",
    "critical", needs="a transformers model that has gradient_checkpointing_enable()",
    proves="Proves that outputs depend on later tokens with gradient checkpointing, and not without.",
    cause="The mask is not among the arguments that checkpoint() passes on to the layer.",
    fix="Pass every argument of the layer through checkpoint(), the mask and its flags too.",
    explains=("RG221",),
)  # fmt: skip
RULES = (RULE,)


def check(trial: Trial) -> list[Finding]:
    trial.require_causal()
    return trial.find_new_leak(RULE, CHECKPOINTING)
