"""A token of the text is hidden wherever it stands, as padding is: the mask is made with the pad id of another text.

A key inside the text that no other query sees gives a candidate; the same token put elsewhere must be hidden there too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.probe import CapturedCall
from regard.health.probe.trial import Trial
from regard.health.tokens.text import TokenBatch

RULE = Rule(
    "RG117", "text is hidden as padding", "no token inside the text is hidden", "warning",
    needs="token ids and attention calls with a mask",
    proves="Proves that no other query sees a token, wherever it stands in the text, and that no mask of the batch "
    "hides it.",
    cause="The padding mask is made with the pad id of another text or vocabulary, which is an ordinary token here.",
    fix="Make each text's padding mask with that text's own pad id, or from its lengths.",
    references=("hyunwoongko/transformer#11",), explains=("RG8",),
)  # fmt: skip
RULES = (RULE,)


def check(trial: Trial) -> list[Finding]:
    calls = [
        one for one in trial.captured[1].values() if one.call.mask is not None and one.q.shape[2] == one.k.shape[2]
    ]
    if not trial.batches or not calls:
        raise NotApplicable("no attention call with a mask was captured")
    for is_decoder in (False, True)[: 1 + trial.tokens.has_decoder]:
        ids = trial.tokens.targets if is_decoder else trial.tokens.ids
        given = trial.tokens.given_mask(ids) if ids is trial.tokens.targets else None
        for one in calls:
            if (one.q.shape[0], one.k.shape[2]) != tuple(ids.shape) or one.call.is_cross(one.key[0]):
                continue
            hidden = find_hidden(one) if given is None else find_hidden(one) & given
            for token in ids[hidden].unique().tolist()[:2]:
                if token != trial.pad and is_hidden_elsewhere(trial, one, token, is_decoder, hidden):
                    text = (
                        f"Token {token} is hidden from every other query wherever it stands in the text, as padding is."
                    )
                    return trial.find(
                        RULE, "warning", [one.key], text, "a key inside the text that no other query sees"
                    )
    return []


def find_hidden(one: CapturedCall) -> Tensor:
    """True at keys [B, N] that no other query sees, with keys before and behind them that some do."""
    length = one.k.shape[2]
    own = torch.eye(length, dtype=torch.bool, device=one.q.device)
    seen = (one.visible.expand(*one.q.shape[:3], length) & ~own).any(1).any(1)
    before, behind = seen.long().cumsum(1) > 0, seen.flip(1).long().cumsum(1).flip(1) > 0
    return ~seen & before & behind


def is_hidden_elsewhere(trial: Trial, one: CapturedCall, token: int, is_decoder: bool, hidden: Tensor) -> bool:
    """True if the token is hidden in the place of the first two visible ones inside the text as well."""
    batch: TokenBatch = trial.tokens
    ids = (batch.targets if is_decoder else batch.ids).clone()
    places = [(row, at) for row, at in (~hidden[:, 2:-2]).nonzero().tolist() if int(ids[row, at + 2]) != token][:2]
    for row, at in places:
        ids[row, at + 2] = token
    other = trial.probe.capture(batch.with_targets(ids) if is_decoder else batch.with_ids(ids))[1].get(one.key)
    if other is None or other.k.shape != one.k.shape or not places:
        return False
    return all(bool(find_hidden(other)[row, at + 2]) for row, at in places)
