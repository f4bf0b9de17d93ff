"""Own key hidden: a query sees the keys before it and not its own, as triu(0) for triu(1) leaves it."""

from __future__ import annotations

import torch

from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.trial import Trial

RULES = (
    Rule(
        "RG732", "own key hidden", "a query of a causal layer sees its own key", "warning",
        "token ids and causal attention calls",
        "every query sees the key before it and none sees its own; XLNet's second stream and a few more are made "
        "so",
        "The causal mask hides the diagonal: triu(0) for triu(1), or i <= j for i < j.",
        "Hide keys with j > i alone: torch.ones(n, n, dtype=torch.bool).triu(1).",
        explains=("RG24", "RG501", "RG8"),
    ),
)  # fmt: skip


def check(trial: Trial) -> list:
    calls = {
        key: one
        for key, one in trial.captured[1].items()
        if one.q.shape[2] == one.k.shape[2] >= 4 and trial.is_causal_call(one)
    }
    if not calls:
        raise NotApplicable("no causal attention call was captured")
    hidden = [key for key, one in calls.items() if hides_own_key(one.visible)]
    if not hidden:
        return []
    text = f"No query but the first sees its own key, in {len(hidden)} of {len(calls)} layers (first {hidden[0][0]})."
    return trial.find(RULES[0], "warning", hidden, text, "the diagonal hidden, the one below it visible")


def hides_own_key(visible: torch.Tensor) -> bool:
    """True if, from the second query on, the diagonal of a mask [..., N, N] is hidden and that below it is not."""
    if visible.shape[-1] != visible.shape[-2]:
        return False
    own, before = visible.diagonal(0, -2, -1)[..., 1:], visible.diagonal(-1, -2, -1)
    return not bool(own.any()) and bool(before.any(-1).all())
