"""Encoder ignored: another text for the encoder leaves the decoder's output as it is."""

import torch

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NothingToCheck, Rule
from regard.health.probe.probe import relative_change
from regard.health.probe.trial import Trial
from regard.health.tokens.text import exchange_tokens

RULE = Rule(
    "RG801", "encoder ignored", "the decoder depends on the encoder's text",
    "critical", needs="token ids of an encoder and a decoder",
    proves="Proves that another text for the encoder does not change the decoder's output.",
    cause="Cross-attention takes keys and values from the decoder, or the encoder's output is masked away.",
    fix="Give cross-attention the encoder's output as keys and values.",
)  # fmt: skip
RULES = (RULE,)
LEAST = 1e-4  # relative change of the output


def check(trial: Trial) -> list[Finding]:
    tokens = trial.tokens
    if not tokens.has_decoder:
        raise NothingToCheck("the model has no decoder that reads an encoder")
    trial.require_repeatable()
    everywhere = torch.ones_like(tokens.ids, dtype=torch.bool)
    changed = trial.probe.run(tokens.with_ids(exchange_tokens(tokens.ids, everywhere)))
    amount = relative_change(trial.captured[0], changed)
    if amount > LEAST:
        return []
    cross = [key for key, one in trial.captured[1].items() if one.call.is_cross(key[0])]
    return trial.find(
        RULE, "critical", cross,
        f"Another text for the encoder changes the decoder's output by {amount:.2g} of its size: it does not read it.",
        f"relative change < {LEAST:g}",
        "Check that cross-attention takes keys and values from the encoder's output (not from the decoder), that this "
        "output is not 0 or masked away, and that the cross-attention weights were loaded.",
    )  # fmt: skip
