"""Keys that masks show and hide: a query's own, those of the batch's own mask, and each token of the text."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, NothingToCheck, Rule
from regard.health.probe.probe import CapturedCall
from regard.health.probe.trial import Trial
from regard.health.tokens.text import TokenBatch

OWN = Rule(
    "RG732", "own key hidden", "a query of a causal layer sees its own key", "warning",
    "token ids and causal attention calls",
    "every query sees the key before it and none sees its own; XLNet's second stream and a few more are made "
    "so",
    "The causal mask hides the diagonal: triu(0) for triu(1), or i <= j for i < j.",
    "Hide keys with j > i alone: torch.ones(n, n, dtype=torch.bool).triu(1).",
    explains=("RG24", "RG501", "RG8"),
)  # fmt: skip


def check_own(trial: Trial, rule: Rule) -> list:
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
    return trial.find(rule, "warning", hidden, text, "the diagonal hidden, the one below it visible")


def hides_own_key(visible: torch.Tensor) -> bool:
    """True if, from the second query on, the diagonal of a mask [..., N, N] is hidden and that below it is not."""
    if visible.shape[-1] != visible.shape[-2]:
        return False
    own, before = visible.diagonal(0, -2, -1)[..., 1:], visible.diagonal(-1, -2, -1)
    return not bool(own.any()) and bool(before.any(-1).all())


HIDES = -1e3  # an additive entry at or below it hides
GIVEN = Rule(
    "RG430", "given mask is ignored", "layers hide what the batch's own mask hides", "critical",
    "a mask [B, 1, N, N] in the batch",
    "a layer shows keys that the batch's mask hides, whether its True means visible or hidden",
    "The mask was replaced by one that the model makes itself, or lost by a kernel that takes none.",
    "Pass the mask on to every attention call, or use an implementation that takes it.",
    ("transformers#35896",), explains=("RG102", "RG111", "RG202"),
)  # fmt: skip


def check_given(trial: Trial, rule: Rule) -> list:
    length = trial.tokens.targets.shape[1]
    masks = {
        name: x
        for name, x in trial.tokens.named.items()
        if "mask" in name and isinstance(x, Tensor) and x.ndim == 4 and x.shape[-2:] == (length, length)
    }
    if not masks:
        raise NothingToCheck("the batch holds no mask [B, 1, N, N]")
    name, given = next(iter(masks.items()))
    calls = {
        key: one
        for key, one in trial.captured[1].items()
        if one.q.shape[2] == one.k.shape[2] == length and not one.call.is_cross(key[0])
    }
    shown = {key: min(count_shown(one.visible, hidden) for hidden in readings_of(given)) for key, one in calls.items()}
    wrong = [key for key, share in shown.items() if share > 0]
    if not wrong:
        return []
    text = f"{len(wrong)} of {len(calls)} layers (first {wrong[0][0]}) show {shown[wrong[0]]:.0%} of the keys"
    return trial.find(rule, "critical", wrong, f"{text} that {name} hides.", "any key shown that the mask hides")


def readings_of(mask: Tensor) -> list[Tensor]:
    """What a mask hides, by each meaning that it may have."""
    if mask.is_floating_point() and bool((mask <= HIDES).any()):
        return [mask <= HIDES]
    return [mask == 0, mask != 0]


def count_shown(visible: Tensor, hidden: Tensor) -> float:
    """The share of the hidden entries that are visible."""
    shape = torch.broadcast_shapes(visible.shape, hidden.shape)
    both = visible.expand(shape) & hidden.expand(shape)
    return float(both.sum()) / max(float(hidden.expand(shape).sum()), 1.0)


TEXT = Rule(
    "RG117", "text is hidden as padding", "no token inside the text is hidden", "warning",
    needs="token ids and attention calls with a mask",
    proves="Proves that no other query sees a token, wherever it stands in the text, and that no mask of the batch "
    "hides it.",
    cause="The padding mask is made with the pad id of another text or vocabulary, which is an ordinary token here.",
    fix="Make each text's padding mask with that text's own pad id, or from its lengths.",
    references=("hyunwoongko/transformer#11",), explains=("RG8",),
)  # fmt: skip


def check_text(trial: Trial, rule: Rule) -> list[Finding]:
    """A key inside the text that no other query sees is a candidate; put elsewhere it must be hidden there too."""
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
                    text = f"Token {token} is hidden from every other query wherever it stands, as padding is."
                    return trial.find(rule, "warning", [one.key], text, "a key inside the text that nobody else sees")
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


WAYS = ((OWN, check_own), (GIVEN, check_given), (TEXT, check_text))
RULES = tuple(rule for rule, _ in WAYS)


def check(trial: Trial) -> list[Finding]:
    return trial.ask_each(WAYS)
