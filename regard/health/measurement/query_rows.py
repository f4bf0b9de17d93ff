"""Which query rows count, and what a mask shows that it should not, or hides: padding, one key too many, all keys.

Layers share their masks, so what was found of one is kept for a forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.capture.call import Call, named_cross

TEXTS = (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask"))  # as transformers calls them
LEAST = 8  # queries from which on a triangle is one
SEVERAL = 3  # tokens from which on it is no chance that all are of one id or at one end, and ids that no padding has


@dataclass
class Shown:
    """What a mask shows: [B, N] keys that some query sees, [B, M] queries that see some key.

    `odd` answers, on the device, what can be asked of it: "padding", does a query of text see that? "ahead", "behind":
    is it a causal mask but for one key more, or less? "after", "from": is it one upside down, without or with the
    diagonal? "added": is it one of 1 and 0 that is added to the scores? "text": does the batch itself show its padding
    and hide its text?
    """

    keys: Tensor
    queries: Tensor
    odd: dict[str, Tensor] = field(default_factory=dict)
    blind: Tensor | None = None  # [B, M] queries that see none, in one head at least
    real: dict[bool, Tensor | None] = field(default_factory=dict)  # by cross: see `Rows.of`


def padding_of(batch: Any, two_sided: bool = False) -> list[Tensor]:
    """[B, N] bool, True for text: the masks of a batch's token ids, where they say that some of it is padding.

    Nothing, where a call's shape would not tell whose padding it has: on the sides of an encoder-decoder that are as
    long as each other, and beside images or sounds.

    >>> from regard.health.measurement.query_rows import padding_of
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
    """Does a batch's mask show one token id alone, as padding has it, and hide several others: 1 for 0, 0 for 1?

    One id is no chance where it is the model's `pad` (see `pad_of`) or stands three times in a text, where a BOS stands
    once; sound padding has one id, or two.

    >>> from regard.health.measurement.query_rows import is_inverted
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
    """The id that pads a model's texts and does nothing else, by its configuration; many pad with what ends a text."""
    config = getattr(model, "config", None)
    pad, *others = (getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "decoder_start"))
    return None if any(pad in (x if isinstance(x, list | tuple) else (x,)) for x in others) else pad


def _matrices(batch: Mapping) -> dict[str, Tensor]:
    return {name: x for name, x in batch.items() if isinstance(x, Tensor) and x.ndim == 2}


def _texts(given: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(token ids, which of them their mask shows), where it is one of 0 and 1 and hides some."""
    found = []
    for ids, mask in TEXTS:
        if ids in given and mask in given and given[ids].shape == given[mask].shape:
            shown = given[mask] != 0
            if not bool(shown.all()) and bool((shown == given[mask]).all()):
                found.append((given[ids].to(shown.device), shown))
    return found


def is_two_sided(model: nn.Module, names: Iterable[str]) -> bool:
    """Is there an encoder and a decoder in it, by its configuration or among the names of its modules?"""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return True
    return {"encoder", "decoder"} <= {part for name in names for part in name.split(".")}


class Rows:
    """Counts them, call by call."""

    def __init__(self) -> None:
        self.padding: list[Tensor] = []  # of the batch: see `padding_of`
        self.inverted = False  # is it? See `is_inverted`
        self._masks: list[tuple[Any, Shown]] = []
        self._last: dict[tuple[int, int], Tensor | None] = {}

    def forget(self) -> None:
        self._masks.clear()
        self._last.clear()

    def of(self, call: Call, name: str = "") -> tuple[Tensor | None, Shown | None, Tensor | None]:
        """([B, M] bool, or None if every row counts; what the mask shows, if it was looked at; which rows should count,
        [B, M], if some of those see no key).

        Padding is what the batch calls so; where it does not say, a key that no query sees, and in self-attention the
        query at its place. Cross-attention has its queries' padding from the self-attention before it.
        """
        batch, _, queries, _ = call.q.shape
        keys = call.k.shape[2]
        cross = named_cross(name) if call.cross is None else call.cross
        before = self._last.get((batch, queries)) if cross else None
        text = None if cross or queries != keys else self._text(batch, queries, call.q.device)
        plain = call.mask is None and call.options.get("key_lengths") is None
        shown = real = None
        if plain and text is None:
            rows = before
        else:
            shown = self._shown(call, batch, queries, keys, text)
            known = text if text is not None else before
            if known is None and not cross and queries == keys:
                known = shown.keys
            rows = shown.queries if known is None else shown.queries & known
            if cross not in shown.real:
                shown.real[cross] = _unserved(shown, known, cross)
            real = shown.real[cross]
        if not cross:
            self._last[batch, queries] = rows if real is None else real
        return rows, shown, real

    def _text(self, batch: int, queries: int, device: torch.device) -> Tensor | None:
        """The padding of a batch as a call of that shape has it."""
        for at, text in enumerate(self.padding):
            if text.shape == (batch, queries):
                self.padding[at] = text.to(device)
                return self.padding[at]
        return None

    def _shown(self, call: Call, batch: int, queries: int, keys: int, text: Tensor | None) -> Shown:
        mask, lengths = call.mask, call.options.get("key_lengths")
        sign = (call.causal, text) if mask is None and lengths is None else mask if lengths is None else lengths
        for known, found in self._masks:
            same = known is sign or (isinstance(known, tuple) and isinstance(sign, tuple) and known[0] == sign[0])
            if same and found.queries.shape == (batch, queries):
                return found
        if mask is not None:
            found = _of_mask(mask, batch, queries, keys, text)
        else:
            device = call.q.device
            within = torch.ones(batch, dtype=torch.int64, device=device) * keys if lengths is None else lengths
            found = Shown(
                torch.arange(keys, device=device) < within[:, None], (within > 0)[:, None].expand(batch, queries)
            )
            found.blind = None if lengths is None else ~found.queries
            if text is not None and lengths is None and call.options.get("window") is None:
                padded = (~text).cumsum(1) > 0 if call.causal else (~text).any(1, keepdim=True)  # is there some to see?
                found.odd["padding"] = (padded & text).any()
        if text is not None:
            found.odd["text"] = torch.tensor(self.inverted)
        self._masks.append((sign, found))
        return found


def _unserved(shown: Shown, known: Tensor | None, cross: bool) -> Tensor | None:
    """[B, M] the queries that are no padding, if one of them sees no key."""
    if shown.blind is None:
        return None
    some, blind = torch.stack([shown.queries.any(), shown.blind.any()]).tolist()
    if not blind:
        return None
    if known is shown.keys and not some:  # where nothing is seen at all, that says nothing about padding
        known = None
    if known is None and some and not cross:  # behind a cache queries stand anywhere, and padding may be among them
        return None
    real = torch.ones_like(shown.queries) if known is None else known
    return real if bool((shown.blind & real).any()) else None


def _of_mask(mask: Tensor, batch: int, queries: int, keys: int, text: Tensor | None) -> Shown:
    shown = mask if mask.dtype == torch.bool else mask != -math.inf
    while shown.ndim < 4:
        shown = shown[None]
    blind = ~shown.any(3).all(1).expand(batch, queries)
    shown = shown.any(1)  # [B or 1, M or 1, N]
    found = Shown(shown.any(1).expand(batch, keys), shown.any(2).expand(batch, queries), blind=blind)
    if text is not None:
        each = shown.expand(batch, queries, keys)
        found.odd["padding"] = torch.stack([(each[b] & text[b, :, None] & ~text[b]).any() for b in range(batch)]).any()
    if shown.shape[1] == keys == queries >= LEAST:
        square = torch.ones(keys, keys, dtype=torch.bool, device=shown.device)
        diagonals = {"ahead": square.tril(1), "behind": square.tril(-1), "after": square.triu(1), "from": square.triu()}
        found.odd |= {name: _like(shown, expected) for name, expected in diagonals.items()}
    if mask.is_floating_point():
        found.odd["added"] = _adds_ones(mask)
    return found


def _adds_ones(mask: Tensor) -> Tensor:
    """Is an additive mask one of 1 and 0 alone, as a causal order has them, or padding? Asked of its first head."""
    while mask.ndim < 4:
        mask = mask[None]
    mask = mask[:, 0]  # [B or 1, M or 1, N]
    on = mask == 1
    ends = (on[..., 1:] != on[..., :-1]).sum(-1)  # of runs of keys that are alike
    both = (on.sum(-1) >= SEVERAL) & ((~on).sum(-1) >= SEVERAL)  # one key with a 1 may be a bias
    like = (on == on[:, :1]).all() & (ends <= 1).all() & both.any()
    if on.shape[1] == on.shape[2] >= LEAST:
        order = torch.ones_like(on[0]).tril()
        like = like | _like(on, order) | _like(~on, order)
    return (on | (mask == 0)).all() & like


def _like(shown: Tensor, expected: Tensor) -> Tensor:
    """Does query i see key j just where it is expected to, but for padding? Asked of sequences long enough to tell."""
    seen, alive = shown.any(1), shown.any(2)
    long = (seen.sum(1) >= LEAST) & (alive.sum(1) >= LEAST)
    same = ((shown == (expected & seen[:, None])) | ~alive[..., None]).flatten(1).all(1)
    return (same | ~long).all() & long.any()
