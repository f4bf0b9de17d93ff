"""The numbers that page.js and compare.js draw: per head and statistic seven numbers and a coarse histogram."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from regard.health.checks.finding import MODEL, Finding
from regard.health.measure import histogram as bins
from regard.health.measure.heads import HeadReading
from regard.health.measure.histogram import BINS, ROW
from regard.health.measure.layer_reading import CURVES, LayerReading
from regard.health.report.glossary import STATISTICS, WORDS
from regard.health.report.page.causes import SHOWN, checks_of, first_place, list_causes
from regard.health.report.report import Report
from regard.health.report.summary import ROOT

ABLATION = "ablation"
KEYS = ("mean", "std", "min", "q05", "q50", "q95", "max")


def describe_statistics() -> dict[str, list]:
    """Names and meanings, and the value below which a quantile is only known to be smaller."""
    least = [shorten(bins.least(name), 2) for name in STATISTICS]
    return dict(statistics=list(STATISTICS), meaning=list(STATISTICS.values()), least=least)


def list_layers(heads: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    """The layers of (index, name) pairs, in order."""
    return [dict(index=index, name=name or ROOT) for index, name in sorted(dict(heads).items())]


def list_numbers(
    statistics: Mapping[str, Mapping[str, float | None]], keys: Sequence[str], digits: int
) -> list[list[float | None]]:
    """Per statistic the numbers named by `keys`, of a head's JSON."""
    return [[shorten(statistics.get(name, {}).get(key), digits) for key in keys] for name in STATISTICS]


def shorten(x: float | None, digits: int) -> float | None:
    """`x` to so many digits; None if it is not finite."""
    return None if x is None or not math.isfinite(x) else float(f"{x:.{digits}g}")


def make_payload(report: Report, groups: int, digits: int, changed: bool = True, spread: bool = True) -> dict[str, Any]:
    """The report's numbers, with histograms of at most `groups` bars (0: no histograms and no curves).

    Without `changed` the what-ifs are left out; without `spread` each statistic has only its mean. The ablation of
    heads, where it was measured, is one more statistic, with a mean and no more.
    """
    treatments = {"as measured": report.heads}
    found = {"as measured": report.findings}
    if changed:
        treatments.update({name: one.heads for name, one in report.what_if.items()})
        found.update({name: one.findings for name, one in report.what_if.items()})
    ablation = checks_of(report).get("ablation") or {}
    effects = {(one["index"], one["head"]): one["change"] for one in ablation.get("heads", ())}
    known = [head.reading for heads in treatments.values() for head in heads if groups]
    readings = {id(reading): reading for reading in known if reading is not None}
    axes = {
        name: _choose_axis([reading.histogram[ROW[name]] for reading in readings.values()], groups)
        for name in STATISTICS
    }
    shapes = {key: _rebin(reading, axes) for key, reading in readings.items()}
    keys = KEYS if spread else KEYS[:1]

    def describe(head: HeadReading) -> dict[str, Any]:
        effect = [[shorten(effects.get((head.index, head.head)), digits)] + [None] * (len(keys) - 1)] if effects else []
        return dict(
            layer=head.index,
            head=head.head,
            numbers=list_numbers(head.to_json()["statistics"], keys, digits) + effect,
            shapes=[layer[head.head] for layer in shapes[id(head.reading)]] if groups else [[] for _ in STATISTICS],
            curves=_align(head.curves) if groups else {},
        )

    statistics = describe_statistics()
    if effects:
        statistics["statistics"].append(ABLATION)
        statistics["meaning"].append(WORDS[ABLATION])
        statistics["least"].append(None)
    return dict(
        **statistics,
        layers=list_layers([(head.index, head.layer) for head in report.heads]),
        axes=[_edges(name, axes[name]) for name in STATISTICS],
        treatments=[
            dict(name=name, heads=list(map(describe, heads)), flagged=list_flagged(found[name]))
            for name, heads in treatments.items()
        ],
        first=first_place(report),
        causes=[cause.kind for cause in list_causes(report)[:SHOWN]],
        tokens=report.tokens,
    )


def _align(curves: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, list]:
    """The positions of all curves as "at", and per statistic its means there; None where it has none."""
    at = sorted({position for name in CURVES for position, _ in curves[name]})
    means = {name: dict(curves[name]) for name in CURVES}
    return {"at": at, **{name: [shorten(means[name].get(position), 3) for position in at] for name in CURVES}}


def list_flagged(findings: Sequence[Finding]) -> list[list]:
    """[layer index, head, gravest severity, kinds] of every head with a finding."""
    flagged: dict[tuple[int, int], list] = {}
    for finding in (one for one in findings if one.scope != MODEL):  # the gravest come first
        for place in finding.places:
            flagged.setdefault(place, [*place, finding.severity, []])[3].append(finding.kind)
    return [flagged[place] for place in sorted(flagged)]


def _choose_axis(histograms: list[torch.Tensor], groups: int) -> tuple[int, int, int]:
    """The used bins in at most `groups` equal groups: (first bin, bins in a group, number of groups)."""
    used = sum((one.sum(0) for one in histograms), torch.zeros(BINS, dtype=torch.int64)).nonzero().flatten().tolist()
    if not used:
        return 0, BINS, 0
    many = used[-1] - used[0] + 1
    size = max(1, math.ceil(many / groups))
    return used[0], size, math.ceil(many / size)


def _edges(name: str, axis: tuple[int, int, int]) -> list[float | None]:
    first, size, count = axis
    values = bins.edges(name)
    return [shorten(values[min(first + size * step, BINS)], 5) for step in range(count + 1)] if count else []


def _rebin(reading: LayerReading, axes: Mapping[str, tuple[int, int, int]]) -> list[list[list[int]]]:
    """Per statistic and head, how many of 1000 rows are in each group of bins."""
    shapes = []
    for name, (first, size, count) in axes.items():
        part = reading.histogram[ROW[name]][:, first : first + size * count].double()
        part = torch.nn.functional.pad(part, (0, size * count - part.shape[1])).reshape(len(part), count, size).sum(-1)
        shapes.append((1000.0 * part / part.sum(-1, keepdim=True).clamp_min(1.0)).round().long().tolist())
    return shapes
