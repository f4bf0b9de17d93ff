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
    """Train every variant with every seed and return the result (see `results.py`).

    On CUDA the seeds of a variant take turns, a stream each: one small model does not fill a GPU.
    """
    experiment = get(name)
    plan, place = experiment.presets[preset], Path(folder) / name / preset
    jobs = [(v, seed) for seed in range(seeds or plan.seeds) for v in variants or experiment.variants]
    units = [[job] for job in jobs]
    if torch.device(device).type == "cuda":
        units = [[job for job in jobs if job[0] == v] for v in variants or experiment.variants]
    what = dict(name=name, preset=preset, folder=place, data=data, device=device)
    with progress(name, len(jobs), plan.steps) as show:
        if workers > 1:
            records = _in_processes(units, what, workers, show)
        else:
            records = [record for unit in units for record in turns(unit, **what, show=show)]
    order = {(record["variant"], record["seed"]): record for record in records}
    return collect(experiment, preset, [order[job] for job in jobs], command)


def turns(
    unit: Sequence[Job],
    name: str,
    preset: str,
    folder: Path,
    data: Path | None,
    device: str,
    show: Show = lambda job, step, loss: None,
    pause: float = loop.PAUSE,
) -> list[dict]:
    """The records of some runs, a step of each in turn. `show` hears of every evaluation, and of each end once."""
    experiment = get(name)
    steps = experiment.presets[preset].steps

    def tick(job: Job):
        return lambda step, loss: show(job, step, loss) if step < steps else None

    going = {job: loop.advance(experiment, preset, *job, folder, data, device, tick(job), pause) for job in unit}
    on_cuda = torch.device(device).type == "cuda" and torch.cuda.is_available()
    streams = {job: torch.cuda.Stream() if on_cuda else None for job in unit}  # else each would wait for the one before
    over: dict[Job, dict] = {}
    while going:
        for job in list(going):
            try:
                with torch.cuda.stream(streams[job]):
                    next(going[job])
            except StopIteration as end:
                over[job] = end.value
                del going[job]
                show(job, steps, last_loss(end.value))
    return [over[job] for job in unit]


def last_loss(record: dict) -> float | None:
    """Of the last evaluation; None for a run that diverged."""
    return None if record["diverged"] else record["history"][-1].get("loss", math.nan)


def _in_processes(units: Sequence[Sequence[Job]], what: dict, workers: int, show: Show) -> list[dict]:
    threads = max(1, (os.cpu_count() or 1) // workers)
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(threads,)
    ) as pool:
        records = []
        for future in as_completed([pool.submit(turns, unit, **what) for unit in units]):
            for record in future.result():
                show((record["variant"], record["seed"]), record["steps"], last_loss(record))
                records.append(record)
    return records


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
