"""From what a command line names to a model and its batches: a folder, a hub name, or module:function."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.models import inputs

SAFE, PICKLED = (".safetensors",), (".bin", ".pt", ".pth", ".ckpt")
BESIDE = ("pooler", "masked_spec_embed", "mask_token")  # weights that reach no attention when a model is only run


class LoadError(Exception):
    """What was asked for cannot be examined, and why, in one line."""


@dataclass
class Subject:
    """What is to be examined, on what; `notes` are for the report."""

    title: str
    model: nn.Module
    batches: Iterable[Any]  # made as they are asked for, where a function brings them
    many: int | None  # batches, if it is known
    notes: dict[str, str] = field(default_factory=dict)


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
    missing: bool = False,
) -> Subject:
    """The model that `spec` names, with `text` (None: the sample) cut into batches for it.

    Weights in pickle are read only if `pickle`, and weights that are not in the files left random only if `missing`.
    """
    if ":" in spec and not os.path.exists(spec):
        given = [name for name, value in dict(text=text, length=length, dtype=dtype).items() if value is not None]
        if given:
            raise LoadError(f"{spec!r} brings its own model and batches; leave out --{given[0]}")
        return _from_function(spec, device, limit)
    return _from_transformers(spec, text, length, batch, limit, device, dtype, pickle, missing)


def told(error: BaseException) -> str:
    """An error in one line: its type, then what it says."""
    said = one_line(error)
    return said if said == type(error).__name__ else f"{type(error).__name__}: {said}"


def one_line(error: BaseException) -> str:
    """What an error says, in one line of no more than 400 characters; its type if it says nothing."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= 400 else f"{said[:399]}…"


def _from_function(spec: str, device: str, limit: int) -> Subject:
    module_name, _, function_name = spec.partition(":")
    if not (module_name and function_name):
        raise LoadError(f"{spec!r} names no function; write module:function")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module may do anything when it is imported
        if isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.split(".")[0]):
            raise LoadError(f"{spec!r}: there is no module {module_name!r} here or among the installed ones") from None
        raise LoadError(f"{spec!r}: importing {module_name} raised {told(error)}") from error
    finally:
        sys.path.pop(0)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise LoadError(f"{spec!r}: the module {module_name} has no function {function_name!r}")
    try:
        made = function()
    except (Exception, SystemExit) as error:
        raise LoadError(f"{spec!r}: the function raised {told(error)}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        got = f"({', '.join(type(x).__name__ for x in made)})" if isinstance(made, tuple) else type(made).__name__
        raise LoadError(f"{spec!r}: the function must return (model, batches), a torch.nn.Module first, got {got}")
    model, batches = made
    if isinstance(batches, (Tensor, Mapping)) or callable(batches):
        batches = [batches]
    if not isinstance(batches, Iterable):
        raise LoadError(f"{spec!r}: batches must be an iterable of batches, got {type(batches).__name__}")
    try:
        many = min(len(batches), limit)  # type: ignore[arg-type]
    except Exception:  # a generator has no length, and a DataLoader may not
        many = None
    try:
        batches, model = itertools.islice(batches, limit), model.to(device)
    except Exception as error:
        raise LoadError(f"{spec!r}: its model or batches raised {told(error)}") from error
    return Subject(function_name, model, batches, many, dict(input=f"the batches of {spec}"))


def _from_transformers(spec, text, length, batch, limit, device, dtype, pickle, missing) -> Subject:
    try:
        import transformers
        from huggingface_hub.utils import logging
    except ModuleNotFoundError:
        raise LoadError('examining a transformers model needs transformers: pip install "regard[hf]"') from None
    logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = Path(spec)
    if folder.exists():
        _check_folder(folder, pickle)
    elif folder.is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1:
        raise LoadError(f"there is no folder {spec!r}")
    options: dict[str, Any] = dict(use_safetensors=None if pickle else True)
    if dtype is not None:
        options["dtype"] = getattr(torch, dtype)
    try:
        model, found = transformers.AutoModel.from_pretrained(
            spec, **options, output_loading_info=True, trust_remote_code=False, ignore_mismatched_sizes=True
        )
    except Exception as error:
        raise LoadError(f"{spec!r} could not be loaded: {told(error)}") from error
    notes = _check_weights(spec, model, found, missing)
    try:
        model = model.to(device)
    except Exception as error:
        raise LoadError(f"{spec!r} could not be moved to {device}: {told(error)}") from error
    title = folder.resolve().name if folder.exists() else spec
    batches, source = _batches(transformers, spec, model, text, length, batch, limit)
    if "synthetic" in source:
        notes["caution"] = "a synthetic signal is enough to run a model, too little to judge it finely"
    return Subject(title, model, batches, len(batches), dict(input=source, **notes))


def _batches(transformers, spec: str, model, text, length, batch: int, limit: int) -> tuple[list[dict], str]:
    """The model's batches, and in words what they are."""
    name = model.main_input_name
    pairs = hasattr(model, "get_text_features") and hasattr(model, "get_image_features")  # CLIP and its kin
    if name in inputs.SIGNALS and not pairs:
        if text is not None:
            raise LoadError(
                f"{spec!r} takes {name}, not text; leave --text out and it is examined on a synthetic signal"
            )
        return [inputs.signals(model, name, min(batch, 4))], f"synthetic {name}"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(spec, trust_remote_code=False)
    except Exception as error:
        raise LoadError(f"{spec!r} has no tokenizer that could be loaded: {told(error)}") from error
    try:
        batches = inputs.texts(model, tokenizer, inputs.sample() if text is None else text, length, batch, limit)
    except inputs.InputError as error:
        raise LoadError(f"{spec!r}: {error}") from None
    source = "the built-in sample" if text is None else "the text given"
    if pairs:
        for one in batches:
            one.update(inputs.signals(model, "pixel_values", len(one["input_ids"])))
        source += " and synthetic pixel_values"
    return batches, source


def _check_folder(folder: Path, pickle: bool) -> None:
    if not folder.is_dir():
        raise LoadError(f"{str(folder)!r} is a file; give the folder that holds config.json and the weights")
    if not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        why = "an adapter alone; merge it into its model, and save that" if adapter else "it has no config.json"
        raise LoadError(f"{str(folder)!r} is no model: {why}")
    suffixes = {path.suffix for path in folder.iterdir()}
    if suffixes & set(SAFE) or pickle:
        return
    if suffixes & set(PICKLED):
        raise LoadError(
            f"{str(folder)!r} has its weights in pickle, which can run any code when it is read; convert them to "
            "safetensors, or pass --allow-pickle if you trust where they come from"
        )
    raise LoadError(f"{str(folder)!r} has no weights: there is no .safetensors file in it")


def _check_weights(spec: str, model: nn.Module, found: dict, allowed: bool) -> dict[str, str]:
    """Refuse a model that is in part made up, or note which part."""
    for name, there, wanted in sorted(found["mismatched_keys"], key=str):
        raise LoadError(
            f"{spec!r}: {name} has shape {list(there)} in its files, but its config.json asks for {list(wanted)}"
        )
    known = {name for name, _ in model.named_parameters()}
    missing = (name for name in found["missing_keys"] if not any(part in name for part in BESIDE))
    made_up = sorted(name for name in missing if name in known)
    if not made_up:
        return {}
    shown = ", ".join(made_up[:3]) + (", …" if len(made_up) > 3 else "")
    said = f"{len(made_up)} of {len(known)} weights are not in its files and would be random: {shown}"
    if not allowed:
        raise LoadError(f"{spec!r}: {said}; pass --allow-missing to examine it so all the same")
    return dict(random_weights=said.replace("would be", "are"))
