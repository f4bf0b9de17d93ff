"""Documents mixed: tokens of one packed document change the output of another in the same row.

Positions that start anew say where documents begin. Of each row the tokens before its last document are exchanged; the
rows of that document may not change.
"""

import torch
from torch import Tensor

from regard.health.findings._finding import Finding
from regard.health.probing.probe import relative_change
from regard.health.probing.trial import SEQUENCES, NotApplicable, Trial
from regard.health.tokens.text import TokenBatch, exchange_tokens

NAME = "packed documents do not change one another"
KIND = "documents mixed"


def check(trial: Trial) -> list[Finding]:
    trial.require_repeatable()
    tokens, start = find_packed(trial)
    earlier = torch.arange(tokens.ids.shape[1], device=start.device) < start[:, None]  # [B, N]
    before, calls = trial.probe.capture(tokens)
    after, changed = trial.probe.capture(tokens.with_ids(exchange_tokens(tokens.ids, earlier)))
    if before.ndim < 3 or before.shape[:2] != tokens.ids.shape:
        raise NotApplicable("the output has no row per token")
    amount = relative_change(before[~earlier], after[~earlier])
    if amount <= trial.tolerance:
        return []
    rows = ~earlier[:, None]
    keys = [
        key
        for key, one in calls.items()
        if key in changed
        and one.output.shape[::2] == (len(start), tokens.ids.shape[1])
        and relative_change(*(x.output[rows.expand(x.output.shape[:3])] for x in (one, changed[key]))) > trial.tolerance
    ]
    return trial.find(
        KIND, "warning", keys[:1],
        f"Other tokens in earlier documents of a packed row change the output in its last document by {amount:.2g} of "
        "its size, although position_ids start anew there.",
        f"relative change of another document > {trial.tolerance:g}",
        "Hide other documents: in transformers attn_implementation='regard' or 'flash_attention_2' (with 'sdpa' also "
        "pass use_cache=False and no attention_mask); elsewhere attn_mask=regard.Mask.documents(ids=…) & "
        "regard.Mask.causal(). Ignore this if documents are meant to see one another.",
    )  # fmt: skip


def find_packed(trial: Trial) -> tuple[TokenBatch, Tensor]:
    """(sequences of a batch of packed documents, the index at which the last document of each begins)."""
    for batch in trial.batches:
        positions = batch.named.get("position_ids")
        if not isinstance(positions, Tensor) or positions.shape != batch.ids.shape or batch.has_decoder:
            continue
        change = positions[:SEQUENCES].diff()
        if bool((change < -1).any(-1).all()):  # positions of padding are 0, or 1 and then 0
            index = torch.arange(1, positions.shape[1], device=positions.device)
            start = torch.where(change <= 0, index, 0).amax(-1)
            return batch.cut(SEQUENCES, positions.shape[1]), start
    raise NotApplicable("no position_ids of the batches start anew within a row")
