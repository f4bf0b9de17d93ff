"""`train`: all runs of an experiment, one after another or in several processes.

Finished runs are read, not repeated, and a killed one resumes: calling again finishes what is missing.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch

from regard_lab.training import loop
from regard_lab.training.experiment import get
from regard_lab.training.results import collect

Job = tuple[str, int]  # variant, seed


def train(
    name: str, preset: str = "small", folder: Path | str = "runs", data: Path | None = None, device: str = "cpu",
    seeds: int | None = None, variants: Sequence[str] = (), workers: int = 1, command: str = "",
) -> dict:  # fmt: skip
    """Train every variant with every seed and return the result (see `results.py`); print a line per finished run."""
    experiment = get(name)
    count = seeds or experiment.presets[preset].seeds
    jobs = [(variant, seed) for seed in range(count) for variant in variants or experiment.variants]
    run = partial(run_job, name=name, preset=preset, folder=Path(folder) / name / preset, data=data, device=device)
    if workers <= 1:
        return collect(experiment, preset, list(map(run, jobs)), command)
    threads = max(1, (os.cpu_count() or 1) // workers)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        return collect(experiment, preset, list(pool.map(run, jobs)), command)


def run_job(job: Job, name: str, preset: str, folder: Path, data: Path | None, device: str) -> dict:
    """Return the record of one run, and print how it ended to standard error."""
    record = loop.run(get(name), preset, *job, folder, data=data, device=device)
    end = "diverged" if record["diverged"] else f"loss {record['history'][-1].get('loss', math.nan):.3f}"
    print(f"{name} {job[0]} seed {job[1]}: {end}", file=sys.stderr, flush=True)
    return record
