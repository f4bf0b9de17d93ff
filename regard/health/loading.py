"""From what a command line names to a model and its batches: a folder, a hub name, or module:function."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.examination import positions

LENGTH = 256  # tokens per sequence, where the model has so many positions
SAFE, PICKLED = (".safetensors",), (".bin", ".pt", ".pth", ".ckpt")


class LoadError(Exception):
    """What was asked for cannot be examined, and why, in one line."""


@dataclass
class Subject:
    """What is to be examined, on what."""

    title: str
    model: nn.Module
    batches: list[Any]


def load(
    spec: str,
    text: str | None,
    *,
    length: int | None,
    batch: int,
    limit: int,
    device: str,
    dtype: str | None,
    pickle: bool,
) -> Subject:
    """The model that `spec` names, with `text` (None: the sample) cut into batches for it."""
    if ":" in spec and not os.path.exists(spec):
        return _from_function(spec, device)
    return _from_transformers(spec, text, length, batch, limit, device, dtype, pickle)


def sample() -> str:
    return resources.files("regard.health").joinpath("sample.txt").read_text(encoding="utf-8")


def _from_function(spec: str, device: str) -> Subject:
    module_name, _, function_name = spec.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.split(".")[0] and error.name != module_name:
            raise
        raise LoadError(f"{spec!r}: there is no module {module_name!r} here or among the installed ones") from None
    except AttributeError:
        raise LoadError(f"{spec!r}: the module {module_name} has no {function_name!r}") from None
    finally:
        sys.path.pop(0)
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise LoadError(f"{spec!r}: the function must return (model, batches), got {type(made).__name__}")
    batches = [made[1]] if isinstance(made[1], (Tensor, Mapping)) or callable(made[1]) else list(made[1])
    return Subject(function_name, made[0].to(device), batches)


def _from_transformers(spec, text, length, batch, limit, device, dtype, pickle) -> Subject:
    try:
        import transformers
        from safetensors import SafetensorError
    except ModuleNotFoundError:
        raise LoadError('examining a transformers model needs transformers: pip install "regard[hf]"') from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = Path(spec)
    if folder.exists():
        _check_folder(folder, pickle)
    elif folder.is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1:
        raise LoadError(f"there is no folder {spec!r}")
    options = dict(use_safetensors=None if pickle else True)
    if dtype is not None:
        options["dtype"] = getattr(torch, dtype)
    try:
        model, found = transformers.AutoModel.from_pretrained(spec, **options, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise LoadError(f"{spec!r} could not be loaded: {_first_line(error)}") from None
    _check_weights(spec, model, found["missing_keys"])
    model = model.to(device)
    title = folder.resolve().name if folder.exists() else spec
    name = model.main_input_name
    if name in ("pixel_values", "input_features", "input_values"):
        if text is not None:
            raise LoadError(
                f"{spec!r} takes {name}, not text; leave --text out and it is examined on a synthetic signal"
            )
        return Subject(title, model, _signals(model, name, min(batch, 4)))
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(spec)
    except (OSError, ValueError, KeyError) as error:
        raise LoadError(f"{spec!r} has no tokenizer that could be loaded: {_first_line(error)}") from None
    batches = _token_batches(model, tokenizer, sample() if text is None else text, length, batch, limit)
    return Subject(title, model, batches)


def _check_folder(folder: Path, pickle: bool) -> None:
    if not folder.is_dir():
        raise LoadError(f"{str(folder)!r} is a file; give the folder that holds config.json and the weights")
    if not (folder / "config.json").is_file():
        raise LoadError(f"{str(folder)!r} is no model: it has no config.json")
    suffixes = {path.suffix for path in folder.iterdir()}
    if suffixes & set(SAFE) or pickle:
        return
    if suffixes & set(PICKLED):
        raise LoadError(
            f"{str(folder)!r} has its weights in pickle, which can run any code when it is read; convert them to "
            "safetensors, or pass --allow-pickle if you trust where they come from"
        )
    raise LoadError(f"{str(folder)!r} has no weights: there is no .safetensors file in it")


def _check_weights(spec: str, model: nn.Module, missing: Iterable[str]) -> None:
    """Refuse a model of which most is made up, say of which part it is."""
    missing, known = sorted(missing), {name for name, _ in model.named_parameters()}
    made_up = [name for name in missing if name in known and "pooler" not in name]
    if len(made_up) > len(known) / 2:
        raise LoadError(
            f"{spec!r}: {len(made_up)} of {len(known)} weights are not in its files, {made_up[0]!r} for one; what "
            "would be examined is random"
        )
    if made_up:
        print(f"{spec}: {len(made_up)} weights are not in its files and random: {made_up[0]}, …", file=sys.stderr)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _token_batches(model, tokenizer, text: str, length: int | None, batch: int, limit: int) -> list[dict]:
    longest = min(positions(model), getattr(model.config, "max_position_embeddings", None) or 2**31)
    length = min(LENGTH, longest) if length is None else length
    if length > longest:
        raise LoadError(f"--length {length} is more than the model's {longest} positions")
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    encoded = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True, padding=False)
    rows = encoded["input_ids"]
    rows = [rows] if rows and isinstance(rows[0], int) else rows
    special = len(tokenizer("")["input_ids"])
    rows = [row for row in rows if len(row) > special]
    if not rows:
        raise LoadError("the text tokenises to nothing; give some with --text")
    groups = [rows[start : start + batch] for start in range(0, len(rows), batch)][:limit]
    made = []
    for group in groups:
        padded = tokenizer.pad({"input_ids": group}, return_tensors="pt") if len({len(row) for row in group}) > 1 else {
            "input_ids": torch.tensor(group), "attention_mask": torch.ones(len(group), len(group[0]), dtype=torch.long)
        }  # fmt: skip
        one = {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"]}
        if getattr(model.config, "is_encoder_decoder", False):
            start = getattr(model.config, "decoder_start_token_id", None) or 0
            for name, first in (("input_ids", start), ("attention_mask", 1)):
                one[f"decoder_{name}"] = nn.functional.pad(one[name][:, :-1], (1, 0), value=first)  # one to the right
        made.append(one)
    return made


def _signals(model, name: str, batch: int) -> list[dict]:
    """Smooth synthetic images or spectrograms: enough to run a vision or audio model, not to judge it finely."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    if name == "pixel_values":
        size = getattr(config, "image_size", 224)
        size = size if isinstance(size, int) else size[0]
        coarse = torch.randn(batch, getattr(config, "num_channels", 3), 8, 8, generator=generator)
        return [{name: nn.functional.interpolate(coarse, (size, size), mode="bicubic").to(model.dtype)}]
    if name == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 1500)
        coarse = torch.randn(1, batch, 10, frames // 20 or 1, generator=generator)
        signal = nn.functional.interpolate(coarse, (config.num_mel_bins, frames), mode="bicubic")[0]
        start = getattr(config, "decoder_start_token_id", 0) or 0
        words = torch.randint(0, config.vocab_size, (batch, 32), generator=generator)
        words[:, 0] = start
        return [{name: signal.to(model.dtype), "decoder_input_ids": words}]
    time = torch.arange(16000) / 16000.0
    tones = torch.stack([torch.sin(2 * math.pi * 220.0 * (one + 1) * time) for one in range(batch)])
    return [{name: tones.to(model.dtype)}]
