"""The model and batches that a command line names: a folder, a hub name, or module:function."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.models import inputs
from regard_command import TargetError

SAFE, PICKLED = (".safetensors",), (".bin", ".pt", ".pth", ".ckpt")
OFF_PATH = ("pooler", "masked_spec_embed", "mask_token")  # weights that do not affect attention in a plain forward


@dataclass
class Subject:
    """A model to examine, its batches, and notes for the report."""

    title: str
    model: nn.Module
    batches: Iterable[Any]  # a function may make them one at a time
    notes: dict[str, str] = field(default_factory=dict)
    tokenizer: Any = None  # None if a function made the batches
    predictor: nn.Module | None = None  # the language model that `model` is the base of, if its files have one
    trained: bool = True  # False if the weights are random


def is_function(spec: str) -> bool:
    """True for what brings its own batches: module:function, script.py:trainer, hf-tiny:NAME."""
    return ":" in spec and not os.path.exists(spec)


def load(
    spec: str, text: str | None, *, length: int | None, batch: int, limit: int, device: str, dtype: str | None,
    pickle: bool, missing: bool = False,
) -> Subject:  # fmt: skip
    """Load the model of a folder or a hub name, with `text` (None: the built-in sample) cut into batches.

    Pickled weights are read only with `pickle`; weights that the files lack stay random only with `missing`.
    """
    folder = Path(spec)
    if folder.exists():
        _check_folder(folder, pickle)
    try:
        import transformers
        from huggingface_hub.utils import logging
    except ModuleNotFoundError:
        raise TargetError('examining a transformers model needs transformers: pip install "regard[hf]"') from None
    logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = dict(use_safetensors=None if pickle else True)
    if dtype is not None:
        options["dtype"] = getattr(torch, dtype)
    options.update(output_loading_info=True, trust_remote_code=False, ignore_mismatched_sizes=True)
    try:
        model, predictor, found = _load_model(transformers, spec, options)
    except Exception as error:
        where = "" if os.path.isdir(spec) else "is no folder here, and from the hub it "
        raise TargetError(f"{spec!r} {where}could not be loaded: {describe_error(error)}") from error
    notes = _check_weights(spec, model, found, missing)
    try:
        model = model.to(device)
        predictor = None if predictor is None else predictor.to(device)
    except Exception as error:
        raise TargetError(f"{spec!r} could not be moved to {device}: {describe_error(error)}") from error
    title = _title(folder.resolve()) if folder.exists() else spec
    batches, source, tokenizer = _make_batches(transformers, spec, model, text, length, batch, limit)
    if predictor is not None and predictor.config.name_or_path and not hasattr(predictor.config, "mask_token_id"):
        predictor.config.mask_token_id = tokenizer.mask_token_id
    return Subject(title, model, batches, dict(input=source, **notes), tokenizer, predictor)


def _title(folder: Path) -> str:
    """A folder's name; with that of its parent if it says nothing, as `model` or `checkpoint-500`.

    >>> from regard.health.models.loading import _title
    >>> _title(Path("/models/llama-mini")), _title(Path("/models/llama-mini/checkpoint-500"))
    ('llama-mini', 'llama-mini/checkpoint-500')
    """
    says_little = re.fullmatch(r"models?|weights|checkpoints?|final|best|last|out(put)?|checkpoint-\d+", folder.name)
    return f"{folder.parent.name}/{folder.name}" if says_little else folder.name


def _load_model(transformers: Any, spec: str, options: dict) -> tuple[Any, Any, dict]:
    """(base model, the language model around it or None, loading info), by the class that config.json names."""
    config = transformers.AutoConfig.from_pretrained(spec, trust_remote_code=False)
    name = (getattr(config, "architectures", None) or [""])[0]
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")) and hasattr(transformers, name):
        whole, found = getattr(transformers, name).from_pretrained(spec, **options)
        if not found["missing_keys"] and not found["mismatched_keys"] and whole.base_model is not whole:
            return whole.base_model, whole, found
    model, found = transformers.AutoModel.from_pretrained(spec, **options)
    return model, None, found


def describe_error(error: BaseException) -> str:
    """An error's type and message in one line; the message alone of a TargetError, which is a sentence."""
    text = one_line(error)
    return text if isinstance(error, TargetError) or text == type(error).__name__ else f"{type(error).__name__}: {text}"


def one_line(error: BaseException) -> str:
    """An error's message in one line of at most 400 characters; its type if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:399]}…"


def load_function(spec: str, device: str, limit: int) -> Subject:
    module_name, _, function_name = spec.partition(":")
    if not (module_name and function_name):
        raise TargetError(f"{spec!r} does not name a function; write module:function")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing a module may run anything
        if isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.split(".")[0]):
            raise TargetError(f"{spec!r}: there is no module {module_name!r} in this folder or installed") from None
        raise TargetError(f"{spec!r}: importing {module_name} raised {describe_error(error)}") from error
    finally:
        sys.path.pop(0)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise TargetError(f"{spec!r}: the module {module_name} has no function {function_name!r}")
    try:
        result = function()
    except (Exception, SystemExit) as error:
        raise TargetError(f"{spec!r}: the function raised {describe_error(error)}") from error
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        names = [type(x).__name__ for x in result] if isinstance(result, tuple) else []
        got = f"({', '.join(names)})" if names else type(result).__name__
        raise TargetError(f"{spec!r}: the function must return (model, batches), a torch.nn.Module first, got {got}")
    model, batches = result
    if any(p.is_meta for p in model.parameters()):
        raise TargetError(f"{spec!r}: its weights are on the meta device, which have no values; load them first")
    if isinstance(batches, (Tensor, Mapping)) or callable(batches):
        batches = [batches]
    if not isinstance(batches, Iterable):
        raise TargetError(f"{spec!r}: batches must be an iterable of batches, got {type(batches).__name__}")
    try:
        batches, model = itertools.islice(batches, limit), model.to(device)
    except Exception as error:
        raise TargetError(f"{spec!r}: its model or batches raised {describe_error(error)}") from error
    return Subject(function_name, model, batches, dict(input=f"the batches of {spec}"))


def _make_batches(
    transformers: Any, spec: str, model: Any, text: str | None, length: int | None, batch: int, limit: int
) -> tuple[list[dict], str, Any]:
    """The model's batches, a description of them, and the tokenizer that made them."""
    is_clip = hasattr(model, "get_text_features") and hasattr(model, "get_image_features")
    if model.main_input_name != "input_ids" or is_clip:
        raise TargetError(
            f"{spec!r} takes more than text; write a function that returns (model, batches), and pass module:function"
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(spec, trust_remote_code=False)
    except Exception as error:
        raise TargetError(f"the tokenizer of {spec!r} could not be loaded: {describe_error(error)}") from error
    try:
        batches = inputs.make_text_batches(
            model, tokenizer, inputs.sample_text() if text is None else text, length, batch, limit
        )
    except inputs.InputError as error:
        raise TargetError(f"{spec!r}: {error}") from None
    return batches, "the built-in sample" if text is None else "the text given", tokenizer


def _check_folder(folder: Path, pickle: bool) -> None:
    if not folder.is_dir():
        raise TargetError(f"{str(folder)!r} is a file; pass the folder with config.json and the weights")
    if not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        missing = "it has no config.json; pass a folder that save_pretrained wrote"
        why = "only an adapter; merge it into its model and save that" if adapter else missing
        raise TargetError(f"{str(folder)!r} is not a model: {why}")
    suffixes = {path.suffix for path in folder.iterdir()}
    if suffixes & set(SAFE) or pickle:
        return
    if suffixes & set(PICKLED):
        raise TargetError(
            f"{str(folder)!r} has pickled weights, which can run any code when they are read; convert them to "
            "safetensors, or pass --allow-pickle if you trust their source"
        )
    raise TargetError(f"{str(folder)!r} has no weights: no .safetensors file; save them with model.save_pretrained")


def _check_weights(spec: str, model: nn.Module, found: dict, allowed: bool) -> dict[str, str]:
    """Refuse a model whose files lack weights, or return a note that names them."""
    for name, actual, expected in sorted(found["mismatched_keys"], key=str):
        raise TargetError(
            f"{spec!r}: {name} has shape {list(actual)} in its files, but config.json asks for {list(expected)}"
        )
    known = {name for name, _ in model.named_parameters()}
    absent = (name for name in found["missing_keys"] if not any(part in name for part in OFF_PATH))
    random = sorted(name for name in absent if name in known)
    if not random:
        return {}
    shown = ", ".join(random[:3]) + (", …" if len(random) > 3 else "")
    text = f"{len(random)} of {len(known)} weights are not in its files and would be random: {shown}"
    if not allowed:
        raise TargetError(f"{spec!r}: {text}; pass --allow-missing to examine it anyway")
    return dict(random_weights=text.replace("would be", "are"))
