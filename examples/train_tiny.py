"""Train the two language models of `regard demo`: the same but for 1/√d_k. A minute each on a GPU.

python examples/train_tiny.py --data FILE.txt --out regard/checkpoints --device cuda
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from regard.health.tiny import TinyLM, save
from regard.lab.training import Setting, Trial
from regard.lab.training.loop import evaluation
from regard.lab.training.step import Step
from regard.lab.training.text import halves, windows

MODELS = {"tiny-scaled": "sqrt", "tiny-unscaled": "none"}


class TinyTrial(Trial):
    """Options: scale ("sqrt" or "none"), batch, rate."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.size, self.rate = setting, setting.options["batch"], setting.options["rate"]
        self.model = TinyLM(scale=setting.options["scale"]).to(setting.device)
        self.length = self.model.options["length"]
        self.known, self.unseen = (part.to(setting.device) for part in halves(setting.data))

    def batch(self, step: int) -> tuple[torch.Tensor, ...]:
        return (windows(self.known, self.size, self.length, self.setting.generator(step)),)

    def loss(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        (ids,) = batch
        return F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def evaluate(self) -> dict[str, float]:
        return {"loss": float(self.loss((windows(self.unseen, 128, self.length, torch.Generator().manual_seed(0)),)))}


def train(scale: str, options) -> tuple[TinyLM, float]:
    torch.manual_seed(options.seed)
    sizes = dict(scale=scale, batch=options.batch, rate=options.rate)
    trial = TinyTrial(Setting(sizes, options.seed, options.data, torch.device(options.device)))
    optimizer = trial.optimizer()
    optimizer.param_groups[0]["weight_decay"] = options.decay
    step = Step(trial, optimizer, options.steps)
    for i in range(options.steps):
        step(i)
        if i % 100 == 0:
            print(f"scale {scale} step {i} loss {step.last_loss():.3f}", flush=True)
    return trial.model, evaluation(trial)["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="plain text to train on")
    parser.add_argument("--out", type=Path, default=Path("regard/checkpoints"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.01, help="of the weights")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    given = [Path(word).name if "/" in word else word for word in sys.argv[1:]]  # a path is this machine's
    for name, scale in MODELS.items():
        model, validation = train(scale, options)
        notes = dict(validation_loss=f"{validation:.3f}", steps=str(options.steps))
        notes["command"] = shlex.join(["python", "examples/train_tiny.py", *given])
        save(model.cpu(), options.out / f"{name}.safetensors", **notes)
        print(f"{name}: validation loss {validation:.3f}", flush=True)


if __name__ == "__main__":
    main()
