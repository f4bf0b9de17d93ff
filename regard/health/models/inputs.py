"""What a transformers model is run on: text cut into batches, and smooth synthetic signals where it takes no text."""

from __future__ import annotations

import inspect
import math
from importlib import resources

import torch
from torch import Tensor, nn

from regard.health.examine import positions

LENGTH = 256  # tokens per sequence, where the model has so many positions
UNKNOWN = 1 / 3  # of a text's tokens, beyond which it is not the text that would be examined
LONGEST_TOKEN = 64  # characters: what a text is cut by before it is tokenised
SIGNALS = ("pixel_values", "input_features", "input_values")


class InputError(Exception):
    """There is nothing the model could be run on, and why, in one line."""


def sample() -> str:
    return resources.files("regard.health.models").joinpath("sample.txt").read_text(encoding="utf-8")


def texts(model: nn.Module, tokenizer, text: str, length: int | None, batch: int, limit: int) -> list[dict]:
    """At most `limit` batches of token ids and their mask; an encoder-decoder reads the same text on both sides."""
    words = getattr(model.config, "text_config", None) or model.config
    longest = min(positions(model), getattr(words, "max_position_embeddings", None) or 2**31)
    length = min(LENGTH, longest) if length is None else length
    if length > longest:
        raise InputError(f"--length {length} is more than the model's {longest} positions")
    rows = _rows(tokenizer, text[: limit * batch * length * LONGEST_TOKEN], length)[: limit * batch]
    top, known = max(map(max, rows)), getattr(words, "vocab_size", None) or 2**31
    if top >= known:
        raise InputError(f"the tokenizer gives token {top}, but the model has {known}: they do not belong together")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return [
        _taken(model, _padded(model.config, rows[start : start + batch], pad)) for start in range(0, len(rows), batch)
    ]


def _rows(tokenizer, text: str, length: int) -> list[list[int]]:
    special = tokenizer.num_special_tokens_to_add()
    if length <= special:
        raise InputError(f"--length {length} leaves no room beside the tokenizer's {special} special tokens")
    encoded = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True, padding=False)
    rows = encoded["input_ids"]
    rows = [rows] if rows and isinstance(rows[0], int) else rows
    marks = set(tokenizer.all_special_ids)
    if len(tokenizer) <= len(marks):
        raise InputError("the tokenizer knows no token but the special ones: its files are missing")
    told = [one for row in rows for one in row if one not in marks or one == tokenizer.unk_token_id]
    unknown = told.count(tokenizer.unk_token_id)
    if unknown > UNKNOWN * len(told):
        raise InputError(
            f"{100 * unknown / len(told):.0f} % of the text's tokens are unknown to the tokenizer: its files are "
            "missing or others', or the text is not in its language"
        )
    ordinary = [row for row in rows if not set(row) <= marks]
    if not ordinary:
        raise InputError("the text tokenises to nothing; give some with --text")
    return ordinary


def _padded(config, rows: list[list[int]], pad: int) -> dict[str, Tensor]:
    """Ids [B, N] filled up at the right, and which of them are text."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    one = dict(input_ids=ids, attention_mask=mask)
    if getattr(config, "is_encoder_decoder", False):  # the decoder reads a start token, then all but the last
        start = getattr(config, "decoder_start_token_id", None) or 0
        one.update(decoder_input_ids=nn.functional.pad(ids[:, :-1], (1, 0), value=start), decoder_attention_mask=mask)
    return one


def _taken(model: nn.Module, one: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model's forward takes of it."""
    taken = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return one
    return {name: value for name, value in one.items() if name in taken}


def signals(model: nn.Module, name: str, batch: int) -> dict[str, Tensor]:
    """Smooth synthetic images, films, spectrograms or tones: enough to run a model, too little to judge it finely."""
    config = model.config
    if name == "pixel_values":
        return {name: _images(getattr(config, "vision_config", None) or config, batch).to(model.dtype)}
    if name == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 1500)
        many = min(32, getattr(config, "max_target_positions", None) or 32)
        words = torch.randint(0, config.vocab_size, (batch, many), generator=torch.Generator().manual_seed(1))
        words[:, 0] = getattr(config, "decoder_start_token_id", 0) or 0
        signal = _spectrograms(batch, config.num_mel_bins, frames).to(model.dtype)
        return _taken(model, {name: signal, "decoder_input_ids": words})
    if getattr(config, "num_mel_bins", None):
        return {name: _spectrograms(batch, config.num_mel_bins, config.max_length).transpose(1, 2).to(model.dtype)}
    time = torch.arange(16000) / 16000.0
    tones = torch.stack([torch.sin(2 * math.pi * 220.0 * (one + 1) * time) for one in range(batch)])
    return {name: tones.to(model.dtype)}


def _images(config, batch: int) -> Tensor:
    """[B, C, H, W], or [B, frames, C, H, W] for a model of films."""
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
