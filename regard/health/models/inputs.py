"""Batches for a transformers model: text cut into sequences."""

import inspect
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.measure.batches import max_positions

LENGTH = 256  # tokens per sequence, if the model has so many positions
UNKNOWN = 1 / 3  # largest fraction of unknown tokens
LONGEST_TOKEN = 64  # characters; the text is cut by it before it is tokenised


class InputError(Exception):
    """Says in one line why there is no input for the model."""


def sample_text() -> str:
    return resources.files("regard.health.models").joinpath("sample.txt").read_text(encoding="utf-8")


def make_text_batches(
    model: nn.Module, tokenizer: Any, text: str, length: int | None, batch: int, limit: int
) -> list[dict[str, Tensor]]:
    """At most `limit` batches of token ids and their mask; an encoder-decoder reads the same text on both sides."""
    config = getattr(model.config, "text_config", None) or model.config
    longest = min(max_positions(model), getattr(config, "max_position_embeddings", None) or 2**31)
    length = min(LENGTH, longest) if length is None else length
    if length > longest:
        raise InputError(f"--length {length} is more than the model's {longest} positions")
    rows = _tokenize(tokenizer, text[: limit * batch * length * LONGEST_TOKEN], length)[: limit * batch]
    top, known = max(map(max, rows)), getattr(config, "vocab_size", None) or 2**31
    if top >= known:
        raise InputError(f"the tokenizer gives token {top}, but the model has {known}: they do not belong together")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return [
        _keep_accepted(model, _pad(model.config, rows[start : start + batch], pad))
        for start in range(0, len(rows), batch)
    ]


def _tokenize(tokenizer: Any, text: str, length: int) -> list[list[int]]:
    """Sequences of at most `length` token ids."""
    special = tokenizer.num_special_tokens_to_add()
    if length <= special:
        raise InputError(f"--length {length} leaves no room for text beside the tokenizer's {special} special tokens")
    encoded = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True, padding=False)
    rows = encoded["input_ids"]
    rows = [rows] if rows and isinstance(rows[0], int) else rows
    marks = set(tokenizer.all_special_ids)
    if len(tokenizer) <= len(marks):
        raise InputError(
            "the tokenizer knows only special tokens: its files are missing; save it beside the model "
            "(tokenizer.save_pretrained), or pass a module:function that returns model and batches"
        )
    tokens = [token for row in rows for token in row if token not in marks or token == tokenizer.unk_token_id]
    unknown = tokens.count(tokenizer.unk_token_id)
    if unknown > UNKNOWN * len(tokens):
        raise InputError(
            f"{100 * unknown / len(tokens):.0f} % of the text's tokens are unknown to the tokenizer: its files are "
            "missing or wrong, or the text is not in its language"
        )
    ordinary = [row for row in rows if not set(row) <= marks]
    if not ordinary:
        raise InputError("the text tokenises to nothing; pass another with --text")
    return ordinary


def _pad(config: Any, rows: list[list[int]], pad: int) -> dict[str, Tensor]:
    """Ids [B, N], padded on the right, and their mask."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    inputs = dict(input_ids=ids, attention_mask=mask)
    if getattr(config, "is_encoder_decoder", False):  # the decoder reads a start token, then all but the last
        start = getattr(config, "decoder_start_token_id", None) or 0
        inputs.update(
            decoder_input_ids=nn.functional.pad(ids[:, :-1], (1, 0), value=start), decoder_attention_mask=mask
        )
    return inputs


def _keep_accepted(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs that the model's forward accepts."""
    accepted = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return inputs
    return {name: value for name, value in inputs.items() if name in accepted}
