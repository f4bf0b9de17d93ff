"""Batches for a transformers model: text cut into sequences, or synthetic signals if it takes no text."""

from __future__ import annotations

import inspect
import math
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.examine import max_positions

LENGTH = 256  # tokens per sequence, if the model has so many positions
UNKNOWN = 1 / 3  # largest fraction of unknown tokens
LONGEST_TOKEN = 64  # characters; the text is cut by it before it is tokenised
SIGNALS = ("pixel_values", "input_features", "input_values")


class InputError(Exception):
    """Says in one line why there is no input for the model."""


def sample_text() -> str:
    """The built-in text."""
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
        raise InputError("the tokenizer knows only special tokens: its files are missing")
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


def make_signals(model: nn.Module, name: str, batch: int) -> dict[str, Tensor]:
    """Smooth synthetic images, videos, spectrograms or tones."""
    config: Any = model.config
    dtype = next(model.parameters()).dtype
    if name == "pixel_values":
        return {name: _images(getattr(config, "vision_config", None) or config, batch).to(dtype)}
    if name == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 1500)
        length = min(32, getattr(config, "max_target_positions", None) or 32)
        ids = torch.randint(0, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))
        ids[:, 0] = getattr(config, "decoder_start_token_id", 0) or 0
        signal = _spectrograms(batch, config.num_mel_bins, frames).to(dtype)
        return _keep_accepted(model, {name: signal, "decoder_input_ids": ids})
    if getattr(config, "num_mel_bins", None):
        return {name: _spectrograms(batch, config.num_mel_bins, config.max_length).transpose(1, 2).to(dtype)}
    time = torch.arange(16000) / 16000.0
    tones = torch.stack([torch.sin(2 * math.pi * 220.0 * (at + 1) * time) for at in range(batch)])
    return {name: tones.to(dtype)}


def _images(config: Any, batch: int) -> Tensor:
    """[B, C, H, W], or [B, frames, C, H, W] for a video model."""
    size, channels = getattr(config, "image_size", 224), getattr(config, "num_channels", 3)
    high, wide = (size, size) if isinstance(size, int) else tuple(size)
    frames = getattr(config, "num_frames", None)
    coarse = torch.randn(batch * (frames or 1), channels, 8, 8, generator=torch.Generator().manual_seed(0))
    fine = nn.functional.interpolate(coarse, (high, wide), mode="bicubic")
    return fine.unflatten(0, (batch, frames)) if frames else fine


def _spectrograms(batch: int, bins: int, frames: int) -> Tensor:
    """[B, bins, frames]."""
    coarse = torch.randn(1, batch, 10, frames // 20 or 1, generator=torch.Generator().manual_seed(0))
    return nn.functional.interpolate(coarse, (bins, frames), mode="bicubic")[0]
