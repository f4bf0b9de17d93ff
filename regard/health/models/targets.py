"""What a command line may name: a folder, a hub name, `hf-tiny:NAME`, `module:function` or `script.py:trainer`."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from regard_command import SCRIPT, TINY, TargetError, require_on_hub, require_target

ROWS, LENGTH, PADDING = 4, 48, 5  # of the batch of a tiny model
ENDINGS = ("ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # of classes, best first


def load_target(spec: str, **options: Any) -> Any:
    """The `Subject` that a target names; `options` are those of `loading.load`."""
    from regard.health.models import loading

    require_target(spec)
    if not loading.is_function(spec):
        return loading.load(spec, **options)
    given = [name for name in ("text", "length", "dtype") if options.get(name) is not None]
    if given:
        raise TargetError(f"{spec!r} brings its own model and batches; leave out --{given[0]}")
    if spec.startswith(TINY):
        return load_tiny(spec)
    script, device, limit = SCRIPT.fullmatch(spec), options["device"], options["limit"]
    if script is not None:
        return load_script(Path(script["path"]), script["name"], device, limit)
    return loading.load_function(spec, device, limit)


def load_tiny(spec: str) -> Any:
    """A small model of an architecture with random weights, and a padded batch of random tokens, images or sounds."""
    from regard.health.models.loading import Subject
    from regard.health.models.tiny_architectures import NotBuilt
    from regard.health.models.tiny_inputs import find_runnable

    name = spec.removeprefix(TINY)
    read = partial(_read_config, name, spec)
    sizes = dict(rows=ROWS, length=LENGTH, padding=PADDING)
    try:
        endings = ENDINGS[::-1] if _is_encoder_decoder(read) else ENDINGS
        model, make = find_runnable(read, (*endings, None), attention=None, **sizes)
    except NotBuilt as error:
        raise TargetError(
            f"{spec!r} could not be built small: {str(error)[:300]}; write a function that returns (model, batches)"
        ) from None
    note = f"{LENGTH} random tokens, images or sounds; random weights"
    batches = [make(seed=seed, **sizes) for seed in range(2)]
    return Subject(f"{TINY}{name}", model, batches, dict(input=note), trained=False)


def _is_encoder_decoder(read: Callable[[str], Any]) -> bool:
    from regard.health.models.tiny_architectures import WAYS, NotBuilt

    for way in WAYS:
        with contextlib.suppress(NotBuilt):
            return getattr(read(way), "is_encoder_decoder", False)
    return False


def _read_config(name: str, spec: str, way: str) -> Any:
    """The small configuration of a model type, of a folder, or of a hub name."""
    from regard.health.models.tiny_architectures import NotBuilt, list_names, make_config, one_line, shrink

    try:
        if os.path.isdir(name) or "/" in name:
            import transformers

            if not os.path.isdir(name):
                require_on_hub(name)
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
            try:
                return shrink(config, way)
            except Exception as error:
                raise NotBuilt(f"its small configuration: {one_line(error)}") from error
        known = {one.replace("-", "_"): one for one in list_names()}
        name = known.get(name.replace("-", "_"), name)
        if name in known.values():
            return make_config(name, way)
    except (TargetError, NotBuilt):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise TargetError(f"{spec!r}: its configuration could not be read: {type(error).__name__}: {text}") from error
    near = difflib.get_close_matches(name, list_names(), n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else "pass a model type of transformers, such as qwen3"
    raise TargetError(f"{spec!r}: transformers has no configuration {name!r}; {hint}")


class Stopped(BaseException):
    """Ends a script at `trainer.train()`, which must not train."""


def load_script(path: Path, name: str, device: str, limit: int) -> Any:
    """The model and batches of a script's trainer, or of a function of it that returns one or (model, batches)."""
    from regard.health.models.loading import Subject, describe_error

    spec = f"{path}:{name}"
    seen: list[Any] = []
    try:
        module = _run_script(path, seen)
    except (Exception, SystemExit) as error:
        raise TargetError(f"{spec!r}: running {path.name} raised {describe_error(error)}") from error
    found = module.get(name, seen[0] if seen else None)
    if found is None:
        raise TargetError(
            f'{spec!r}: {path.name} defines no {name!r} outside of `if __name__ == "__main__"`; write a function that '
            f"returns the trainer and pass {path.name}:function"
        )
    if callable(found) and not hasattr(found, "get_train_dataloader"):
        try:
            found = found()
        except Stopped:
            found = seen[-1]
        except (Exception, SystemExit) as error:
            raise TargetError(f"{spec!r}: the function raised {describe_error(error)}") from error
    if hasattr(found, "get_train_dataloader"):
        model, batches, tokenizer = _read_trainer(found, spec, limit)
        return Subject(name, model, batches, dict(input=f"the training batches of {spec}"), tokenizer)
    import torch

    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], torch.nn.Module)):
        got = type(found).__name__
        raise TargetError(f"{spec!r} must be a Trainer, or a function that returns one or (model, batches), got {got}")
    model, given = found
    if any(p.is_meta for p in model.parameters()):
        raise TargetError(f"{spec!r}: its weights are on the meta device, which have no values; load them first")
    single = isinstance(given, (torch.Tensor, Mapping)) or callable(given)
    return Subject(
        name, model.to(device), list(itertools.islice([given] if single else given, limit)),
        dict(input=f"the batches of {spec}"),
    )  # fmt: skip


def _run_script(path: Path, seen: list[Any]) -> dict[str, Any]:
    """Runs a script as a module up to the first `trainer.train()`; returns its names, keeps the trainer in `seen`."""
    import types

    import transformers

    trainer: Any = transformers.Trainer
    before = trainer.train

    def stop(self: Any, *arguments: Any, **named: Any) -> None:
        seen.append(self)
        raise Stopped

    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.path.insert(0, str(path.parent.resolve()))
    arguments, sys.argv = sys.argv, [str(path)]
    trainer.train = stop
    known, sys.modules[path.stem] = sys.modules.get(path.stem), module
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except Stopped:
        pass
    finally:
        trainer.train = before  # type: ignore[method-assign]
        sys.path.pop(0)
        sys.argv = arguments
        if known is not None:
            sys.modules[path.stem] = known
    return vars(module)


def _read_trainer(trainer: Any, spec: str, limit: int) -> tuple[Any, list[Any], Any]:
    """(model, the first batches of its collator, tokenizer) of a Hugging Face Trainer."""
    import torch

    from regard.health.models.loading import describe_error

    try:
        with torch.random.fork_rng(devices=[]):
            batches = list(itertools.islice(trainer.get_train_dataloader(), limit))
    except Exception as error:
        raise TargetError(f"{spec!r}: its training batches could not be made: {describe_error(error)}") from error
    if not batches:
        raise TargetError(f"{spec!r}: its loader gave no batch; check train_dataset and drop_last")
    device = next((p.device for p in trainer.model.parameters()), torch.device("cpu"))
    moved = [{k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in one.items()} for one in batches]
    return trainer.model, moved, getattr(trainer, "processing_class", None)
