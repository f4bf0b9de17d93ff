"""Texts that checks make of a batch: plain, of one repeated token, with other tokens later on; and its documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.health.checks.rule import NotApplicable
from regard.health.probe.differences import row_changes
from regard.health.probe.labels import IGNORED
from regard.health.probe.probe import CapturedCall, Key
from regard.health.tokens.text import TokenBatch

if TYPE_CHECKING:
    from regard.health.probe.trial import Trial


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


SEGMENTS = ("segment", "document", "doc_id", "seq_idx", "sequence_id", "sample_id")
LENGTHS = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seqlens_q")


def find_documents(batch: TokenBatch) -> tuple[Tensor, str] | None:
    """(True where a document begins [B, N], what says so); None if nothing says that a row holds several."""
    shape = batch.targets.shape
    for name, x in batch.named.items():
        if not isinstance(x, Tensor):
            continue
        starts = None
        is_counted = name == "attention_mask" and x.ndim == 2 and _counts(x)
        is_segments = is_counted or any(part in name for part in SEGMENTS)
        if is_segments and x.shape == shape:
            starts = torch.nn.functional.pad((x.diff() != 0) & (x[:, 1:] != 0), (1, 0), value=True)
        elif name in LENGTHS and x.ndim == 1 and shape[0] == 1:
            starts = torch.zeros(shape, dtype=torch.bool, device=x.device)
            starts[0, x[:-1].long().clamp_max(shape[1] - 1)] = True
        elif "mask" in name and x.ndim in (3, 4) and x.shape[-2:] == (shape[1], shape[1]) and x.shape[0] == shape[0]:
            starts = _starts_of_mask(x)
        if starts is not None and bool(starts[:, 1:].any()):
            return starts, name
    return None


def _counts(x: Tensor) -> bool:
    """True for a mask of 1, 1, 2, 2, 3, …: it numbers documents."""
    return not x.is_floating_point() and x.dtype != torch.bool and bool((x > 1).any())


def _starts_of_mask(mask: Tensor) -> Tensor:
    """True at queries that see no key before themselves, [B, N], of a mask [B, (H), N, N]."""
    mask = mask[:, 0] if mask.ndim == 4 else mask
    seen = mask if mask.dtype == torch.bool else mask > -1.0 if bool((mask < 0).any()) else mask != 0
    before = (seen & torch.ones_like(seen[0]).tril(-1)).any(-1)
    return ~before & seen.any(-1)


LENGTH = 48  # tokens


def repeat_one_token(trial: Trial) -> TokenBatch:
    """A batch of one sequence whose tokens are all the same, without padding, at positions 0, 1, 2, …"""
    short = trial.tokens.cut(1, LENGTH)
    token = most_usual_token(short.targets, trial.pad)

    def fill(x: Tensor) -> Tensor:
        return torch.full_like(x, token)

    same = short.with_ids(fill(short.ids))
    same = same.with_targets(fill(same.targets)) if same.has_decoder else same
    length = same.ids.shape[1]
    named = dict(same.named)
    for name, x in named.items():
        if not isinstance(x, Tensor) or x.shape != same.ids.shape or name in (same.key, same.decoder):
            continue
        if "mask" in name:
            named[name] = torch.ones_like(x)
        elif name == "position_ids":
            named[name] = torch.arange(length, device=x.device).expand_as(x).contiguous()
        elif name == "token_type_ids":
            named[name] = torch.zeros_like(x)
    named.pop("labels", None)
    return TokenBatch(same.args, named, same.key, None)


def most_usual_token(ids: Tensor, pad: int | None) -> int:
    """A token from the middle of the text that is not padding."""
    usable = ids[ids != pad] if pad is not None and bool((ids != pad).any()) else ids.flatten()
    return int(usable[len(usable) // 2])


def capture_repeated(trial: Trial) -> dict[Key, CapturedCall]:
    """The attention calls on one repeated token; captured once for each trial."""
    kept = trial.__dict__.get("_repeated")
    if kept is None:
        kept = trial.__dict__["_repeated"] = trial.probe.capture(repeat_one_token(trial))[1]
    return kept


PLACES = {"the second half": 1 / 2, "the last quarter": 3 / 4, "the last token": 1.0}


@dataclass(frozen=True)
class Leak:
    """What other tokens from `cut` on do to the outputs before it."""

    place: str  # of the tokens that were changed
    cut: int
    amount: float  # largest relative change of an output row of text before `cut`
    first: int  # the first row that has half of this change

    def __str__(self) -> str:
        return f"Other tokens in {self.place} change earlier outputs by {self.amount:.2g} of their size"


def change_later(batch: TokenBatch, cut: int) -> TokenBatch:
    """The batch with other tokens from position `cut` on."""
    ids = batch.targets
    later = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[:2]) >= cut
    return batch.with_targets(batch.exchange(ids, later))


def rows_that_count(batch: TokenBatch) -> Tensor:
    """True at the places [B, N] of text; if some tokens have labels, only where one is predicted.

    A prefix without labels may see itself both ways.
    """
    targets, labels = batch.targets, batch.labels
    text = batch.text_mask(None) if targets.ndim == 2 else targets.new_ones(targets.shape[:2], dtype=torch.bool)
    if labels is None or labels.shape != text.shape or labels.is_floating_point():
        return text
    told = labels != IGNORED
    told = text & (told | torch.nn.functional.pad(told[:, 1:], (0, 1)))
    return told if bool(told.any()) else text


def find_leaks(run: Callable[[TokenBatch], Tensor], batch: TokenBatch, before: Tensor | None = None) -> list[Leak]:
    """One `Leak` for each of `PLACES` with rows before it that count.

    `run` returns the outputs [B, N, …] of a batch, `before` those of this one.
    """
    before = run(batch) if before is None else before
    length, counts = batch.targets.shape[1], rows_that_count(batch).cpu()
    found = []
    for place, share in PLACES.items():
        cut = min(max(1, int(share * length)), length - 1)
        if not bool(counts[:, :cut].any()):
            continue
        changes = row_changes(before[:, :cut], run(change_later(batch, cut))[:, :cut])
        change = changes.masked_fill(~counts[:, :cut], 0.0).amax(0)  # [cut]
        amount = float(change.max())
        found.append(Leak(place, cut, amount, int((change >= amount / 2).nonzero()[0])))
    return found
