"""`train`: all runs of an experiment, one after another or in several processes, with progress.

Finished runs are read, not repeated, and a killed one resumes: calling again finishes what is missing.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from regard.lab.training import loop
from regard.lab.training.experiment import get
from regard.lab.training.results import collect

Job = tuple[str, int]  # variant, seed
Show = Callable[[Job, int, float | None], None]  # job, step, loss


def train(
    name: str,
    preset: str = "small",
    folder: Path | str = "runs",
    data: Path | None = None,
    device: str = "cpu",
    seeds: int | None = None,
    variants: Sequence[str] = (),
    workers: int = 1,
    command: str = "",
) -> dict:
    """Train every variant with every seed and return the result (see `results.py`)."""
    experiment = get(name)
    plan, place = experiment.presets[preset], Path(folder) / name / preset
    jobs = [(v, seed) for seed in range(seeds or plan.seeds) for v in variants or experiment.variants]
    options = dict(name=name, preset=preset, folder=place, data=data, device=device)
    with progress(name, len(jobs), plan.steps) as show:
        if workers > 1:
            records = _run_in_processes(jobs, options, workers, show)
        else:
            records = {job: run_job(job, **options, show=show) for job in jobs}
    return collect(experiment, preset, [records[job] for job in jobs], command)


def run_job(
    job: Job,
    name: str,
    preset: str,
    folder: Path,
    data: Path | None,
    device: str,
    show: Show = lambda job, step, loss: None,
) -> dict:
    """Return the record of one run; `show` is called after every evaluation and once at the end."""
    experiment = get(name)
    steps = experiment.presets[preset].steps

    def tick(step: int, loss: float) -> None:
        if step < steps:
            show(job, step, loss)

    record = loop.run(experiment, preset, *job, folder, data, device, tick)
    show(job, steps, last_loss(record))
    return record


def last_loss(record: dict) -> float | None:
    """Return the loss of the last evaluation; None for a run that diverged."""
    return None if record["diverged"] else record["history"][-1].get("loss", math.nan)


def _run_in_processes(jobs: Sequence[Job], options: dict, workers: int, show: Show) -> dict[Job, dict]:
    threads = max(1, (os.cpu_count() or 1) // workers)
    records = {}
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(threads,)
    ) as pool:
        futures = {pool.submit(run_job, job, **options): job for job in jobs}
        for future in as_completed(futures):
            job, record = futures[future], future.result()
            show(job, record["steps"], last_loss(record))
            records[job] = record
    return records


@contextlib.contextmanager
def progress(name: str, runs: int, steps: int) -> Iterator[Show]:
    """Show a bar over all steps in a terminal, or print a line per finished run, on standard error."""

    def describe(job: Job, loss: float | None) -> str:
        return f"{name} {job[0]} seed {job[1]}: {'diverged' if loss is None else f'loss {loss:.3f}'}"

    if not sys.stderr.isatty():

        def line(job, step, loss):
            if step == steps:
                print(describe(job, loss), file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task, reached = bar.add_task(name, total=runs * steps), {}

        def move(job, step, loss):
            reached[job] = step
            bar.update(task, completed=sum(reached.values()), description=describe(job, loss))

        yield move
