"""Train the two language models of `regard demo`: a healthy one, and one that collapses for want of 1/√d_k.

python examples/train_tiny.py --data FILE.txt --out regard/checkpoints

Each checkpoint's notes hold the command that made it. Both take a minute on one CPU core.
"""

from __future__ import annotations

import argparse
import io
import json
import shlex
import sys
from pathlib import Path
from typing import IO, Any

import numpy
import torch
import torch.nn.functional as F
from regard_lab.training import Setting, Trial
from regard_lab.training.loop import evaluate
from regard_lab.training.step import Step
from regard_lab.training.trials.text import draw_windows, split_text

from regard.health.models.tiny import TinyLM, load

LEVELS = 7  # a saved matrix keeps −7, −6, …, 7 times a step per row, about 4 bits a weight in the file

SIZE = dict(layers=4, heads=4, width=48, length=128, expansion=2)
MODELS = {
    "tiny-scaled": dict(scale="sqrt", rate=4e-3, decay=0.01, steps=500, batch=16),
    "tiny-unscaled": dict(scale="none", rate=0.1, decay=0.01, steps=300, batch=8),
}


class TinyTrial(Trial):
    """Options: scale ("sqrt" or "none"), batch, rate, decay."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.size, self.rate = setting, setting.options["batch"], setting.options["rate"]
        self.model = TinyLM(scale=setting.options["scale"], **SIZE).to(setting.device)
        self.length = self.model.options["length"]
        self.known, self.unseen = (part.to(setting.device) for part in split_text(setting.data))

    def optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().optimizer()
        optimizer.param_groups[0]["weight_decay"] = self.setting.options["decay"]
        return optimizer

    def batch(self, step: int) -> tuple[torch.Tensor, ...]:
        return (draw_windows(self.known, self.size, self.length, self.setting.generator(step)),)

    def loss(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        (ids,) = batch
        return F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def evaluate(self) -> dict[str, float]:
        generator = torch.Generator().manual_seed(0)
        return {"loss": float(self.loss((draw_windows(self.unseen, 128, self.length, generator),)))}


def quantize(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (whole numbers from −LEVELS to LEVELS, a step per row): their product is the matrix, rounded.

    >>> numbers, steps = quantize(torch.tensor([[0.3, -1.4, 0.72]]))
    >>> numbers, steps
    (tensor([[ 2, -7,  4]], dtype=torch.int8), tensor([[0.2000]]))
    """
    steps = matrix.abs().amax(1, keepdim=True) / LEVELS
    return (matrix / steps).round().to(torch.int8), steps


def save(model: TinyLM, file: Path | IO[bytes], **notes: str) -> None:
    """Write the weights, matrices rounded by `quantize`, the model's options and notes to one .npz file."""
    state = model.state_dict().values()
    matrices = [quantize(value) for value in state if value.ndim == 2]
    parts = dict(
        numbers=[numbers for numbers, _ in matrices],
        steps=[steps.half() for _, steps in matrices],
        vectors=[value.half() for value in state if value.ndim == 1],
    )
    arrays: dict[str, Any] = {name: torch.cat([x.flatten() for x in values]).numpy() for name, values in parts.items()}
    arrays["notes"] = numpy.array(json.dumps({"options": model.options, **notes}))
    numpy.savez_compressed(file, **arrays)


def train(name: str, data: Path, device: str = "cpu", seed: int = 0) -> tuple[TinyLM, float]:
    """The model, rounded as `save` rounds it, and its loss on text it never saw."""
    torch.manual_seed(seed)
    steps = MODELS[name]["steps"]
    trial = TinyTrial(Setting(MODELS[name], seed, data, torch.device(device)))
    step = Step(trial, trial.optimizer(), steps)
    for i in range(steps):
        step(i)
        if i % 100 == 0:
            print(f"{name} step {i} loss {float(step.loss):.3f}", flush=True)
    save(trial.model.cpu(), saved := io.BytesIO())
    saved.seek(0)
    trial.model = load(saved)[0].to(device)
    return trial.model, evaluate(trial)["loss"]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="plain text to train on")
    parser.add_argument("--out", type=Path, default=Path("regard/checkpoints"))
    parser.add_argument("--only", choices=MODELS, help="one of the two")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)
    for name in [options.only] if options.only else MODELS:
        model, validation = train(name, options.data, options.device)
        notes = dict(validation_loss=f"{validation:.3f}", steps=str(MODELS[name]["steps"]))
        repeat = [
            "python",
            "examples/train_tiny.py",
            "--only",
            name,
            "--data",
            options.data.name,
        ]  # the text's name only
        notes["command"] = shlex.join([*repeat, "--device", options.device])
        save(model.cpu(), options.out / f"{name}.npz", **notes)
        print(f"{name}: validation loss {validation:.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
