"""Which query rows of a call count, their position among the keys, and what is wrong with its mask.

Padding rows do not count. `regard.attention` counts query i at position i, as torch's causal mask does; with a cache
the first query of a call stands at `start`, and its distance is Σ p̄_j·|start + i − j|.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import regard
from regard._call.mask.mask import Mask
from regard.health.capture.call import Call, derive

TEXTS = (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask"))  # as transformers calls them
MIN_TRIANGLE = 8  # queries from which on a triangle is no chance
SEVERAL = 3  # tokens from which on one shared id, or one shared end, is no chance


@dataclass
class MaskSummary:
    """What a mask shows: [B, N] keys that some query sees, [B, M] queries that see some key.

    `anomalies` holds bool tensors on the device: "padding", a query of text sees padding; "opposite", and no text;
    "ahead", "behind", causal but for one key more, or less; "after", "from", a causal mask upside down, without or with
    the diagonal; "added", a mask of 1 and 0 that is added to the scores; "text", the batch itself shows its padding and
    hides its text.
    """

    keys: Tensor
    queries: Tensor
    anomalies: dict[str, Tensor] = field(default_factory=dict)
    empty: Tensor | None = None  # [B, M] queries that see no key in at least one head
    real: dict[bool, Tensor | None] = field(default_factory=dict)  # by cross: the third result of `QueryRows.select`


def padding_of(batch: Any, two_sided: bool = False) -> list[Tensor]:
    """Returns the masks [B, N] of a batch's token ids, True for text, where they say that some of it is padding.

    Empty where a call's shape would not tell whose padding it has: if both sides of an encoder-decoder are equally
    long, and if the batch holds images or sounds too.

    >>> from regard.health.measure.query_rows import padding_of
    >>> padding_of(dict(input_ids=torch.tensor([[5, 6, 0]]), attention_mask=torch.tensor([[1, 1, 0]])))
    [tensor([[ True,  True, False]])]
    """
    if not isinstance(batch, Mapping) or any(isinstance(x, Tensor) and x.is_floating_point() for x in batch.values()):
        return []
    given = _matrices(batch)
    sides = [given[name].shape for name in ("input_ids", "decoder_input_ids", "labels") if name in given]
    if (two_sided or "decoder_input_ids" in given) and (len(sides) < 2 or sides[0] in sides[1:]):
        return []
    return [shown for _, shown in _texts(given)]


def is_inverted(batch: Any, pad: int | None = None) -> bool:
    """True if a batch's mask shows one token id alone, as padding has it, and hides several others (1 and 0 swapped).

    The one id must be the model's `pad` (see `pad_of`) or stand three times in a text, where a BOS stands once.

    >>> from regard.health.measure.query_rows import is_inverted
    >>> is_inverted(dict(input_ids=torch.tensor([[5, 6, 7, 0]]), attention_mask=torch.tensor([[0, 0, 0, 1]])), pad=0)
    True
    """
    if not isinstance(batch, Mapping):
        return False
    for ids, shown in _texts(_matrices(batch)):
        seen, hidden = ids[shown], ids[~shown]
        many = len(seen) and int(shown.sum(-1).amax()) >= SEVERAL
        if len(seen) and bool((seen == seen[0]).all()) and (many or int(seen[0]) == pad):
            if len(hidden.unique()) >= SEVERAL:
                return True
    return False


def pad_of(model: nn.Module) -> int | None:
    """Returns the id that only pads, by the model's configuration; None if it also begins or ends texts."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config  # of Idefics 3, the outer one is outdated
    pad, *others = (getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "decoder_start"))
    return None if any(pad in (x if isinstance(x, list | tuple) else (x,)) for x in others) else pad


def _matrices(batch: Mapping) -> dict[str, Tensor]:
    return {name: x for name, x in batch.items() if isinstance(x, Tensor) and x.ndim == 2}


def _texts(given: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Returns (token ids, those that their mask shows) for masks of 0 and 1 that hide some."""
    found = []
    for ids, mask in TEXTS:
        if ids in given and mask in given and given[ids].shape == given[mask].shape:
            shown = given[mask] != 0
            if not bool(shown.all()) and bool((shown == given[mask]).all()):
                found.append((given[ids].to(shown.device), shown))
    return found


def is_two_sided(model: nn.Module, names: Iterable[str]) -> bool:
    """True for an encoder-decoder, by the model's configuration or the names of its modules."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return True
    parts = {part for name in names for part in name.split(".")}
    return {"encoder", "decoder"} <= parts


class QueryRows:
    """Finds the rows that count, call by call; cross-attention takes its padding from the self-attention before."""

    def __init__(self) -> None:
        self.padding: list[Tensor] = []  # of the batch: see `padding_of`
        self.inverted = False  # of the batch: see `is_inverted`
        self._last: dict[tuple[int, int], Tensor | None] = {}

    def forget(self) -> None:
        """Drops what is known of the last forward."""
        self._last.clear()

    def keep_all(self, batch: int, queries: int) -> None:
        """Notes a self-attention call all of whose rows count, for the cross-attention after it."""
        self._last[batch, queries] = None

    def select(self, call: Call, name: str = "") -> tuple[Tensor | None, MaskSummary | None, Tensor | None]:
        """Returns (rows that count [B, M], mask summary, rows that should count [B, M]).

        The first is None if every row counts, the second if there is no mask to look at, the third if every row that
        is no padding sees a key. Padding is what the batch says; if it says nothing, a key that no query sees and, in
        self-attention, the query at its place.
        """
        batch, _, queries, _ = call.q.shape
        keys = call.k.shape[2]
        cross = call.is_cross(name)
        before = self._last.get((batch, queries)) if cross else None
        text = None if cross or queries != keys else self._text(batch, queries, call.q.device)
        summary = real = None
        if call.mask is None and not call.parts and call.options.get("key_lengths") is None and text is None:
            rows = before
        else:
            summary = self._summarize(call, batch, queries, keys, text)
            known = text if text is not None else before
            if known is None and not cross and queries == keys:
                known = summary.keys
            rows = summary.queries if known is None else summary.queries & known
            if cross not in summary.real:
                summary.real[cross] = _rows_without_keys(summary, known, cross)
            real = summary.real[cross]
        if not cross:
            self._last[batch, queries] = rows if real is None else real
        return rows, summary, real

    def _text(self, batch: int, queries: int, device: torch.device) -> Tensor | None:
        """Returns the batch's padding as a call of that shape has it."""
        for at, text in enumerate(self.padding):
            if text.shape == (batch, queries):
                self.padding[at] = text.to(device)
                return self.padding[at]
        return None

    def _summarize(self, call: Call, batch: int, queries: int, keys: int, text: Tensor | None) -> MaskSummary:
        if call.parts:
            found = _summarize_documents(call.parts, batch, queries, keys, call.q.device)
        elif call.mask is not None:
            found = derive(_summarize_mask, call.mask, batch, queries, keys, text)
        else:
            lengths, windowed = call.options.get("key_lengths"), call.options.get("window") is not None
            shape = batch, queries, keys
            found = derive(_summarize_lengths, lengths, shape, text, call.causal, windowed, call.q.device)
        if text is not None and "text" not in found.anomalies:
            found.anomalies["text"] = torch.tensor(self.inverted)
        return found


def _summarize_documents(parts: tuple, batch: int, queries: int, keys: int, device: torch.device) -> MaskSummary:
    """Summarizes packed documents, the same in every batch entry."""
    (mask,) = (part for part in parts if isinstance(part, Mask))
    lo, hi = mask.bounds(queries, keys, device)
    assert lo is not None and hi is not None  # documents have both ends
    seen = hi > lo
    edges = torch.zeros(keys + 1, dtype=torch.long, device=device)  # +1 where an interval begins, −1 where it ends
    edges.index_add_(0, lo, seen.long()).index_add_(0, hi, -seen.long())
    shown = edges.cumsum(0)[:keys] > 0
    return MaskSummary(shown.expand(batch, keys), seen.expand(batch, queries), empty=~seen.expand(batch, queries))


def _summarize_lengths(
    lengths: Tensor | None, shape: tuple[int, int, int], text: Tensor | None, causal: bool, windowed: bool, device
) -> MaskSummary:
    """Summarizes a call without a mask."""
    batch, queries, keys = shape
    within = torch.full((batch,), keys, device=device) if lengths is None else lengths
    found = MaskSummary(
        torch.arange(keys, device=device) < within[:, None], (within > 0)[:, None].expand(batch, queries)
    )
    found.empty = None if lengths is None else ~found.queries
    if text is not None and lengths is None and not windowed:
        padded = (~text).cumsum(1) > 0 if causal else (~text).any(1, keepdim=True)  # is there padding to see?
        found.anomalies["padding"] = (padded & text).any()
    return found


def _rows_without_keys(shown: MaskSummary, known: Tensor | None, cross: bool) -> Tensor | None:
    """Returns the queries [B, M] that are no padding, if one of them sees no key."""
    if shown.empty is None:
        return None
    some, any_empty = torch.stack([shown.queries.any(), shown.empty.any()]).tolist()
    if not any_empty:
        return None
    if known is shown.keys and not some:  # where nothing is seen at all, that says nothing about padding
        known = None
    if known is None and some and not cross:  # behind a cache queries stand anywhere, and padding may be among them
        return None
    real = torch.ones_like(shown.queries) if known is None else known
    return real if bool((shown.empty & real).any()) else None


def _summarize_mask(mask: Tensor, batch: int, queries: int, keys: int, text: Tensor | None) -> MaskSummary:
    shown = mask if mask.dtype == torch.bool else mask != -math.inf
    while shown.ndim < 4:
        shown = shown[None]
    empty = ~shown.any(3).all(1).expand(batch, queries)
    shown = shown.any(1)  # [B or 1, M or 1, N]
    found = MaskSummary(shown.any(1).expand(batch, keys), shown.any(2).expand(batch, queries), empty=empty)
    if text is not None:
        each = shown.expand(batch, queries, keys)
        seen = [each[b] & text[b, :, None] for b in range(batch)]
        sees_padding = torch.stack([(row & ~text[b]).any() for b, row in enumerate(seen)]).any()
        sees_text = torch.stack([(row & text[b]).any() for b, row in enumerate(seen)]).any()
        found.anomalies |= {"padding": sees_padding, "opposite": sees_padding & ~sees_text}
    if shown.shape[1] == keys == queries >= MIN_TRIANGLE:
        square = torch.ones(keys, keys, dtype=torch.bool, device=shown.device)
        diagonals = {"ahead": square.tril(1), "behind": square.tril(-1), "after": square.triu(1), "from": square.triu()}
        found.anomalies |= {name: _matches(shown, expected) for name, expected in diagonals.items()}
    if mask.is_floating_point():
        found.anomalies["added"] = _is_added_bool_mask(mask)
    return found


def _is_added_bool_mask(mask: Tensor) -> Tensor:
    """True (on the device) if the first head of an additive mask holds 1 and 0 as a causal or padding mask does."""
    while mask.ndim < 4:
        mask = mask[None]
    mask = mask[:, 0]  # [B or 1, M or 1, N]
    on = mask == 1
    ends = (on[..., 1:] != on[..., :-1]).sum(-1)  # of runs of keys that are alike
    both = (on.sum(-1) >= SEVERAL) & ((~on).sum(-1) >= SEVERAL)  # one key with a 1 may be a bias
    like = (on == on[:, :1]).all() & (ends <= 1).all() & both.any()
    if on.shape[1] == on.shape[2] >= MIN_TRIANGLE:
        order = torch.ones_like(on[0]).tril()
        like = like | _matches(on, order) | _matches(~on, order)
    return (on | (mask == 0)).all() & like


def _matches(shown: Tensor, expected: Tensor) -> Tensor:
    """True (on the device) if query i sees key j just where expected, but for padding, in all long sequences."""
    seen, alive = shown.any(1), shown.any(2)
    long = (seen.sum(1) >= MIN_TRIANGLE) & (alive.sum(1) >= MIN_TRIANGLE)
    same = ((shown == (expected & seen[:, None])) | ~alive[..., None]).flatten(1).all(1)
    return (same | ~long).all() & long.any()


def first_query_position(call: Call, name: str) -> int:
    """Returns the position of a call's first query: behind the cached keys, 0 without a cache.

    A static cache is longer than what is in it: there the mask tells the last key in use.
    """
    queries, keys = call.q.shape[2], call.k.shape[2]
    if call.causal or call.is_cross(name) or queries >= keys or not getattr(call.module, "is_causal", False):
        return 0
    mask = call.mask
    if mask is None or mask.ndim < 2 or mask.shape[-2] != queries:
        return keys - queries
    return derive(_last_visible_key, mask, queries, keys)


def _last_visible_key(mask: Tensor, queries: int, keys: int) -> int:
    """Returns the last key that the first query sees."""
    first = mask[..., 0, :].expand(*mask.shape[:-2], keys)
    visible = (first if first.dtype == torch.bool else first != -math.inf).reshape(-1, keys).any(0).nonzero()
    return int(visible[-1]) if len(visible) else keys - queries


def hides_cached_keys(call: Call, name: str) -> bool:
    """True if torch's causal order, which begins at the first key, hides keys of a cache that are in use."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    if not call.causal or not 0 < queries < keys or call.is_cross(name):
        return False
    return bool(call.k[:, :, queries:].any())  # 0 where a static cache is empty


def distance_from(call: Call, stats: Mapping[str, Tensor], start: int, backend: str | None) -> Tensor:
    """Returns the distance statistic [B, H, M] of queries that stand at `start`: start + i − Σ p̄_j·j."""
    queries = call.q.shape[2]
    has_mass = stats["mass"] > 0
    if queries == 1:  # |0 − j| = j
        return torch.where(has_mass, start - stats["distance"], 0.0)
    wide = torch.promote_types(call.q.dtype, torch.float32)
    positions = torch.arange(call.k.shape[2], dtype=wide, device=call.k.device)[:, None].expand(*call.k.shape[:3], 1)
    q, k = call.q.detach().to(wide), call.k.detach().to(wide)
    mean = regard.attention(q, k, positions, **call.arguments, backend=backend)[..., 0]
    own = start + torch.arange(queries, dtype=wide, device=mean.device)
    return torch.where(has_mass, own - mean / torch.where(has_mass, stats["mass"], 1.0), 0.0).clamp_min(0.0)
