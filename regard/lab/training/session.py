"""All runs of an experiment: one after another or in several processes, with progress, then the result.

Runs that are over are read, not repeated, and one that was killed goes on: calling again finishes what is missing.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
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
    what = dict(name=name, preset=preset, folder=place, data=data, device=device)
    with progress(name, len(jobs), plan.steps) as show:
        if workers > 1:
            records = _together(jobs, what, workers, show)
        else:
            records = [one(job, **what, tick=lambda step, loss, job=job: show(job, step, loss)) for job in jobs]
    return collect(experiment, preset, records, command)


def one(job: Job, name: str, preset: str, folder: Path, data: Path | None, device: str, tick=None) -> dict:
    """One run; `tick` hears of every evaluation on the way, and of the end once."""
    experiment = get(name)
    steps = experiment.presets[preset].steps

    def on_the_way(step: int, loss: float) -> None:
        if tick is not None and step < steps:
            tick(step, loss)

    record = loop.run(experiment, preset, *job, folder, data, device, tick=on_the_way)
    if tick is not None:
        tick(steps, last_loss(record))
    return record


def last_loss(record: dict) -> float | None:
    """Of the last evaluation; None for a run that diverged."""
    return None if record["diverged"] else record["history"][-1].get("loss", math.nan)


def _together(jobs: Sequence[Job], what: dict, workers: int, show: Show) -> list[dict]:
    threads = max(1, (os.cpu_count() or 1) // workers)
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(threads,)
    ) as pool:
        waiting: dict[Future, Job] = {pool.submit(one, job, **what): job for job in jobs}
        done = {}
        for future in as_completed(waiting):
            record = done[waiting[future]] = future.result()
            show(waiting[future], record["steps"], last_loss(record))
    return [done[job] for job in jobs]


@contextlib.contextmanager
def progress(name: str, runs: int, steps: int) -> Iterator[Show]:
    """A bar over all steps in a terminal; a line per finished run in a pipe. Both on standard error."""

    def said(job: Job, loss: float | None) -> str:
        return f"{name} {job[0]} seed {job[1]}: {'diverged' if loss is None else f'loss {loss:.3f}'}"

    if not sys.stderr.isatty():

        def line(job, step, loss):
            if step == steps:
                print(said(job, loss), file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task, reached = bar.add_task(name, total=runs * steps), {}

        def move(job, step, loss):
            reached[job] = step
            bar.update(task, completed=sum(reached.values()), description=said(job, loss))

        yield move
