"""`TokenBatch`: a batch of token ids that the checks cut, change and run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.health.tokens import text

DECODER = "decoder_input_ids"
NAMES = ("input_ids", "ids", "tokens", "x", "src")


@dataclass(frozen=True)
class TokenBatch:
    """Arguments of one forward, with the place of the token ids [B, N] among them."""

    args: tuple
    named: dict[str, Any]
    key: int | str  # of the ids: a place in `args`, or a name
    own: Any  # the batch as the user gave it, None once it is cut or changed

    @property
    def ids(self) -> Tensor:
        """The ids that the model reads, [B, N]: the encoder's if there are two."""
        return self.args[self.key] if isinstance(self.key, int) else self.named[self.key]

    @property
    def has_decoder(self) -> bool:
        return isinstance(self.named.get(DECODER), Tensor)

    @property
    def targets(self) -> Tensor:
        """The ids that the model continues, [B, N]: the decoder's if it has some."""
        return self.named[DECODER] if self.has_decoder else self.ids

    def with_ids(self, ids: Tensor) -> TokenBatch:
        """Returns the batch with other ids for the (encoder's) ones."""
        if isinstance(self.key, int):
            args = tuple(ids if at == self.key else x for at, x in enumerate(self.args))
            return replace(self, args=args, own=None)
        return replace(self, named={**self.named, self.key: ids}, own=None)

    def with_targets(self, ids: Tensor) -> TokenBatch:
        """Returns the batch with other ids for those that the model continues."""
        return replace(self, named={**self.named, DECODER: ids}, own=None) if self.has_decoder else self.with_ids(ids)

    def cut(self, sequences: int, length: int) -> TokenBatch:
        """Returns the first sequences, and of each the first tokens; arguments of the ids' shapes are cut alike."""
        shapes = {tuple(self.ids.shape), tuple(self.targets.shape)}
        batch = self.ids.shape[0]

        def shorten(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if tuple(x.shape[:2]) in shapes:
                return x[:sequences, :length]
            if x.ndim == 2 and x.shape[0] == x.shape[1] and any(x.shape[0] == shape[1] for shape in shapes):
                return x[:length, :length]  # a mask [N, N]
            return x[:sequences] if x.ndim and x.shape[0] == batch else x

        named = {name: shorten(x) for name, x in self.named.items()}
        return replace(self, args=tuple(map(shorten, self.args)), named=named, own=None)

    def select(self, rows: Tensor) -> TokenBatch:
        """Returns some sequences in another order; every argument with that many is indexed alike."""
        batch = self.ids.shape[0]

        def pick(x: Any) -> Any:
            return x[rows] if isinstance(x, Tensor) and x.ndim > 1 and x.shape[0] == batch else x

        named = {name: pick(x) for name, x in self.named.items()}
        return replace(self, args=tuple(map(pick, self.args)), named=named, own=None)

    def text_mask(self, pad: int | None) -> Tensor:
        """True where `targets` holds text, [B, N], by the batch's mask and the pad token."""
        targets = self.targets
        given = self.named.get("decoder_attention_mask" if self.has_decoder else "attention_mask")
        if isinstance(given, Tensor) and given.shape == targets.shape:
            return given.bool()
        return torch.ones_like(targets, dtype=torch.bool) if pad is None else find_padding(targets, pad).logical_not()


def as_token_batch(batch: Any, device: torch.device) -> TokenBatch | None:
    """Returns a batch on the model's device, or None if it has no token ids [B, N]."""
    made = as_batch(batch, device)
    ids = made.named.get(made.key) if isinstance(made.key, str) else next(iter(made.args), None)
    return made if is_ids(ids) else None


def as_batch(batch: Any, device: torch.device) -> TokenBatch:
    """Returns any batch on the model's device; `ids` is there only if it holds token ids."""

    def move(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    if isinstance(batch, Mapping):
        named = {str(name): move(x) for name, x in batch.items()}
        return TokenBatch((), named, next((name for name in NAMES if is_ids(named.get(name))), ""), batch)
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    return TokenBatch(tuple(map(move, parts)), {}, 0, batch)


def is_ids(x: Any) -> bool:
    """True for integers [B, N] of at least two tokens."""
    return text.is_ids(x) and x.shape[0] >= 1 and x.shape[1] >= 2


def find_padding(ids: Tensor, pad: int, least: int = 3) -> Tensor:
    """True at runs of `least` or more pad tokens at either end of a row, [B, N].

    >>> from regard.health.probing.tokens import find_padding
    >>> find_padding(torch.tensor([[0, 0, 0, 7, 0], [7, 8, 9, 0, 0]]), 0).int()
    tensor([[1, 1, 1, 0, 0],
            [0, 0, 0, 0, 0]], dtype=torch.int32)
    """
    is_pad = (ids == pad).long()
    left = is_pad.cumprod(1)
    right = is_pad.flip(1).cumprod(1).flip(1)
    left, right = (run * (run.sum(1, keepdim=True) >= least) for run in (left, right))
    return ((left + right) > 0) & ~(is_pad.all(1, keepdim=True))


def exchange_tokens(ids: Tensor, where: Tensor, seed: int = 0) -> Tensor:
    """Returns ids in which every token at `where` is another one of the same text."""
    known = ids.unique()
    place = torch.searchsorted(known, ids.contiguous())
    generator = torch.Generator().manual_seed(seed)
    step = torch.randint(1, max(len(known), 2), ids.shape, generator=generator).to(ids.device)
    return torch.where(where, known[(place + step) % len(known)], ids)
