"""The command `regard lab train [EXPERIMENT …]`: train the experiments, resumable, with intervals over seeds."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

import torch

from regard.table import Table
from regard_lab.training.experiment import Experiment, experiments
from regard_lab.training.results import final_values

RANGES = ("max_logit",)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help="which to run; without, they are listed")
    parser.add_argument("--preset", choices=("small", "full"), default="small", help="minutes on a CPU, or on a GPU")
    parser.add_argument("--data", metavar="PATH", type=Path, help="text file, or folder of a parallel corpus")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one for full, else cpu)")
    parser.add_argument("--seeds", type=int, help="runs per variant, at least 3 (default: the preset's)")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", default=(), help="these variants alone")
    parser.add_argument("--workers", type=int, default=1, help="processes that train at the same time (default 1)")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("runs"), help="checkpoints, records, results")
    parser.add_argument("--time", action="store_true", help="time a step of each variant instead, on a quiet machine")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def main(options: argparse.Namespace) -> int:
    """Train the experiments, time them, or list them."""
    known = experiments()
    if not options.experiments:
        listing().show()
        return 0
    _check(options, known)
    if options.time:
        return _time(options)
    from regard_lab.training.loop import write
    from regard_lab.training.session import train

    results = []
    for name in options.experiments:
        device = options.device or _device(options.preset)
        try:
            result = train(
                name, options.preset, options.out, options.data, device, options.seeds, options.only, options.workers,
                command=_command(name, options),
            )  # fmt: skip
        except (ValueError, OSError) as wrong:  # unusable data, records of another run, a full disk
            options.fail(str(wrong))
        folder = options.out / name / options.preset
        write(folder / "result.json", result)
        results.append(result)
        if not options.json:
            table(result).show()
            print(f"{folder / 'result.json'}, and figures beside it")
    if options.json:
        print(json.dumps(results, ensure_ascii=False, indent=2))
    for result in results:
        folder = options.out / result["experiment"] / options.preset
        for figure, drawn in known[result["experiment"]].figures(result).items():
            path = folder / f"{result['experiment']}-{figure}.svg"
            path.write_text(drawn.svg(420, 260), encoding="utf-8")
    return 0


def _time(options: argparse.Namespace) -> int:
    from regard_lab.training import timing
    from regard_lab.training.loop import describe_machine, write

    device = options.device or _device(options.preset)
    try:
        results = {name: timing.step_times(name, options.preset, options.data, device) for name in options.experiments}
    except (ValueError, OSError) as wrong:
        options.fail(str(wrong))
    where = describe_machine(torch.device(device))
    for name, times in results.items():
        write(options.out / name / options.preset / "times.json", dict(where=where, times=times))
        if not options.json:
            timing.table(name, times).show()
    if options.json:
        print(json.dumps(results, ensure_ascii=False, indent=2))
    return 0


def listing() -> Table:
    """Return the experiments and their questions."""
    rows = [[name, str(len(e.variants)), e.question] for name, e in experiments().items()]
    return Table(["experiment", "variants", "question"], rows, numbers=["variants"])


def table(result: dict) -> Table:
    """Return the experiment's own table, or one row per variant: readings with intervals, and diverged runs.

    The largest logit varies by orders of magnitude between seeds, so its range is shown.
    """
    own = experiments()[result["experiment"]].table
    if own is not None:
        return own(result)
    shown = [result["metric"]]
    first = next(iter(result["summary"].values()))
    shown += [name for name in ("loss", "bleu", "accuracy", "entropy_ratio", "gradient_gain", "max_logit")
              if name in first and name not in shown]  # fmt: skip
    rows = []
    for variant, numbers in result["summary"].items():
        values = {name: final_values(result, variant, name) for name in RANGES}
        cells = [_range(values[name]) if name in RANGES else _cell(numbers.get(name)) for name in shown]
        rows.append([variant, *cells, f"{numbers['diverged']} of {numbers['runs']}"])
    names = [shown[0] + f" [{result['how']['level']:.0%}]", *(f"{n}, range" if n in RANGES else n for n in shown[1:])]
    return Table(["variant", *names, "diverged"], rows)


def _cell(estimate: dict | None) -> str:
    if estimate is None:
        return ""
    low, high = estimate["low"], estimate["high"]
    return f"{estimate['mean']:.4g}" + ("" if low is None else f" [{low:.4g}, {high:.4g}]")


def _range(values: dict[int, float]) -> str:
    return f"{min(values.values()):.3g} to {max(values.values()):.3g}" if values else ""


def _check(options: argparse.Namespace, known: dict[str, Experiment]) -> None:
    for name in options.experiments:
        if name not in known:
            options.fail(f"experiment {name!r} is unknown; experiments: {', '.join(known)}")
        for variant in options.only:
            if variant not in known[name].variants:
                options.fail(f"--only {variant!r}: {name} has the variants {', '.join(known[name].variants)}")
    if options.seeds is not None and options.seeds < 3:
        options.fail(f"--seeds must be at least 3 for an interval, got {options.seeds}")
    if options.workers < 1:
        options.fail(f"--workers must be at least 1, got {options.workers}")
    if options.data is not None:
        for name in options.experiments:
            _check_data(options, known[name])
    if options.device is not None and options.device.split(":")[0] not in ("cpu", "cuda"):
        options.fail(f"--device must be cpu or cuda, got {options.device!r}")
    if options.out.exists() and not options.out.is_dir():
        options.fail(f"--out {options.out} is a file; give a folder")


def _check_data(options: argparse.Namespace, experiment: Experiment) -> None:
    if not experiment.reads:
        options.fail(f"--data {options.data}: {experiment.name} makes its own rows and reads no file; leave it out")
    if not options.data.exists():
        options.fail(f"--data {options.data} does not exist")
    if options.data.is_dir() != (experiment.reads == "folder"):
        wanted = "a folder of sentence pairs" if experiment.reads == "folder" else "a text file"
        given = "a folder" if options.data.is_dir() else "a file"
        options.fail(f"--data {options.data} is {given}; {experiment.name} reads {wanted}")


def _device(preset: str) -> str:
    return "cuda" if preset == "full" and torch.cuda.is_available() else "cpu"


def _command(name: str, options: argparse.Namespace) -> str:
    """Return the command that repeats this result; of --data only the file name."""
    words = ["regard", "lab", "train", name, "--preset", options.preset]
    if options.data is not None:
        words += ["--data", options.data.name]
    if options.seeds is not None:
        words += ["--seeds", str(options.seeds)]
    if options.only:
        words += ["--only", *options.only]
    return shlex.join(words)
