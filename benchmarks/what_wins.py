"""What wins? Train every kind of attention in the experiments `variants*` of `regard lab train`, within a time budget.

    PYTHONPATH=. python3 benchmarks/what_wins.py list
    PYTHONPATH=. python3 benchmarks/what_wins.py small length large --data DATA --out OUT --device cuda
    PYTHONPATH=. python3 benchmarks/what_wins.py tables --out OUT [--ship]

Parts: `small` is the character model and the translation, five seeds each; `length` max retrieval and recall beyond the
trained length, five seeds; `large` 30 M parameters over 100 M bytes, softmax and the four best of `small`, or --only.
DATA holds tinyshakespeare.txt and multi30k/; `large` reads the Python files of this interpreter, its library and its
packages, each content once; they are copied to --work and nowhere else.

A variant is one process, its seeds train by turns on streams of their own. OUT gets one EXPERIMENT.json per experiment
(written anew after every process, so that a run that is cut short leaves what is finished) and log.txt. A variant
without a result stands under how/left_out with the reason: not chosen, failed, or out of time. `tables` prints
the tables; --ship puts the results where `make docs` reads them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from regard_lab.training import comparison
from regard_lab.training.experiment import Experiment, get
from regard_lab.training.results import SHIPPED, collect
from regard_lab.training.trials import attention

PARTS = {
    "small": ("variants", "variants-translation"),
    "length": ("variants-length", "variants-recall"),
    "large": ("variants-large",),
}
BUDGETS = {"small": 150.0, "length": 60.0, "large": 330.0}  # seconds
WORKERS = {"small": 10, "length": 10, "large": 2}  # processes at once
DATA = {"variants": "tinyshakespeare.txt", "variants-translation": "multi30k"}
BEST = 4
CORPUS = "python-sources.bin"
TINY = {  # what --tiny makes of the full presets: a second or two each
    "variants": dict(layers=1, heads=2, width=16, length=16, batch=2, validation=64),
    "variants-translation": dict(layers=1, heads=2, width=16, length=8, batch=4),
    "variants-length": dict(width=16, batch=2, trained=8, tests=[8, 16], items=64, rows=2),
    "variants-recall": dict(layers=1, heads=2, width=16, batch=2, queries=4, rows=2, tests=[256, 512]),
    "variants-large": dict(layers=1, heads=2, width=16, length=16, batch=2, windows=4),
}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["list", *PARTS, "tables"], metavar="PART")
    parser.add_argument("--data", type=Path, help="folder with tinyshakespeare.txt and multi30k/ (default: generated)")
    parser.add_argument(
        "--sources", type=Path, help="folder of the Python files of large (default: this interpreter's)"
    )
    parser.add_argument("--out", type=Path, default=Path("what-wins"), help="folder of the results")
    parser.add_argument("--work", type=Path, default=Path("build/what-wins"), help="folder of records and corpus")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="these variants alone")
    parser.add_argument("--seeds", type=int, help="runs per variant (default: the experiment's)")
    parser.add_argument("--budget", type=float, help=f"seconds per part (default {BUDGETS})")
    parser.add_argument("--workers", type=int, help=f"processes at once (default {WORKERS})")
    parser.add_argument("--tiny", action="store_true", help="models of 16 wide and 2 steps, to test this script")
    parser.add_argument("--ship", action="store_true", help="with tables: copy the results into the package")
    parser.add_argument("--run", nargs=2, metavar=("EXPERIMENTS", "VARIANT"), help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.run is not None:
        return run_variant(options.run[0].split(","), options.run[1], options)
    for part in PARTS if options.only else ():
        known = get(PARTS[part][0]).variants
        unknown = [name for name in options.only if name not in known]
        if part in options.parts and unknown:
            parser.error(f"--only {' '.join(unknown)}: {part} has {', '.join(known)}")
    for part in options.parts:
        if part == "list":
            list_variants()
        elif part == "tables":
            show_tables(options.out, options.ship)
        else:
            run_part(part, options)
    return 0


def list_variants() -> None:
    """Print every variant and its options."""
    for name, chosen in attention.attentions(keys=128).items():
        print(f"{name:16} {chosen}")


def find_experiment(name: str, tiny: bool) -> Experiment:
    """Return an experiment, if `tiny` with a full preset of two steps."""
    experiment = get(name)
    if not tiny:
        return experiment
    full = experiment.presets["full"]
    small = replace(full, steps=2, every=1, sizes={**full.sizes, **TINY[name]})
    return replace(experiment, presets={**experiment.presets, "full": small})


def run_part(part: str, options: argparse.Namespace) -> None:
    """Train one process per variant, as many at once as there are workers, and write the results after each."""
    names, budget = PARTS[part], options.budget or BUDGETS[part]
    experiments = {name: find_experiment(name, options.tiny) for name in names}
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.work / "errors").mkdir(parents=True, exist_ok=True)
    chosen, left_out = choose_variants(part, experiments, options)
    if part == "large":
        corpus = options.work / CORPUS
        if not corpus.exists():
            write_corpus(corpus, [options.sources] if options.sources else find_sources())
        say(options, f"large: {corpus.stat().st_size / 1e6:.1f} MB of Python sources")
    waiting, running = list(chosen), {}
    while waiting or running:
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                if process.returncode != 0:
                    left_out[name] = f"failed: {read_error(options.work, name)}"
                say(options, f"{part} {name}: {left_out.get(name, 'finished')}, {time.monotonic() - began:.0f} s")
                write_results(experiments, left_out, options)
        late = time.monotonic() - began > budget
        if late:
            for name, process in running.items():
                process.kill()
                process.wait()
                left_out[name] = f"out of time: stopped after {budget:.0f} s"
            left_out |= dict.fromkeys(waiting, f"out of time: not begun within {budget:.0f} s")
            running, waiting = {}, []
        while waiting and len(running) < (options.workers or WORKERS[part]):
            name = waiting.pop(0)
            running[name] = start(names, name, options)
        time.sleep(0.2)
    write_results(experiments, left_out, options)
    say(options, f"{part}: {time.monotonic() - began:.0f} s; left out: {left_out or 'none'}")


def choose_variants(
    part: str, experiments: dict[str, Experiment], options: argparse.Namespace
) -> tuple[list[str], dict[str, str]]:
    """Return the variants of a part, and why each other one is left out."""
    known = list(next(iter(experiments.values())).variants)
    chosen, reason = list(options.only or known), "not chosen"
    if part == "large" and not options.only:
        path = options.out / "variants.json"
        if not path.exists():
            raise SystemExit(f"large takes the best of small: run small first (no {path}), or pass --only")
        best = [name for name in rank(json.loads(path.read_text(encoding="utf-8"))) if name in known]
        chosen = [comparison.BASE, *best[:BEST]]
        reason = f"not among the {BEST} best of the character model"
    say(options, f"{part}: {', '.join(chosen)}")
    return chosen, {name: reason for name in known if name not in chosen}


def rank(result: dict, base: str = comparison.BASE) -> list[str]:
    """Return the variants but the base, best mean of the metric first; those with a diverged run last."""
    better = 1 if comparison.is_lower_better(result) else -1
    told = result["summary"]
    return sorted(
        (name for name in told if name != base),
        key=lambda name: (told[name]["diverged"], better * told[name].get(result["metric"], {"mean": 0.0})["mean"]),
    )


def start(names: Sequence[str], variant: str, options: argparse.Namespace) -> subprocess.Popen:
    """Start the process of a variant; its output goes to this one's, its errors to a file."""
    words = [sys.executable, __file__, "list", "--run", ",".join(names), variant, "--device", options.device]
    words += ["--work", str(options.work), *(["--tiny"] if options.tiny else [])]
    words += ["--data", str(options.data)] if options.data else []
    words += ["--seeds", str(options.seeds)] if options.seeds else []
    threads = {} if options.device == "cpu" else {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    with (options.work / "errors" / f"{variant}.txt").open("w") as errors:
        return subprocess.Popen(words, env={**os.environ, **threads}, stderr=errors)


def run_variant(names: Sequence[str], variant: str, options: argparse.Namespace) -> int:
    """Train every seed of a variant in each experiment; records go to --work."""
    from regard_lab.training.loop import run_together

    for name in names:
        experiment = find_experiment(name, options.tiny)
        plan = experiment.presets["full"]
        data = options.work / CORPUS if name == "variants-large" else None
        if options.data is not None and name in DATA:
            data = options.data / DATA[name]
        seeds = range(options.seeds or plan.seeds)
        folder, tick = records_of(options.work, name), make_tick(f"{name} {variant}", plan.steps)
        run_together(experiment, "full", variant, seeds, folder, data, options.device, tick, math.inf)
    return 0


def make_tick(what: str, steps: int) -> Callable[[int, int, float], None]:
    """Return a function that prints the progress of seed 0."""
    began = time.monotonic()

    def tick(seed: int, step: int, loss: float) -> None:
        if seed == 0:
            print(f"  {what}: step {step} of {steps}, loss {loss:.4f}, {time.monotonic() - began:.0f} s", flush=True)

    return tick


def records_of(work: Path, name: str) -> Path:
    """Return the folder of an experiment's records."""
    return work / "records" / name


def read_error(work: Path, variant: str) -> str:
    """Return the last line that a process wrote to its errors."""
    lines = (work / "errors" / f"{variant}.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "killed"


def write_results(experiments: dict[str, Experiment], left_out: dict[str, str], options: argparse.Namespace) -> None:
    """Write EXPERIMENT.json of every record that there is; the variants of `left_out` without one say why."""
    for name, experiment in experiments.items():
        records = [
            json.loads(path.read_text(encoding="utf-8"))
            for variant in experiment.variants
            for path in sorted(records_of(options.work, name).glob(f"{variant}-seed*.json"))
        ]
        if not records:
            continue
        found = {record["variant"] for record in records}
        reasons = {variant: why for variant, why in left_out.items() if variant not in found}
        data = "" if records[0]["data"] == "built-in" else f" --data {records[0]['data'].split()[0]}"
        command = f"regard lab train {name} --preset full{data}"
        result = collect(experiment, "full", records, command, reasons)
        (options.out / f"{name}.json").write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")


def find_sources() -> list[Path]:
    """Return the folders of the standard library and of the installed packages."""
    return [Path(sysconfig.get_path("stdlib")), *(Path(p) for p in sys.path if p.endswith("-packages"))]


def write_corpus(path: Path, folders: Sequence[Path]) -> None:
    """Write the contents of all Python files under the folders, each once, in the order of their hashes.

    So the bytes at the end, which are validated on, are of files of every package, and of none that is trained on but
    the one that the border cuts.
    """
    contents = {}
    for source in sorted({source for folder in folders for source in folder.rglob("*.py") if source.is_file()}):
        content = source.read_bytes()
        contents.setdefault(hashlib.sha256(content).digest(), content)
    beside = path.with_suffix(".part")
    beside.write_bytes(b"\n".join(contents[digest] for digest in sorted(contents)))
    beside.replace(path)


def show_tables(out: Path, ship: bool) -> None:
    """Print the table of each result as Markdown, and what is left out; `ship` copies the results to the package."""
    from regard_lab.training.command import table

    for name in [name for names in PARTS.values() for name in names]:
        path = out / f"{name}.json"
        if not path.exists():
            print(f"## {name}: no result\n")
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        print(f"## {name}\n\n{'; '.join(result['how']['where'])}; data {'; '.join(result['how']['data'])}\n")
        print(table(result).markdown() + "\n")
        for variant, why in result["how"].get("left_out", {}).items():
            print(f"- {variant}: {why}")
        if ship:
            shutil.copy(path, SHIPPED / path.name)


def say(options: argparse.Namespace, line: str) -> None:
    """Print a line and keep it in log.txt."""
    print(line, flush=True)
    with (options.out / "log.txt").open("a", encoding="utf-8") as log:
        log.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
