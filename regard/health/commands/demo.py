"""regard demo: examine two stored models, one trained without 1/√d_k; then train one with it, without, and mended."""

import argparse
import contextlib
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.health.commands.files import check_path, print_error, save_report
from regard.health.examine import examine
from regard.health.models.inputs import sample_text
from regard.health.models.tiny import CHARACTERS, TinyLM, batches, checkpoint, encode
from regard.health.report.comparison import compare
from regard.health.using import using
from regard.table import Table

SUBJECTS = (("tiny-scaled", "with 1/√d_k"), ("tiny-unscaled", "without 1/√d_k, at a high learning rate"))
CHANGES = ["scale=sqrt", "qk_norm"]  # another normaliser would compile its kernels first
STEPS, RATE, SEQUENCES, LENGTH, WIDTH = 120, 1e-2, 16, 32, 64
LAST = 10  # steps whose mean loss is reported


def arguments(parser: argparse.ArgumentParser) -> None:
    help = "where the report of the unhealthy model goes (report.html)"
    parser.add_argument("--out", metavar="PATH", type=Path, default=Path("report.html"), help=help)


def main(options: argparse.Namespace) -> int:
    check_path(options, options.out, ".html")
    reports = []
    for name, description in SUBJECTS:
        model, notes = checkpoint(name)
        texts = batches(sample_text(), model.options["length"], 8)
        report = examine(
            model, texts, CHANGES, title=f"{name}, {description}", progress=sys.stderr.isatty(),
            tokenizer=CHARACTERS.__getitem__, ablate=2.0,
        )  # fmt: skip
        report.show()
        print(f"a stored model: trained for {notes['steps']} steps, validation loss {notes['validation_loss']}")
        reports.append(report)
    print()
    compare(*reports).show()
    _, failed = save_report(reports[1], [options.out])
    if failed:
        print_error("demo", *failed)
        return 1
    print(f"\nthe report of the second model: {options.out.resolve()}")
    _show_trainings()
    print(f"\nnext, your own model: regard examine ./my-model --text corpus.txt --what-if qk_norm --out {options.out}")
    return 0


def _show_trainings() -> None:
    """Trains one model three times, and prints what leaving 1/√d out costs and what the remedy recovers."""
    ids = encode(sample_text())
    losses = {
        "with 1/√d": train(ids, "sqrt"),
        "without 1/√d": train(ids, "none"),
        "without 1/√d, under regard.using(model, scale='sqrt')": train(ids, "none", mended=True),
    }
    sound, *_ = losses.values()
    rows = [[name, f"{loss:.3f}", f"{loss - sound:+.3f}"] for name, loss in losses.items()]
    title = f"\nthe cost in training: one small model, {STEPS} steps on the same text from the same start"
    Table(["training", "loss at the end", "difference"], rows, title, numbers=["loss at the end", "difference"]).show()
    print(describe_gap(*losses.values()))


def describe_gap(sound: float, unscaled: float, mended: float) -> str:
    """The cost of leaving 1/√d out, and the part that the remedy recovers, in one sentence.

    >>> from regard.health.commands.demo import describe_gap
    >>> describe_gap(2.0, 2.25, 2.0)
    "At the same budget, leaving 1/√d out costs 0.25 nats per token; regard.using(model, scale='sqrt') recovers 100 %."
    """
    gap = unscaled - sound
    return (
        f"At the same budget, leaving 1/√d out costs {gap:.2f} nats per token; regard.using(model, scale='sqrt') "
        f"recovers {(unscaled - mended) / gap:.0%}."
    ).replace("%", " %")


def train(ids: Tensor, scale: str, mended: bool = False) -> float:
    """The mean loss of the last steps of a training that takes about 2 s, from one start."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = TinyLM(layers=2, heads=1, width=WIDTH, length=LENGTH, scale=scale)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    with using(model, scale="sqrt") if mended else contextlib.nullcontext():
        for _ in range(STEPS):
            start = torch.randint(len(ids) - LENGTH - 1, (SEQUENCES, 1), generator=generator)
            windows = ids[start + torch.arange(LENGTH + 1)]
            loss = cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses[-LAST:]) / LAST
