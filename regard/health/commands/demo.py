"""regard demo: examine a stored model that was trained without 1/√d and its sound twin; train one both ways."""

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

SUBJECTS = (("tiny-unscaled", "without 1/√d"), ("tiny-scaled", "with 1/√d"))
CHANGES = ["scale=sqrt", "qk_norm"]  # another normaliser would compile its kernels first
STEPS, RATE, SEQUENCES, LENGTH, WIDTH = 120, 1e-2, 16, 32, 64
LAST = 10  # steps whose mean loss is reported


def arguments(parser: argparse.ArgumentParser) -> None:
    help = "where the report of the unhealthy model goes (report.html)"
    parser.add_argument("--out", metavar="PATH", type=Path, default=Path("report.html"), help=help)


def main(options: argparse.Namespace) -> int:
    check_path(options, options.out, ".html")
    warnings.filterwarnings("ignore", "regard: numba is not installed")  # models this small do without it
    ill, sound = (_examine(name, description, options) for name, description in SUBJECTS)
    _, failed = save_report(ill, [options.out])
    if failed:
        print_error("demo", *failed)
        return 2
    ill.show(page=str(options.out))
    words = "no cause found" if not [one for one in sound.diagnosis if one.severity != "note"] else "not sound"
    losses = [report.loss.mean for report in (sound, ill) if report.loss is not None]
    beside = f", loss {losses[0]:.2f} against {losses[1]:.2f}" if len(losses) == 2 else ""
    print(f"\nits twin, trained with 1/√d: {words}{beside}")
    _show_trainings()
    print("your own model: regard examine ./my-model --text corpus.txt --what-if qk_norm")
    return 0


def _examine(name: str, description: str, options: argparse.Namespace) -> Report:
    model, _ = checkpoint(name)
    texts = batches(sample_text(), model.options["length"], 8)
    report = examine(
        model, texts, CHANGES, title=f"{name}, {description}", progress=sys.stderr.isatty(),
        tokenizer=CHARACTERS.__getitem__, ablate=2.0,
    )  # fmt: skip
    return replace(report, how=dict(report.how, input="built-in sample"))


def _show_trainings() -> None:
    """Trains one model twice from one start, with and without 1/√d, and prints what leaving it out costs."""
    ids = encode(sample_text())
    with Progress("demo") if sys.stderr.isatty() else contextlib.nullcontext() as line:
        losses = []
        for number, scale in enumerate(("sqrt", "none")):
            if line is not None:
                line.stage(f"training a small model {('with', 'without')[number]} 1/√d")
            losses.append(train(ids, scale))
    print(describe_gap(*losses))


def describe_gap(sound: float, unscaled: float) -> str:
    """The cost of leaving 1/√d out, and what can be gained when.

    >>> from regard.health.commands.demo import describe_gap
    >>> print(describe_gap(2.0, 2.25))
    trained here, 120 steps from one start: loss 2.00 with 1/√d, 2.25 without
    the finished model gains nothing from the scale now; training with it gains 0.25
    """
    return (
        f"trained here, {STEPS} steps from one start: loss {sound:.2f} with 1/√d, {unscaled:.2f} without\n"
        f"the finished model gains nothing from the scale now; training with it gains {unscaled - sound:.2f}"
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
