"""All that a run needs to go on, in one safetensors file: weights, optimizer, random state, step, history.

The file appears whole or not at all: it is written beside its place and then moved there.

>>> import tempfile, pathlib
>>> from regard.lab.training import checkpoint
>>> layer = torch.nn.Linear(2, 2)
>>> optimizer = torch.optim.AdamW(layer.parameters())
>>> path = pathlib.Path(tempfile.mkdtemp(), "run.safetensors")
>>> checkpoint.save(path, layer, optimizer, {"step": 7})
>>> checkpoint.load(path, layer, optimizer)
{'step': 7}
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.health.report import files


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, notes: dict) -> None:
    """`notes` is what JSON can hold: the step, the history so far."""
    from safetensors.torch import save as serialized

    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            tensors[f"optimizer.{index}.{name}"] = torch.as_tensor(value)
    tensors["random.cpu"] = torch.get_rng_state()
    if any(value.is_cuda for value in tensors.values()):
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    written_whole(path, serialized(on_cpu(tensors), {"notes": json.dumps(notes)}))


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, check: Callable[[dict], None] = lambda notes: None
) -> dict:
    """Put everything back and return the notes; `check` sees them first, and may refuse."""
    from safetensors import safe_open

    with readable(path):
        with safe_open(path, "pt") as file:
            notes = json.loads(file.metadata()["notes"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in _below("optimizer", tensors).items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = value
    check(notes)
    with readable(path):
        model.load_state_dict(_below("model", tensors))
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        torch.set_rng_state(tensors["random.cpu"])
        if "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"])
    return notes


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """What goes wrong in here is the file's fault: a ValueError that names it and the way out."""
    try:
        yield
    except OSError:
        raise
    except Exception as wrong:
        why = str(wrong).strip().partition("\n")[0]
        raise ValueError(
            f"{path} is damaged ({type(wrong).__name__}: {why}); remove it, and its run begins anew, or choose another "
            "--out"
        ) from wrong


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, one transfer per dtype and device: each would wait for the device."""
    copies = {}
    for kind in {(value.dtype, value.device) for value in tensors.values()}:
        names = [name for name, value in tensors.items() if (value.dtype, value.device) == kind]
        parts = torch.cat([tensors[name].detach().flatten() for name in names]).cpu()
        for name, part in zip(names, parts.split([tensors[name].numel() for name in names]), strict=True):
            copies[name] = part.reshape(tensors[name].shape).clone()
    return copies


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}


def written_whole(path: Path, content: str | bytes) -> None:
    """Write a file, and its folder where there is none; an error names the file, not the one beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        files.write(path, content)
    except OSError as wrong:
        raise OSError(wrong.errno, wrong.strerror or str(wrong), str(path)) from wrong
