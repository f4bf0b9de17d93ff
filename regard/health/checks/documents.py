"""Documents mixed: tokens of one packed document change the output of another in the same row.

Positions that start anew say where documents begin. The tokens of the first document of each row are exchanged; the
output behind it may not change.
"""

import torch
from torch import Tensor

from regard._call.mask.documents import find_starts
from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, NothingToCheck, Rule
from regard.health.probe.probe import relative_change
from regard.health.probe.texts import LENGTHS, find_documents
from regard.health.probe.trial import SEQUENCES, Trial
from regard.health.tokens.text import TokenBatch

RULE = Rule(
    "RG102", "documents mixed", "packed documents do not change one another",
    "warning", needs="batches whose position_ids start anew within a row",
    proves="Proves that a packed document's outputs depend on another document; it cannot tell whether that is meant.",
    cause="The kernel in use, or the mask that the library made, ignores where documents begin.",
    fix="Hide other documents: in transformers use_cache=False without an attention_mask, or "
    "attn_implementation='regard'; elsewhere attn_mask=regard.Mask.documents(ids=…) & regard.Mask.causal().",
    explains=("RG221",),
)  # fmt: skip
RULES = (RULE,)
BEHIND = 64  # tokens behind the first document


def check(trial: Trial) -> list[Finding]:
    trial.require_repeatable()
    tokens, start, why = find_packed(trial)
    first = torch.arange(tokens.ids.shape[1], device=start.device) < start[:, None]  # [B, N]
    before, calls = trial.probe.capture(tokens)
    after = trial.probe.run(tokens.with_ids(tokens.exchange(tokens.ids, first)))
    if before.ndim < 3 or before.shape[:2] != tokens.ids.shape:
        raise NotApplicable("the output has no row per token")
    amount = relative_change(before[~first], after[~first])
    if amount <= trial.tolerance:
        return []
    across = ~first[:, None, :, None] & first[:, None, None, :]  # later queries, keys of the first document
    same = [(key, one) for key, one in calls.items() if one.q.shape[2] == one.k.shape[2] == first.shape[1]]
    keys = [key for key, one in same if bool((one.visible & across).any())]
    return trial.find(
        RULE, "warning", keys,
        f"Other tokens in the first document of a packed row change the output behind it by {amount:.2g} of its size, "
        f"although {why} there.",
        f"relative change of another document > {trial.tolerance:g}",
        f"{RULE.fix} Ignore this if documents are meant to see one another.",
    )  # fmt: skip


def find_packed(trial: Trial) -> tuple[TokenBatch, Tensor, str]:
    """(the begin of some packed sequences, the index [B] at which the second document begins, what says so)."""
    for batch in trial.batches:
        if batch.has_decoder:
            continue
        positions = batch.named.get("position_ids")
        if isinstance(positions, Tensor) and positions.shape == batch.ids.shape:
            starts = find_starts(positions[:SEQUENCES])
            if starts is not None and bool(starts[:, 1:].any(-1).all()):
                return *_begin(batch, starts), "position_ids start anew"
        known = find_documents(batch)
        if known is not None and bool(known[0][:SEQUENCES, 1:].any(-1).all()):
            if known[1] in LENGTHS:
                return batch, known[0][:, 1:].int().argmax(-1) + 1, f"{known[1]} ends one"
            return *_begin(batch, known[0][:SEQUENCES]), f"{known[1]} begins another"
    raise NothingToCheck("nothing in the batches (position_ids, segment ids, masks) tells of several documents")


def _begin(batch: TokenBatch, starts: Tensor) -> tuple[TokenBatch, Tensor]:
    second = starts[:, 1:].int().argmax(-1) + 1
    return batch.cut(SEQUENCES, int(second.max()) + BEHIND), second
