"""Sees the future in training mode: a branch on self.training loses the mask, and the loss falls too low."""

from regard.health.checks.finding import Finding
from regard.health.checks.rule import Rule
from regard.health.probe.trial import TRAINING, Trial

RULE = Rule(
    "RG103", "sees the future in training", "later tokens do not change earlier outputs in training mode",
    "critical", needs="token ids, and a model that hides later tokens in evaluation",
    proves="Proves that outputs depend on later tokens in training mode, with every dropout at 0, and not in "
    "evaluation. Randomness other than dropout keeps the check from being made.",
    cause="The branch for training calls another kernel or drops the mask.",
    fix="Give the attention call of the training branch the same mask or is_causal=True as in evaluation.",
    explains=("RG104", "RG220", "RG221"),
)  # fmt: skip
RULES = (RULE,)


def check(trial: Trial) -> list[Finding]:
    trial.require_causal()
    return trial.find_new_leak(RULE, TRAINING)
