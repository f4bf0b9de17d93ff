"""Padding: a text alone and the same text with padding must give the same outputs.

If they differ, either text queries see padding keys, or padding on the left moves the positions of the text.
"""

import torch
from torch import Tensor

from regard.health.findings._finding import Finding
from regard.health.probing.probe import CapturedCall, relative_change
from regard.health.probing.trial import NotApplicable, Trial
from regard.health.tokens.text import TokenBatch, find_padding

NAME = "padding does not change the text's outputs"
SEEN, MOVED = "sees padding", "padding moves the text"
KINDS = (MOVED,)  # the other is a kind of odd_mask.py too
LEAST = 1e-3  # relative change: another length may take another kernel


def check(trial: Trial) -> list[Finding]:
    trial.require_repeatable()
    trial.require_rows()
    batch, padding, row = find_padded_row(trial)
    kept = (~padding[row]).nonzero().flatten()
    one = batch.select(torch.tensor([row], device=batch.ids.device))
    alone = one.map(lambda x: x[:, kept] if isinstance(x, Tensor) and x.shape[:2] == one.ids.shape else x)
    output, calls = trial.probe.capture(one)
    amount = relative_change(output[:, kept], trial.probe.run(alone))
    if amount <= LEAST:
        return []
    visible = [key for key, call in calls.items() if shows_padding(call, padding[row])]
    if visible:
        return trial.find(
            SEEN, "warning", visible[:1],
            f"The same text without its padding gives outputs that differ by {amount:.2g} of their size, and text "
            "queries see padding keys.",
            f"relative change > {LEAST:g}, and a padding key visible to a text query",
            "Pass attention_mask (1 is text, 0 is padding) with the batch, and on to every attention call.",
        )  # fmt: skip
    return trial.find(
        MOVED, "warning", [],
        f"The same text without its padding gives outputs that differ by {amount:.2g} of their size, although no text "
        "query sees padding: the padding moves the text to other positions.",
        f"relative change > {LEAST:g}, no padding key visible to a text query",
        "Pad on the right, or pass position_ids that count from the first token of the text "
        "(attention_mask.cumsum(-1) - 1).",
    )  # fmt: skip


def find_padded_row(trial: Trial) -> tuple[TokenBatch, Tensor, int]:
    """(batch, padding [B, N], row) of a sequence with padding at one end."""
    for batch in trial.batches:
        mask = batch.named.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == batch.ids.shape:
            padding = mask == 0
        elif trial.pad is not None:
            padding = find_padding(batch.ids, trial.pad)
        else:
            continue
        counts = padding.sum(1)
        rows = ((counts >= 3) & (counts < batch.ids.shape[1] - 3)).nonzero().flatten()
        if len(rows) and not batch.has_decoder:
            return batch, padding, int(rows[0])
    raise NotApplicable("no batch has padding")


def shows_padding(one: CapturedCall, padding: Tensor) -> bool:
    """True if some text query of the call sees a padding key."""
    queries, keys = one.q.shape[2], one.k.shape[2]
    if queries != keys or queries != len(padding):
        return False
    return bool(one.visible[..., ~padding, :][..., padding].any())
