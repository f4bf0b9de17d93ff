"""Batches in any form: an iterable of them, one forward on each, and the mode in which it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.tokens.text import as_batch

Modules = list[tuple[str, nn.Module]]
POSITIONS = ("wpe", "position_embeddings", "embed_positions")  # names of learned position tables


def is_function(batch: Any) -> bool:
    """True for a batch that is called with the model."""
    return callable(batch) and not isinstance(batch, (Tensor, Mapping))


def as_batches(batches: Any) -> Iterable[Any]:
    """Returns an iterable of batches, where one batch alone may be given; raises TypeError for anything else."""
    if isinstance(batches[0] if isinstance(batches, (list, tuple)) and batches else batches, (str, bytes)):
        raise TypeError("batches must be the model's inputs, got text; tokenize it, or run `regard examine`")
    batches = [batches] if isinstance(batches, (Tensor, Mapping)) or callable(batches) else batches
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches must be an iterable of batches, got {type(batches).__name__}")
    return batches


@contextlib.contextmanager
def evaluation_mode(modules: Modules) -> Iterator[None]:
    """Evaluation mode inside the block."""
    training = [module for _, module in modules if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def max_positions(model: nn.Module, modules: Modules | None = None) -> int:
    """The number of positions of text with a learned embedding; a very large number if there are none.

    Tables of a part that takes images or sounds, by transformers' `main_input_name`, do not count. `modules`: those of
    the model by name, if they are known.
    """
    tables = []
    modules = list(model.named_modules()) if modules is None else modules
    others = tuple(
        f"{name}." for name, module in modules
        if name and getattr(module, "main_input_name", "input_ids") not in ("input_ids", "decoder_input_ids")
    )  # fmt: skip
    for name, module in modules:
        if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in POSITIONS and not name.startswith(others):
            first = getattr(module, "offset", 0) if module.padding_idx is None else module.padding_idx + 1
            tables.append(module.num_embeddings - first)
    return min(tables, default=2**31)


def run_batch(model: nn.Module, batch: Any, number: int, room: int) -> None:
    """Runs the model on a batch, on the model's device; `room` is the number of positions that it has."""
    if is_function(batch):
        batch(model)
        return
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    given = as_batch(batch, device, model)
    ids = given.named.get("input_ids")
    if isinstance(ids, Tensor) and ids.shape[-1] > room:
        raise ValueError(
            f"batch {number}: input_ids has {ids.shape[-1]} tokens, but the model has {room} positions; shorten it"
        )
    model(*given.args, **given.named)


def name_batch(error: BaseException, number: int) -> BaseException:
    """Returns the error that ended a batch, with a note of its number; before Python 3.11 the note is its cause."""
    note = f"regard.examine: raised in batch {number}, counted from 0"
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.__cause__ is None:
        error.__cause__ = RuntimeError(note)
    return error
