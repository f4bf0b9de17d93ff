"""`step_times`: milliseconds of a training step of each variant, alternating variants, median over rounds.

A step is loss, gradient, clip and optimizer, on batches drawn before the clock starts. Nothing else should run on the
machine meanwhile.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch

from regard.table import Table
from regard_lab.training.experiment import get
from regard_lab.training.results import SHIPPED
from regard_lab.training.step import Step

WARM = 10  # steps before the clock starts: compilation and graph capture
ROUND = 10  # steps between two readings of the clock


def step_times(
    name: str, preset: str = "small", data: Path | None = None, device: str = "cpu", rounds: int = 15
) -> dict[str, dict[str, float]]:
    """Return variant → {"median", "low", "high"} in milliseconds a step; low and high are quartiles over rounds."""
    experiment, place = get(name), torch.device(device)
    steps: dict[str, Step] = {}
    for variant in experiment.variants:
        torch.manual_seed(0)
        trial = experiment.make(experiment.setting(preset, variant, 0, data, place))
        steps[variant] = Step(trial, trial.optimizer(), WARM + ROUND * rounds)
        for i in range(WARM):
            steps[variant](i)
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    for turn in range(rounds):
        for variant, step in steps.items():
            batches = {i: step.trial.batch(i) for i in range(WARM + turn * ROUND, WARM + (turn + 1) * ROUND)}
            _synchronize(place)
            began = time.perf_counter()
            for i, batch in batches.items():
                step(i, batch)
            _synchronize(place)
            times[variant].append((time.perf_counter() - began) * 1e3 / ROUND)
    return {variant: _quartiles(values) for variant, values in times.items()}


def table(name: str, times: dict[str, dict[str, float]]) -> Table:
    """Return one row per variant: median, quartiles, and the median over the first variant's."""
    first = next(iter(times))
    rows = [
        [v, f"{t['median']:.3f}", f"{t['low']:.3f} to {t['high']:.3f}", f"{t['median'] / times[first]['median']:.2f}"]
        for v, t in times.items()
    ]
    return Table(["variant", "ms a step", "quartiles", f"of {first}"], rows, name, numbers=["ms a step", f"of {first}"])


def shipped_times(name: str) -> dict:
    """Return {"where": the machine, "times": see `step_times`} as measured for this version."""
    return json.loads((SHIPPED / "times" / f"{name}.json").read_text(encoding="utf-8"))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _quartiles(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return dict(median=round(median, 4), low=round(low, 4), high=round(high, 4))
