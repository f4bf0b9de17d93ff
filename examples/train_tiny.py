"""Train the two language models of `regard demo`: a healthy one, and one that collapses for want of 1/√d_k.

python examples/train_tiny.py --data FILE.txt --out regard/checkpoints

Each checkpoint's notes hold the command that made it. Both take a minute on one CPU core.
"""

from __future__ import annotations

import argparse
import io
import shlex
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from regard_lab.training import Setting, Trial
from regard_lab.training.loop import evaluate
from regard_lab.training.step import Step
from regard_lab.training.trials.text import draw_windows, split_text

from regard.health.models.tiny import TinyLM, load, save

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
