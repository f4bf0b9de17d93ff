"""`Experiment`, `Preset`, `Setting` and `Trial`: what a file in `experiments/` defines.

    run    = one variant × one seed: `make(setting)` → a `Trial`, trained for `preset.steps` steps
    record = what a run leaves: its history of evaluations, its last one, whether and where it diverged
    result = all records of an experiment, and per variant a t-interval over the seeds

An experiment defines what varies, how a model is made from it, and its size; training, checkpoints, results and
progress are shared. `experiments/scale.py` is a short one.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from regard.table import Table
    from regard_lab.figure import Figure


@dataclass(frozen=True)
class Setting:
    """The inputs of one run. `options` are the preset's sizes, overridden by the variant's own."""

    options: Mapping[str, Any]
    seed: int
    data: Path | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def generator(self, step: int) -> torch.Generator:
        """Return the generator of a step, which depends on seed and step only.

        So a resumed run, and every variant of one seed, sees the same batches.
        """
        return torch.Generator().manual_seed(self.seed * 1_000_003 + step)


class Trial:
    """One model in training. A subclass defines `model`, a batch, its loss and an evaluation.

    Its constructor draws all weights from torch's global generator, which the loop has seeded.
    """

    model: nn.Module
    rate: float = 2e-3  # the highest learning rate
    clip: float | None = 1.0  # of the gradient's norm
    graph: bool = True  # on CUDA: capture the step once, then replay it

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Return the tensors of a training step, drawn from `setting.generator(step)`, on the model's device."""
        raise NotImplementedError

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Return a scalar, on CUDA captured in a graph (unless `graph` is False): no `.item()`, no branch on values."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, float]:
        """Return name → number; called every `preset.every` steps and at the end, under `model.eval()` and no_grad."""
        raise NotImplementedError

    def finish(self) -> dict[str, Any]:
        """Return more about the trained model, as JSON; called once, after the last step."""
        return {}

    def optimizer(self) -> torch.optim.Optimizer:
        """Return a new optimizer of the model."""
        on_cuda = next(self.model.parameters()).is_cuda
        places = dict(capturable=True, fused=True) if on_cuda else {}
        return torch.optim.AdamW(self.model.parameters(), lr=self.rate, betas=(0.9, 0.98), weight_decay=0.01, **places)

    def schedule(self, step: int, steps: int) -> float:
        """Return the learning rate's factor at a step: a short warm-up, then half a cosine."""
        return min(1.0, (step + 1) / min(50, steps / 10)) * 0.5 * (1.0 + math.cos(math.pi * step / steps))

    def after_step(self) -> None:
        """Called after every optimizer step, for example to clip weights."""


@dataclass(frozen=True)
class Preset:
    """Length and size of training. `learns`: metric → bound that the variant `learner` must end below; tested.

    Intervals are over seeds, 3 at least; where a run takes too long for that, over the validation windows of one run.
    """

    steps: int
    every: int
    sizes: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 3
    learner: str = ""
    learns: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def small(cls, steps: int, every: int, learner: str, loss: float, **sizes: Any) -> Preset:
        """Return a preset of minutes on a CPU, in which `learner` must end below that loss."""
        return cls(steps, every, sizes, learner=learner, learns={"loss": loss})


@dataclass(frozen=True)
class Experiment:
    """What varies, how a run is made, its size, and the figures of its results."""

    name: str
    question: str
    variants: Mapping[str, Mapping[str, Any]]
    make: Callable[[Setting], Trial]
    presets: Mapping[str, Preset]
    figures: Callable[[dict], Mapping[str, Figure]]  # of the result, see `results.py`
    table: Callable[[dict], Table] | None = None  # of the results, in place of one row per variant
    reads: str = "file"  # what --data may be: a "file" of text, a "folder" of sentence pairs, or "" for nothing
    metric: str = "loss"  # the headline, one of the names that `evaluate` or `finish` gives

    def setting(self, preset: str, variant: str, seed: int, data: Path | None, device: torch.device) -> Setting:
        return Setting({**self.presets[preset].sizes, **self.variants[variant]}, seed, data, device)


@cache
def experiments() -> dict[str, Experiment]:
    """Return name → experiment for every `Experiment` that a file of `experiments/` defines."""
    paths = sorted((Path(__file__).parent / "experiments").glob("[!_]*.py"))
    modules = [importlib.import_module(f"regard_lab.training.experiments.{path.stem}") for path in paths]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Experiment)]
    return {experiment.name: experiment for experiment in sorted(found, key=lambda experiment: experiment.name)}


def names() -> list[str]:
    """Return the names of all experiments."""
    return list(experiments())


def get(name: str) -> Experiment:
    """Return an experiment by its name."""
    if name not in experiments():
        near = difflib.get_close_matches(name, names(), n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(names())}"
        raise ValueError(f"experiment {name!r} is unknown; {hint}")
    return experiments()[name]
