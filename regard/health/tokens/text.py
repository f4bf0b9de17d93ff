"""The text that a batch holds: its first sequence, token by token, with a name for each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SPACES = {"Ġ": "␣", "▁": "␣", "Ċ": "⏎", "\n": "⏎", " ": "␣", "\t": "⇥"}  # as tokens are written
IDS = {"input_ids": "encoder", "decoder_input_ids": "decoder"}
MASKS = ("attention_mask", "decoder_attention_mask")
PER_TOKEN = ("token_type_ids", "position_ids", "labels", "cache_position")
LEAST_TOKENS = 8  # different ones, for a repeated sequence
LONGEST_PERIOD = 48
SHORT = 128  # tokens of the text that a report shows


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


def is_ids(x: Any) -> bool:
    """True for a tensor [B, N] of integers."""
    return (
        isinstance(x, Tensor) and x.ndim == 2 and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    )


def read_sides(batch: Any, tokenizer: Any = None, sequence: int = 0) -> dict[str, Side]:
    """Returns the tokens of a batch's sequence by side ("encoder", "decoder"); empty if the batch holds none."""
    given: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {"input_ids": find_ids(batch)}
    return {
        side: Side(given[name][sequence].cpu(), name_tokens(given[name][sequence], tokenizer))
        for name, side in IDS.items()
        if is_ids(given.get(name))
    }


def find_ids(batch: Any) -> Tensor | None:
    """Returns the token ids of a batch that is a tensor, or a tuple of one tensor; None if it holds none."""
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        batch = batch[0]
    return batch if is_ids(batch) else None


def is_plain(batch: Any) -> bool:
    """True if a batch holds token ids and nothing that would have to be cut in another way."""
    if not isinstance(batch, Mapping):
        return find_ids(batch) is not None
    known = {*IDS, *MASKS, *PER_TOKEN}
    return is_ids(batch.get("input_ids")) and all(
        name in known and (x is None or (isinstance(x, Tensor) and x.ndim == 2)) for name, x in batch.items()
    )


def cut(batch: Any, sequence: int, length: int | None = None) -> Any:
    """Returns a plain batch's one sequence: its first `length` tokens, without padding at the end."""
    rows = slice(sequence, sequence + 1)
    shown = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if shown is not None and bool(shown[sequence].any()):
        end = int(shown[sequence].nonzero()[-1]) + 1
        length = end if length is None else min(length, end)
    if not isinstance(batch, Mapping):
        return find_ids(batch)[rows, :length]  # type: ignore[index]
    return {name: None if x is None else x[rows, :length] for name, x in batch.items() if name != "labels"}


def first_text(batch: Any) -> Any:
    """Returns a copy of a batch's first tokens, which does not keep the batch alive; None if it holds no token ids."""
    if not is_plain(batch):
        return None
    short = cut(batch, 0, SHORT)
    if isinstance(short, Mapping):
        return {name: None if x is None else x.clone() for name, x in short.items()}
    return short.clone()


def repeat_tokens(batch: Any, room: int, is_special: Callable[[int], bool]) -> tuple[Any, int] | None:
    """Returns a batch of random tokens twice over, and how many; None if the text has too few different tokens.

    They are the text's own tokens in a random order, behind the text's first token, where many heads rest.
    """
    ids = batch["input_ids"] if isinstance(batch, Mapping) else find_ids(batch)
    assert ids is not None
    known = [token for token in ids.unique().tolist() if token != int(ids[0, 0]) and not is_special(token)]
    period = min(len(known), LONGEST_PERIOD, (room - 1) // 2)
    if period < LEAST_TOKENS:
        return None
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(0))[:period]
    once = torch.tensor(known)[order].to(ids)
    twice = torch.cat([ids[0, :1], once, once])[None]
    if not isinstance(batch, Mapping):
        return twice, period
    return {name: twice for name in IDS if batch.get(name) is not None}, period
