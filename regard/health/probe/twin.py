"""A pristine twin: the same configuration and weights in a fresh process, run by transformers' own eager code.

Nothing that was patched, registered, swapped or hooked here exists there, so its outputs are a reference for every
module of a transformers model. `python -m regard.health.probe.twin FOLDER` is that process.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.checks.rule import NotApplicable, NothingToCheck
from regard.health.probe.library import is_library_model
from regard.health.probe.probe import main_output
from regard.health.tokens.text import TokenBatch

LARGEST = 2**31  # bytes of weights that are written to a file
SECONDS = 120.0
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
            [sys.executable, "-m", "regard.health.probe.twin", folder], capture_output=True, text=True, timeout=SECONDS,
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
