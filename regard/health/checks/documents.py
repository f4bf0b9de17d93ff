"""Documents mixed: tokens of one packed document change the output of another in the same row.

Positions that start anew say where documents begin. The tokens of the first document of each row are exchanged; the
output behind it may not change.
"""

import torch
from torch import Tensor

from regard.health.capture.documents import find_starts
from regard.health.findings._finding import Finding
from regard.health.probing.probe import relative_change
from regard.health.probing.trial import SEQUENCES, NotApplicable, Trial
from regard.health.tokens.text import TokenBatch, exchange_tokens

NAME = "packed documents do not change one another"
KIND = "documents mixed"
BEHIND = 64  # tokens behind the first document


def check(trial: Trial) -> list[Finding]:
    trial.require_repeatable()
    tokens, start = find_packed(trial)
    first = torch.arange(tokens.ids.shape[1], device=start.device) < start[:, None]  # [B, N]
    before, calls = trial.probe.capture(tokens)
    after = trial.probe.run(tokens.with_ids(exchange_tokens(tokens.ids, first)))
    if before.ndim < 3 or before.shape[:2] != tokens.ids.shape:
        raise NotApplicable("the output has no row per token")
    amount = relative_change(before[~first], after[~first])
    if amount <= trial.tolerance:
        return []
    across = ~first[:, None, :, None] & first[:, None, None, :]  # later queries, keys of the first document
    same = [(key, one) for key, one in calls.items() if one.q.shape[2] == one.k.shape[2] == first.shape[1]]
    keys = [key for key, one in same if bool((one.visible & across).any())]
    return trial.find(
        KIND, "warning", keys,
        f"Other tokens in the first document of a packed row change the output behind it by {amount:.2g} of its size, "
        "although position_ids start anew there.",
        f"relative change of another document > {trial.tolerance:g}",
        "Hide other documents: in transformers with attn_implementation='regard' (or 'sdpa' with use_cache=False and "
        "no attention_mask), elsewhere with attn_mask=regard.Mask.documents(ids=…) & regard.Mask.causal(). Ignore this "
        "if documents are meant to see one another.",
    )  # fmt: skip


def find_packed(trial: Trial) -> tuple[TokenBatch, Tensor]:
    """(the begin of some packed sequences, the index [B] at which the second document of each begins)."""
    for batch in trial.batches:
        positions = batch.named.get("position_ids")
        if not isinstance(positions, Tensor) or positions.shape != batch.ids.shape or batch.has_decoder:
            continue
        starts = find_starts(positions[:SEQUENCES])
        if starts is not None and bool(starts[:, 1:].any(-1).all()):
            second = starts[:, 1:].int().argmax(-1) + 1
            return batch.cut(SEQUENCES, int(second.max()) + BEHIND), second
    raise NotApplicable("no position_ids of the batches start anew within a row")
