"""Is a transformers model run by the library's own code, and what does that code compute?

What was patched, registered, hooked or set is named. The reference is a pristine twin: the same configuration and
weights in a fresh process, run by transformers' own eager code, where nothing of that exists.
`python -m regard.health.probe.library FOLDER` is that process.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.checks.rule import NotApplicable, NothingToCheck
from regard.health.probe.probe import main_output
from regard.health.tokens.text import TokenBatch

OWN = (
    "transformers", "torch", "regard", "accelerate", "peft", "safetensors", "huggingface_hub", "functools",
    "contextlib",
)  # fmt: skip
HELPERS = (
    "transformers.masking_utils", "transformers.cache_utils", "transformers.modeling_rope_utils",
    "transformers.integrations.sdpa_attention", "transformers.integrations.eager_paged",
    "transformers.integrations.flex_attention", "transformers.modeling_layers", "transformers.activations",
    "transformers.pytorch_utils", "transformers.loss.loss_utils",
)  # fmt: skip
PYTHON = Path(sysconfig.get_path("stdlib"))
FUNCTIONS = ("scaled_dot_product_attention", "softmax", "dropout", "linear", "layer_norm", "embedding")  # of torch


def is_library_model(model: nn.Module) -> bool:
    """True if the model's class is one of transformers."""
    return type(model).__module__.startswith("transformers.models.") and hasattr(model, "config")


def is_library_code(model: nn.Module) -> bool:
    """True if a transformers model runs nothing but the library's code."""
    return is_library_model(model) and next(foreign_code(model), None) is None


def foreign_code(model: nn.Module) -> Iterator[str]:
    """Yields what is not the library's own: classes, methods, functions, registered attention and hooks, by name."""
    modules: set[ModuleType] = set()
    for name, module in model.named_modules():
        kind = type(module)
        if not _is_own(kind.__module__):
            yield f"{name or 'the model'} is a {kind.__module__}.{kind.__name__}"
        elif kind.__module__.startswith("transformers.") and kind.__module__ in sys.modules:
            modules.add(sys.modules[kind.__module__])
        for attribute, value in vars(module).items():
            if callable(value) and not isinstance(value, (nn.Module, type)) and _is_foreign(value):
                yield f"{name or 'the model'}.{attribute} is {_describe(value)}"
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for hook in hooks.values():
                if _is_foreign(hook):
                    yield f"{name or 'the model'} has the hook {_describe(hook)}"
    modules |= {sys.modules[name] for name in HELPERS if name in sys.modules}
    for source in sorted(modules, key=lambda one: one.__name__):
        yield from _foreign_in(source)
    for name in FUNCTIONS:
        found = getattr(nn.functional, name)
        if _is_foreign(found):
            yield f"torch.nn.functional.{name} is {_describe(found)}"
    yield from _foreign_registered(model)


def _foreign_in(source: ModuleType) -> Iterator[str]:
    """Functions of a module, and methods of its classes, that were put there from elsewhere."""
    for name, value in vars(source).items():
        if isinstance(value, type) and value.__module__ == source.__name__:
            for method, function in vars(value).items():
                function = getattr(function, "__func__", getattr(function, "fget", None) or function)
                if callable(function) and _is_foreign(function):
                    yield f"{source.__name__}.{name}.{method} is {_describe(function)}"
        elif callable(value) and not isinstance(value, type) and _is_foreign(value):
            yield f"{source.__name__}.{name} is {_describe(value)}"


def _foreign_registered(model: nn.Module) -> Iterator[str]:
    """The functions behind the model's attn_implementation, if others wrote them."""
    used: Any = getattr(getattr(model, "config", None), "_attn_implementation", None)
    try:
        utils = importlib.import_module("transformers.modeling_utils")
        masks = importlib.import_module("transformers.masking_utils")
        for title, table in (("attention", utils.AttentionInterface), ("mask", masks.AttentionMaskInterface)):
            found = {**table._global_mapping, **getattr(table, "_local_mapping", {})}.get(used)
            if found is not None and _is_foreign(found):
                yield f"the {title} function of {used!r} is {_describe(found)}"
    except (ImportError, AttributeError):
        return


def _is_foreign(function: Any) -> bool:
    """True for a Python function whose code stands in none of the libraries."""
    while isinstance(function, partial) or hasattr(function, "__wrapped__"):
        if isinstance(function, partial):
            function = function.func
            continue
        if not _in_library(function):
            return True
        function = function.__wrapped__
    function = getattr(function, "__func__", function)
    return isinstance(function, FunctionType) and not _in_library(function)


def _in_library(function: Any) -> bool:
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    if code.co_filename.startswith("<"):  # made by a dataclass or torch.fx, or typed by the user
        return _is_own(function.__globals__.get("__name__", ""))
    return _is_library_file(code.co_filename)


def _is_own(module: str) -> bool:
    package = module.partition(".")[0]
    return package in OWN or package in sys.stdlib_module_names


@cache
def _is_library_file(name: str) -> bool:
    """True for a file of the packages as they are installed, or of Python, wherever the user's own code lies."""
    if Path(name).is_relative_to(PYTHON) and "site-packages" not in name:  # typing, abc: imported by transformers
        return True
    files = [Path(file) for package in OWN if (file := getattr(sys.modules.get(package), "__file__", None))]
    return any(Path(name).is_relative_to(file.parent if file.name == "__init__.py" else file) for file in files)


def _describe(function: Any) -> str:
    function = getattr(function, "func", function)
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


LARGEST = 2**31  # bytes of weights that are written to a file
SECONDS = 120.0
MODULE = "regard.health.probe.library"  # what the other process runs
MAIN = "the model's output"
BIGGEST = 2**22  # numbers of a module's output that are kept


def library_class(model: nn.Module) -> type | None:
    """The class of transformers that a model is, or that it derives from."""
    return next((kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers.models.")), None)


def run_twin(model: nn.Module, batch: TokenBatch) -> dict[str, Tensor]:
    """Outputs of the twin's modules by name, in order of execution; raises NotApplicable where it cannot be built."""
    kind, config = library_class(model), getattr(model, "config", None)
    if kind is None or not (is_library_model(model) or isinstance(model, kind)):
        raise NothingToCheck("the model is not one of transformers, so there is no library code to compare it with")
    if not type(config).__module__.startswith("transformers."):
        raise NotApplicable(f"its configuration {type(config).__name__} is not one of transformers")
    state = model.state_dict()
    size = sum(x.numel() * x.element_size() for x in state.values())
    if size > LARGEST:
        raise NotApplicable(f"its weights are {size / 2**30:.1f} GiB; a second process is given at most 2 GiB")
    if batch.args[1:] or any(x.is_meta for x in state.values()):
        raise NotApplicable("the batch has positional arguments beside the ids, or weights have no values")
    with tempfile.TemporaryDirectory(prefix="regard-twin-") as folder:
        _write(Path(folder), model, kind, state, batch)
        paths = os.pathsep.join(path for path in (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")) if path)
        done = subprocess.run(
            [sys.executable, "-m", MODULE, folder], capture_output=True, text=True, timeout=SECONDS,
            env={**os.environ, "PYTHONPATH": paths, "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise NotApplicable(f"the library's own model could not be built from this configuration: {last[:160]}")
        return _read(Path(folder) / "outputs.safetensors")


def _write(folder: Path, model: Any, kind: type, state: dict[str, Tensor], batch: TokenBatch) -> None:
    from safetensors.torch import save_file

    model.config.save_pretrained(folder)
    weights = {name: x.detach().cpu().contiguous().clone() for name, x in state.items()}  # tied ones apart
    save_file(weights, folder / "weights.safetensors")
    named = dict(batch.named)
    if batch.args:
        named[getattr(model, "main_input_name", "input_ids")] = batch.args[0]
    tensors = {name: x.cpu().contiguous() for name, x in named.items() if isinstance(x, Tensor)}
    save_file(tensors, folder / "inputs.safetensors")
    plain = {name: x for name, x in named.items() if isinstance(x, (bool, int, float, str))}
    note = dict(module=kind.__module__, name=kind.__qualname__, plain=plain)
    (folder / "twin.json").write_text(json.dumps(note), encoding="utf-8")


def _read(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found = load_file(file)
    return {name.split("|", 1)[1]: found[name] for name in sorted(found)}


@contextmanager
def module_outputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collects the first tensor that every module returns, by name, in the order in which they end."""
    found: dict[str, Tensor] = {}

    def keep(name: str, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        is_real = isinstance(first, Tensor) and first.is_floating_point()
        if is_real and name not in found and first.numel() <= BIGGEST:
            found[name] = first.detach().cpu().contiguous().clone()

    hooks = [
        module.register_forward_hook(lambda module, inputs, output, name=name: keep(name, output))
        for name, module in model.named_modules() if name
    ]  # fmt: skip
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def collect(model: nn.Module, args: tuple, named: dict[str, Any]) -> dict[str, Tensor]:
    """The outputs of all modules, and of the model as `MAIN`."""
    with torch.no_grad(), module_outputs(model) as found:
        output = main_output(model(*args, **named))
    return {**found, MAIN: output.detach().cpu().contiguous().clone()}


def build(folder: Path) -> nn.Module:
    """The model that a folder describes, by the library's own eager code."""
    from safetensors.torch import load_file

    note = json.loads((folder / "twin.json").read_text(encoding="utf-8"))
    kind = getattr(importlib.import_module(note["module"]), note["name"])
    config = kind.config_class.from_pretrained(folder)
    model = kind._from_config(config, attn_implementation="eager")
    model.load_state_dict(load_file(folder / "weights.safetensors"), strict=True, assign=True)
    model.tie_weights()
    return model.eval()


def main(folder: Path) -> None:
    """Runs the twin and writes what its modules return."""
    from safetensors.torch import load_file, save_file

    model = build(folder)
    plain = json.loads((folder / "twin.json").read_text(encoding="utf-8"))["plain"]
    found = collect(model, (), {**load_file(folder / "inputs.safetensors"), **plain})
    save_file({f"{at:06d}|{name}": x for at, (name, x) in enumerate(found.items())}, folder / "outputs.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
