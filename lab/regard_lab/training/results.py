"""`collect`: the result of all records of an experiment; per variant means over seeds, t-intervals, divergences.

A result is JSON: `{"experiment", "preset", "question", "metric", "how", "records": […], "summary":
{variant: {"runs", "diverged", metric: {"mean", "low", "high", "n"}}}}`. Diverged runs are counted; the means
are over the others, `n` of them.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from regard_lab.estimate import Estimate, student
from regard_lab.figure import Figure
from regard_lab.training.experiment import Experiment
from regard_lab.training.loop import round_numbers

LEVEL = 0.95
SHIPPED = Path(__file__).parent / "results"


def interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Return mean ± t·s/√n; (−∞, ∞) for fewer than two values."""
    if len(values) < 2:
        return -math.inf, math.inf
    middle = statistics.fmean(values)
    half = student(len(values), level) * statistics.stdev(values) / math.sqrt(len(values))
    return middle - half, middle + half


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate the mean of values, one per seed, with its t-interval."""
    return Estimate(statistics.fmean(values), *interval(values))


def sign_of(estimate: Estimate) -> int:
    """Return +1 if the whole interval lies above 0, −1 if below, 0 if it contains 0."""
    return int(estimate.low > 0) - int(estimate.high < 0)


def plus_minus(estimate: Estimate) -> str:
    """Format an estimate as value ± half-width, to two digits of the half-width.

    >>> from regard_lab.training.results import Estimate, plus_minus
    >>> plus_minus(Estimate(0.12345, 0.1, 0.1469))
    '+0.123 ± 0.023'
    """
    half = (estimate.high - estimate.low) / 2
    digits = 3 if not 0 < half < math.inf else max(0, 1 - math.floor(math.log10(half)))
    return f"{round(estimate.value, digits) + 0.0:+.{digits}f} ± {half:.{digits}f}"


def group_by_sign(differences: Mapping[str, Estimate]) -> dict[int, str]:
    """Return sign (+1, −1, 0) → the differences of that sign as text, "a +0.30 ± 0.10, b …", or "none"."""
    groups: dict[int, list[str]] = {1: [], -1: [], 0: []}
    for name, difference in differences.items():
        groups[sign_of(difference)].append(f"{name} {plus_minus(difference)}")
    return {sign: ", ".join(names) or "none" for sign, names in groups.items()}


def collect(
    experiment: Experiment, preset: str, records: Sequence[dict], command: str = "", left_out: Mapping | None = None
) -> dict:
    """Return the result of all records of one experiment; `left_out` says why a variant has none."""
    how = dict(
        command=command,
        where=sorted({record["where"] for record in records}),
        data=sorted({record["data"] for record in records}),
        level=LEVEL,
        **({"left_out": dict(left_out)} if left_out else {}),
    )
    variants = [name for name in experiment.variants if any(r["variant"] == name for r in records)]
    return dict(
        experiment=experiment.name,
        preset=preset,
        question=experiment.question,
        metric=experiment.metric,
        how=how,
        summary={name: summary([r for r in records if r["variant"] == name]) for name in variants},
        records=list(records),
    )


def summary(records: Sequence[dict]) -> dict[str, Any]:
    """Return {"runs", "diverged", "parameters", metric: {"mean", "low", "high", "n"}, …} of one variant."""
    finished = [record for record in records if not record["diverged"]]
    numbers: dict[str, Any] = dict(runs=len(records), diverged=len(records) - len(finished))
    numbers["parameters"] = records[0]["parameters"]
    for name, first in finished[0]["final"].items() if finished else ():
        values = [r["final"][name] for r in finished if r["final"].get(name) is not None]
        if name != "step" and isinstance(first, int | float) and values:
            low, high = interval(values)
            numbers[name] = round_numbers(dict(mean=statistics.fmean(values), low=low, high=high, n=len(values)))
    return numbers


def final_values(result: dict, variant: str, metric: str | None = None) -> dict[int, float]:
    """Return seed → the last value of a metric, for the runs that did not diverge."""
    metric = metric or result["metric"]
    chosen = [r for r in result["records"] if r["variant"] == variant and not r["diverged"]]
    return {r["seed"]: r["final"][metric] for r in chosen if r["final"].get(metric) is not None}


def paired_differences(result: dict, variant: str, other: str, metric: str | None = None) -> list[float]:
    """Return variant − other, seed by seed; both sides saw the same batches."""
    a, b = final_values(result, variant, metric), final_values(result, other, metric)
    return [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]


def training_bands(result: dict, variant: str, metric: str) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return (steps, low, mean, high) of a metric over training for a figure of bands: the range over seeds."""
    by_step: dict[int, list[float]] = {}
    for record in result["records"]:
        if record["variant"] == variant:
            for entry in record["history"]:
                if entry.get(metric) is not None:
                    by_step.setdefault(entry["step"], []).append(entry[metric])
    steps = sorted(by_step)
    columns = [(min(v), statistics.fmean(v), max(v)) for v in map(by_step.get, steps)]
    low, middle, high = (list(column) for column in zip(*columns, strict=True)) if columns else ([], [], [])
    return steps, low, middle, high


def draw_runs(result: dict, names: Sequence[str], title: str, alt: str, metric: str | None = None) -> Figure:
    """Draw the last value of every run, a column of dots per variant; `alt` ends with the means."""
    runs = {name: list(final_values(result, name, metric).values()) for name in names}
    means = ", ".join(f"{name} {statistics.fmean(values):.4g}" for name, values in runs.items() if values)
    dots = {"a run": ([n for n, v in runs.items() for _ in v], [x for v in runs.values() for x in v])}
    return Figure("dots", "", title, dots, alt=f"{alt} {means}.")


def draw_training(result: dict, variants: Mapping[str, str], metric: str, title: str, log: str = "") -> Figure:
    """Draw a metric over training, the range over seeds, for label → variant; `alt` has the last means."""
    lines = {label: training_bands(result, name, metric) for label, name in variants.items()}
    ends = ", ".join(f"{label} {line[2][-1]:.3g}" for label, line in lines.items() if line[2])
    return Figure("bands", "step", title, lines, alt=f"{title} over training, at the end: {ends}.", log=log)


def final_bands(result: dict, variants: Mapping[float, str]) -> tuple[list[float], ...]:
    """Return (x, low, mean, high) of the metric's last values, x → variant, for a figure of bands over seeds."""
    found = {x: result["summary"].get(v, {}).get(result["metric"]) for x, v in variants.items()}
    found = {x: estimate for x, estimate in found.items() if estimate}
    return list(found), *([estimate[side] for estimate in found.values()] for side in ("low", "mean", "high"))


def has_shipped(name: str) -> bool:
    """True if this version ships a result of the experiment."""
    return (SHIPPED / f"{name}.json").exists()


@cache
def shipped(name: str) -> dict:
    """Return the result of the full preset that this version ships."""
    path = SHIPPED / f"{name}.json"
    if not path.exists():
        raise ValueError(f"experiment {name!r} has no shipped result; run `regard lab train {name} --preset full`")
    return json.loads(path.read_text(encoding="utf-8"))
