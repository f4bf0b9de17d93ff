"""A batch's text without what surrounds it: what checks pad, pack and decode by themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.health.checks.rule import NotApplicable
from regard.health.tokens.text import TokenBatch

LEAST = 8  # tokens of a row
PER_TOKEN = ("position_ids", "cache_position", "token_type_ids", "decoder_position_ids")


def plain_text(batch: TokenBatch, pad: int | None) -> TokenBatch:
    """The rows' text, cut to one length: no padding, positions, labels or masks of two axes, one document per row.

    The mask of the text, if the batch has one, is all ones. An encoder's inputs stay as they are.
    """
    ids, text = batch.targets, batch.text_mask(pad)
    first = text.int().argmax(1)
    end = ids.shape[1] - text.flip(1).int().argmax(1)
    positions = batch.named.get("position_ids")
    if isinstance(positions, Tensor) and positions.shape == ids.shape:
        starts = (positions.diff() <= 0) & text[:, 1:]  # other documents
        second = torch.where(starts.any(1), starts.int().argmax(1) + 1, ids.shape[1])
        end = torch.where(second > first, torch.minimum(end, second), end)
    length = int((end - first).min())
    if length < LEAST:
        raise NotApplicable(f"a row of the text has fewer than {LEAST} tokens")
    at = first[:, None] + torch.arange(length, device=ids.device)
    text_ids = ids.gather(1, at)
    target = batch.key if batch.decoder is None else batch.decoder

    def keep(key: int | str, x: Any) -> Any:
        if key == target:
            return text_ids
        if not isinstance(x, Tensor):
            return x
        if x is batch.labels and x.shape == ids.shape:
            return text_ids  # a model may return every row only if it is given labels
        if key == batch.mask_name and x.ndim == 2:
            return x.new_ones(text_ids.shape)
        return None if key in PER_TOKEN or _is_per_token(x, ids, batch) else x

    args = [keep(key, x) for key, x in enumerate(batch.args)]
    while args and args[-1] is None:
        args.pop()
    named = {name: made for name, x in batch.named.items() if (made := keep(name, x)) is not None}
    return replace(batch, args=tuple(args), named=named, labels=None, own=None)


def choose_longest(batch: TokenBatch, pad: int | None, count: int) -> TokenBatch:
    """The rows with most text, `count` at most, in their order: rows of fewer than 8 tokens only if there is no other.

    >>> from regard.health.tokens.text import as_batch
    >>> ids = torch.arange(48).view(3, 16)
    >>> shown = (torch.arange(16) < torch.tensor([[9], [3], [12]])).long()
    >>> batch = as_batch({"input_ids": ids, "attention_mask": shown}, torch.device("cpu"))
    >>> choose_longest(batch, None, 2).ids[:, 0]
    tensor([ 0, 32])
    """
    lengths = batch.text_mask(pad).sum(1)
    rows = lengths.topk(min(count, len(lengths))).indices
    rows = rows[lengths[rows] >= LEAST] if bool((lengths >= LEAST).any()) else rows
    return batch.select(rows.sort().values)


def _is_per_token(x: Tensor, ids: Tensor, batch: TokenBatch) -> bool:
    """True for an argument that belongs to the tokens of `ids`, not to an encoder's."""
    if batch.has_decoder and x.shape[:2] == batch.ids.shape:
        return False
    return x.shape[:2] == ids.shape or (x.ndim >= 2 and x.shape[-1] == ids.shape[1] and x.shape[-2] == ids.shape[1])
