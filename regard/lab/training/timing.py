"""How long a training step of each variant takes: variants in turn, round after round, the median of the rounds.

A step is loss, gradient, clip and optimizer, on batches drawn before the clock starts. Alone on the machine or not at
all: runs that train at the same time take each other's time.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from regard.lab.training.experiment import get
from regard.lab.training.step import Step

WARM = 10  # steps before the clock: compilation, the graph's capture
ROUND = 10  # steps between two readings of the clock


def step_times(
    name: str, preset: str = "small", data: Path | None = None, device: str = "cpu", rounds: int = 15
) -> dict[str, dict[str, float]]:
    """variant → {"median", "low", "high"}: milliseconds a step; low and high are the quartiles over the rounds."""
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
            _wait(place)
            began = time.perf_counter()
            for i, batch in batches.items():
                step(i, batch)
            _wait(place)
            times[variant].append((time.perf_counter() - began) * 1e3 / ROUND)
    return {variant: _quartiles(values) for variant, values in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _quartiles(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return dict(median=round(median, 4), low=round(low, 4), high=round(high, 4))
