"""regard demo: train a model with and without 1/√d, then examine a stored one without it and its sound twin."""

import argparse
import contextlib
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.health.commands.files import check_path, print_error, save_report
from regard.health.examine import examine
from regard.health.models.inputs import sample_text
from regard.health.models.tiny import CHARACTERS, TinyLM, batches, checkpoint, encode
from regard.health.progress import Progress
from regard.health.report.report import Report
from regard.health.report.screen import show_screen

SUBJECTS = (("tiny-unscaled", "without 1/√d"), ("tiny-scaled", "with 1/√d"))
CHANGES = ["scale=sqrt", "qk_norm"]  # another normaliser would compile its kernels first
STEPS, RATE, SEQUENCES, LENGTH, WIDTH = 120, 1e-2, 16, 32, 64
SCALE = "RG401"
OWN = "your own model: regard examine ./my-model --text corpus.txt --what-if qk_norm"
LAST = 10  # steps whose mean loss is reported


def arguments(parser: argparse.ArgumentParser) -> None:
    help = "where the report of the unhealthy model goes (report.html)"
    parser.add_argument("--out", metavar="PATH", type=Path, default=Path("report.html"), help=help)


def main(options: argparse.Namespace) -> int:
    check_path(options, options.out, ".html")
    warnings.filterwarnings("ignore", "regard: numba is not installed")  # models this small do without it
    gain = describe_gap(*_train_both())
    ill, sound = (_examine(name, description) for name, description in SUBJECTS)
    ill = replace(ill, findings=[replace(x, fix=f"{x.fix} {gain}") if x.code == SCALE else x for x in ill.findings])
    _, failed = save_report(ill, [options.out])
    if failed:
        print_error("demo", *failed)
        return 2
    words = "no cause found" if not [one for one in sound.diagnosis if one.severity != "note"] else "not sound"
    twin = f"its twin, trained with 1/√d: {words}"
    twin += "" if sound.loss is None else f", loss {sound.loss.mean:.2f}"
    show_screen(ill, page=str(options.out), below=["", twin, OWN])
    return 0


def _examine(name: str, description: str) -> Report:
    model, _ = checkpoint(name)
    texts = batches(sample_text(), model.options["length"], 8)
    report = examine(
        model, texts, CHANGES, title=f"{name}, {description}", progress=sys.stderr.isatty(),
        tokenizer=CHARACTERS.__getitem__, ablate=2.0,
    )  # fmt: skip
    return replace(report, how=dict(report.how, input="the built-in sample"))


def _train_both() -> list[float]:
    """The losses of a model trained twice from one start, with 1/√d and without."""
    ids = encode(sample_text())
    with Progress("demo") if sys.stderr.isatty() else contextlib.nullcontext() as line:
        losses = []
        for number, scale in enumerate(("sqrt", "none")):
            if line is not None:
                line.stage(f"training a small model {('with', 'without')[number]} 1/√d")
            losses.append(train(ids, scale))
    return losses


def describe_gap(sound: float, unscaled: float) -> str:
    """What training with 1/√d gains, which a finished model does not.

    >>> from regard.health.commands.demo import describe_gap
    >>> print(describe_gap(2.0, 2.25))
    Then train anew: a small model, trained here both ways, gains 0.25 (loss 2.25 → 2.00).
    """
    return (
        f"Then train anew: a small model, trained here both ways, gains {unscaled - sound:.2f} "
        f"(loss {unscaled:.2f} → {sound:.2f})."
    )


def train(ids: Tensor, scale: str) -> float:
    """The mean loss of the last steps of a training that takes about 2 s, from one start."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = TinyLM(layers=2, heads=1, width=WIDTH, length=LENGTH, scale=scale)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        start = torch.randint(len(ids) - LENGTH - 1, (SEQUENCES, 1), generator=generator)
        windows = ids[start + torch.arange(LENGTH + 1)]
        loss = cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-LAST:]) / LAST
