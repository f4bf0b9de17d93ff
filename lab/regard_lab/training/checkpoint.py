"""Save and load a run in one safetensors file: weights, optimizer, random state, step, history.

The file is written atomically: under a temporary name, then renamed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.health.report import files


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, notes: dict) -> None:
    """Save a run; `notes` (step, history, …) must be JSON."""
    from safetensors.torch import save as serialize

    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            tensors[f"optimizer.{index}.{name}"] = torch.as_tensor(value)
    tensors["random.cpu"] = torch.get_rng_state()
    if any(value.is_cuda for value in tensors.values()):
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    on_cpu = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_atomically(path, serialize(on_cpu, {"notes": json.dumps(notes)}))


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, check: Callable[[dict], None] = lambda notes: None
) -> dict:
    """Restore a run and return its notes; `check` is called with them first and may raise."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        notes = json.loads(file.metadata()["notes"])
        check(notes)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in _with_prefix("optimizer", tensors).items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    model.load_state_dict(_with_prefix("model", tensors))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"])
    return notes


def _with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically, creating its folder; an error names the file, not the temporary one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        files.write(path, content)
    except OSError as wrong:
        raise OSError(wrong.errno, wrong.strerror or str(wrong), str(path)) from wrong
