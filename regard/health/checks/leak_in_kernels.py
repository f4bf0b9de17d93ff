"""Sees the future under another attention implementation that the model has."""

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, NothingToCheck, Rule
from regard.health.probe.modes import implementations_of
from regard.health.probe.trial import Trial

RULE = Rule(
    "RG107", "sees the future in another kernel", "later tokens do not change earlier outputs in any implementation",
    "critical", needs="a transformers model with several attention implementations",
    proves="Proves that outputs depend on later tokens under one attn_implementation, and not under the model's own.",
    cause="A function that is registered without its mask function receives attention_mask=None.",
    fix="Register a mask function of the same name with AttentionMaskInterface, or let the function build its mask.",
    explains=("RG230",),
)  # fmt: skip
RULES = (RULE,)


def check(trial: Trial) -> list[Finding]:
    trial.require_causal()
    reasons = []
    names = implementations_of(trial.model)
    for name in names:
        try:
            if found := trial.find_new_leak(RULE, name):
                return found
        except NotApplicable as reason:
            reasons.append(str(reason))
    if len(reasons) == len(names):
        if reasons:
            raise NotApplicable(reasons[0])
        raise NothingToCheck("the model has one attention implementation")
    return []
