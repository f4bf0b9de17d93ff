"""The text that a batch holds, token by token; `TokenBatch`, a batch that the checks cut, change and run again."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.tokens.forms import DECODERS, Form, decoder_ids_of, form_of_mapping, form_of_parts, is_ids

SPACES = {"Ġ": "␣", "▁": "␣", "Ċ": "⏎", "\n": "⏎", " ": "␣", "\t": "⇥"}  # as tokens are written
LEAST_TOKENS = 8  # different ones, for a repeated sequence
LONGEST_PERIOD = 48
SHORT = 128  # tokens of the text that a report shows
SHOWN = ("attention_mask", "decoder_attention_mask")  # masks of text: not 0 is text
HIDDEN = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask", "padding_mask")  # True hides


@dataclass
class Side:
    """The tokens of one side of a model: ids [N] and a name for each, None where the inputs are not tokens."""

    ids: Tensor
    names: list[str]


def name_tokens(ids: Tensor, tokenizer: Any = None) -> list[str]:
    """Returns a text for each token id: the tokenizer's, or `#id`; spaces are shown as ␣."""
    numbers = ids.tolist()
    if tokenizer is None:
        return [f"#{number}" for number in numbers]
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)
    names = convert(numbers) if convert is not None else [tokenizer(number) for number in numbers]
    return ["".join(SPACES.get(c, c) for c in str(name)) for name in names]


def list_special(tokenizer: Any) -> list[str]:
    """Returns the tokenizer's special tokens; empty if it has no such list."""
    return [str(token) for token in getattr(tokenizer, "all_special_tokens", ())]


def read_sides(batch: Any, tokenizer: Any = None, model: nn.Module | None = None) -> dict[str, Side]:
    """Returns the tokens of a batch's first sequence by side ("encoder", "decoder"); empty if the batch holds none."""
    made = as_batch(batch, None, model)
    keys = {"decoder" if made.key in DECODERS else "encoder": made.key, "decoder": made.decoder}
    given = {side: made.get(key) for side, key in keys.items() if is_ids(made.get(key))}
    return {side: Side(ids[0].cpu(), name_tokens(ids[0], tokenizer)) for side, ids in given.items()}


def find_ids(batch: Any) -> Tensor | None:
    """Returns the token ids of a batch that is a tensor, or a tuple of one tensor; None if it holds none."""
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        batch = batch[0]
    return batch if is_ids(batch) else None


def read_plain(batch: Any, model: nn.Module | None = None) -> TokenBatch | None:
    """Returns a batch of token ids and tensors of their shape alone, which are cut alike; None for any other."""
    if not isinstance(batch, (Tensor, tuple, list, Mapping)):
        return None
    made = as_batch(batch, None, model)
    if not is_ids(made.ids):
        return None
    shapes, given = {made.ids.shape, made.targets.shape}, [x for x in made.given if x is not None]
    return made if all(isinstance(x, Tensor) and x.shape in shapes for x in given) else None


def cut(batch: TokenBatch, sequence: int, length: int | None = None) -> Any:
    """Returns a plain batch's one sequence: its first `length` tokens, without padding at the end and labels."""
    rows, shown = slice(sequence, sequence + 1), batch.named.get("attention_mask")
    if shown is not None and bool(shown[sequence].any()):
        end = int(shown[sequence].nonzero()[-1]) + 1
        length = end if length is None else min(length, end)
    short = batch.map(lambda x: None if x is None else x[rows, :length])
    if batch.args:
        return short.args
    return {name: x for name, x in short.named.items() if batch.labels is None or batch.named[name] is not batch.labels}


def first_text(batch: Any, model: nn.Module | None = None) -> Any:
    """Returns a copy of a batch's first tokens, which does not keep the batch alive; None if it holds no token ids."""
    made = read_plain(batch, model)
    if made is None:
        return None
    short = cut(made, 0, SHORT)
    if isinstance(short, Mapping):
        return {name: None if x is None else x.clone() for name, x in short.items()}
    return tuple(x.clone() for x in short)


def repeat_tokens(batch: TokenBatch, room: int, is_special: Callable[[int], bool]) -> tuple[Any, int] | None:
    """Returns a batch of random tokens twice over, and how many; None if the text has too few different tokens.

    They are the text's own tokens in a random order, behind the text's first token, where many heads rest.
    """
    ids = batch.ids
    known = [token for token in ids.unique().tolist() if token != int(ids[0, 0]) and not is_special(token)]
    period = min(len(known), LONGEST_PERIOD, (room - 1) // 2)
    if period < LEAST_TOKENS or not all(map(is_ids, batch.args)):
        return None
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(0))[:period]
    once = torch.tensor(known)[order].to(ids)
    twice = torch.cat([ids[0, :1], once, once])[None]
    if batch.args:
        return tuple(twice for _ in batch.args), period
    return {str(name): twice for name in (batch.key, batch.decoder) if batch.get(name) is not None}, period


@dataclass(frozen=True)
class TokenBatch:
    """Arguments of one forward, with the places of the token ids [B, N] among them."""

    args: tuple
    named: dict[str, Any]
    key: int | str  # of the ids: a place in `args`, or a name
    own: Any  # the batch as the user gave it, None once it is cut or changed
    decoder: int | str | None = None  # of the decoder's ids
    labels: Tensor | None = None  # what should be predicted, whether forward takes it or not
    held: tuple[int, ...] = ()  # ids that stand for images, sounds or videos, whose number must stay

    def get(self, key: int | str | None) -> Any:
        """The argument at a place or of a name; None if there is none."""
        if isinstance(key, int):
            return self.args[key] if key < len(self.args) else None
        return None if key is None else self.named.get(key)

    @property
    def given(self) -> tuple:
        """Every argument."""
        return (*self.args, *self.named.values())

    @property
    def ids(self) -> Tensor:
        """The ids that the model reads, [B, N]: the encoder's if there are two; other inputs if there are no ids."""
        return self.get(self.key)

    @property
    def has_decoder(self) -> bool:
        return self.decoder is not None

    @property
    def targets(self) -> Tensor:
        """The ids that the model continues, [B, N]: the decoder's if it has some."""
        return self.get(self.decoder) if self.has_decoder else self.ids

    @property
    def count(self) -> int:
        """The number of rows: the length of the first axis of the first tensor."""
        found = [x for x in self.given if isinstance(x, Tensor) and x.ndim]
        return found[0].shape[0] if found else 0

    @property
    def mask_name(self) -> str:
        """The name under which transformers takes the mask of `targets`."""
        return "decoder_attention_mask" if "decoder" in (str(self.decoder or self.key)) else "attention_mask"

    def map(self, change: Callable[[Any], Any]) -> TokenBatch:
        """Returns the batch with every argument changed."""
        named = {name: change(x) for name, x in self.named.items()}
        return replace(self, args=tuple(map(change, self.args)), named=named, own=None, labels=change(self.labels))

    def put(self, key: int | str, value: Any) -> TokenBatch:
        """Returns the batch with another argument at a place or of a name."""
        if isinstance(key, int):
            return replace(self, args=tuple(value if at == key else x for at, x in enumerate(self.args)), own=None)
        return replace(self, named={**self.named, key: value}, own=None)

    def without(self, *names: str) -> TokenBatch:
        """Returns the batch without some keyword arguments."""
        return replace(self, named={name: x for name, x in self.named.items() if name not in names}, own=None)

    def with_ids(self, ids: Tensor) -> TokenBatch:
        """Returns the batch with other ids for the (encoder's) ones."""
        return self.put(self.key, ids)

    def with_targets(self, ids: Tensor) -> TokenBatch:
        """Returns the batch with other ids for those that the model continues."""
        return self.put(self.key if self.decoder is None else self.decoder, ids)

    def exchange(self, ids: Tensor, where: Tensor) -> Tensor:
        """Returns `exchange_tokens`, but places of images and sounds stay, because the model fills them in order."""
        others = exchange_tokens(ids, where)
        if ids.is_floating_point() or not self.held:
            return others
        held = torch.tensor(self.held, device=ids.device)
        return torch.where(torch.isin(ids, held) | torch.isin(others, held), ids, others)

    def cut(self, sequences: int, length: int) -> TokenBatch:
        """Returns the first sequences, and of each the first tokens; arguments of the ids' shapes are cut alike.

        They are laid out anew: a model may call `view` on what it is given.
        """
        shapes = {tuple(self.ids.shape), tuple(self.targets.shape)}
        batch = self.ids.shape[0]

        def shorten(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if tuple(x.shape[:2]) in shapes:
                return x[:sequences, :length].contiguous()
            if x.ndim == 2 and x.shape[0] == x.shape[1] and any(x.shape[0] == shape[1] for shape in shapes):
                return x[:length, :length]  # a mask [N, N]
            return x[:sequences] if x.ndim and x.shape[0] == batch else x

        return self.map(shorten)

    def select(self, rows: Tensor) -> TokenBatch:
        """Returns some sequences in another order; every argument with that many is indexed alike.

        One of one dim is a number for each sequence, unless the text has as many tokens: then it may be positions.
        """
        batch, length = self.ids.shape[:2]
        least = 1 if batch == length else 0
        return self.map(lambda x: x[rows] if isinstance(x, Tensor) and x.ndim > least and x.shape[0] == batch else x)

    def text_mask(self, pad: int | None) -> Tensor:
        """True where `targets` holds text, [B, N], by the batch's mask and the pad token."""
        found = self.given_mask(self.targets, self.mask_name, "tgt_key_padding_mask")
        if found is not None:
            return found
        targets = self.targets
        return torch.ones_like(targets, dtype=torch.bool) if pad is None else find_padding(targets, pad).logical_not()

    def given_mask(self, ids: Tensor, *first: str) -> Tensor | None:
        """True where the batch's own mask shows `ids`; None if it has no mask of their shape."""
        for name in (*first, *SHOWN, *HIDDEN):
            mask = self.named.get(name)
            if isinstance(mask, Tensor) and mask.shape == ids.shape:
                return mask.bool() if name in SHOWN else mask.logical_not() if mask.dtype == torch.bool else mask >= 0
        return None


def as_token_batch(batch: Any, device: torch.device, model: nn.Module | None = None) -> TokenBatch | None:
    """Returns a batch on the model's device, or None if it has no token ids [B, N]."""
    made = as_batch(batch, device, model)
    return made if is_ids(made.ids) and made.ids.shape[0] > 0 and made.ids.shape[1] > 1 else None


def as_batch(batch: Any, device: torch.device | None, model: nn.Module | None = None) -> TokenBatch:
    """Returns any batch on a device, None for its own; `ids` is there only if it holds token ids.

    Labels that forward does not take, as a loader of (inputs, labels) gives them, are held apart if `model` is given.
    """

    def move(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) and device is not None else x

    if isinstance(batch, Mapping):
        named = {str(name): move(x) for name, x in batch.items()}
        named |= decoder_ids_of(model, named)
        form = form_of_mapping(named, model)
        labels = named.pop(str(form.labels)) if form.apart else named.get(str(form.labels))
        return TokenBatch((), named, form.ids, batch, form.decoder, labels, list_placeholders(model))
    parts = tuple(map(move, batch if isinstance(batch, (tuple, list)) else (batch,)))
    form = form_of_parts(parts, model) if model is not None else Form(0)
    at = form.labels if isinstance(form.labels, int) else None
    labels = None if at is None else parts[at]
    return TokenBatch(parts[:at] if form.apart else parts, {}, form.ids, batch, form.decoder, labels)


PLACEHOLDER = re.compile(r"(image|video|audio|vision|speech|media|eoi|boi).*_token_(id|index)$")


def list_placeholders(model: nn.Module | None) -> tuple[int, ...]:
    """The ids of tokens that stand for images, sounds or videos, by the entries of the configuration."""
    config: Any = getattr(model, "config", None)
    entries = vars(config).items() if hasattr(config, "__dict__") else ()
    return tuple(sorted({value for name, value in entries if PLACEHOLDER.search(name) and type(value) is int}))


def with_decoder_ids(batch: TokenBatch, model: nn.Module) -> TokenBatch:
    """The batch with the decoder's ids that an encoder-decoder makes of its labels, if it was given labels alone."""
    config: Any = getattr(model, "config", None)
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None) or getattr(model, "_shift_right", None)
    labels = batch.labels
    if batch.has_decoder or not getattr(config, "is_encoder_decoder", False) or shift is None or not is_ids(labels):
        return batch
    assert labels is not None
    return replace(batch.put("decoder_input_ids", shift(labels)), decoder="decoder_input_ids")


def find_padding(ids: Tensor, pad: int, least: int = 3) -> Tensor:
    """True at runs of `least` or more pad tokens at either end of a row, [B, N].

    >>> from regard.health.tokens.text import find_padding
    >>> find_padding(torch.tensor([[0, 0, 0, 7, 0], [7, 8, 9, 0, 0]]), 0).int()
    tensor([[1, 1, 1, 0, 0],
            [0, 0, 0, 0, 0]], dtype=torch.int32)
    """
    is_pad = (ids == pad).long()
    left = is_pad.cumprod(1)
    right = is_pad.flip(1).cumprod(1).flip(1)
    left, right = (run * (run.sum(1, keepdim=True) >= least) for run in (left, right))
    return ((left + right) > 0) & ~(is_pad.all(1, keepdim=True))


def guess_pad(ids: Tensor) -> int | None:
    """The token that fills rows up at their ends, in runs of other lengths, and stands nowhere else; None without one.

    >>> from regard.health.tokens.text import guess_pad
    >>> guess_pad(torch.tensor([[5, 6, 7, 0, 0, 0], [5, 6, 0, 0, 0, 0]]))
    0
    """
    last = int(ids[:, -1].mode().values)
    runs = (ids == last).flip(1).long().cumprod(1).sum(1)
    is_pad = int((runs >= 3).sum()) > 1 and len(runs.unique()) > 1 and int((ids == last).sum()) == int(runs.sum())
    return last if is_pad else None


def exchange_tokens(ids: Tensor, where: Tensor, seed: int = 0) -> Tensor:
    """Returns ids in which every token at `where` [B, N] is another one of the same text; of [B, N, …], vectors."""
    if ids.is_floating_point() or ids.ndim > 2:
        others = ids.flatten(0, 1).roll(ids.shape[1] // 2 + 1, 0).view_as(ids)
        return torch.where(where.view(*where.shape, *[1] * (ids.ndim - 2)), others, ids)
    known = ids.unique()
    place = torch.searchsorted(known, ids.contiguous())
    generator = torch.Generator().manual_seed(seed)
    step = torch.randint(1, max(len(known), 2), ids.shape, generator=generator).to(ids.device)
    return torch.where(where, known[(place + step) % len(known)], ids)
