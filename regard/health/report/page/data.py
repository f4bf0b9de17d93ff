"""The numbers of a report as page.js reads them: per head seven numbers and a coarse histogram of each statistic."""

from __future__ import annotations

import math

import torch

from regard.health.readings import histogram as bins
from regard.health.readings.histogram import BINS, ROW

MEANING = dict(
    entropy_ratio="Entropy over ln(visible keys): 1 is uniform, 0 is one key.",
    entropy="Entropy of the weights, in nats.",
    effective_keys="e to the entropy: how many keys share the weight.",
    participation="1/Σp̄²: how many keys share the weight, counting the strong ones.",
    max_weight="The largest weight of a row.",
    first_key_mass="The share of the first visible key: attention sinks.",
    distance="Mean distance, in tokens, from query to key.",
    gain_ratio="Trace of the normaliser's Jacobian over that of a uniform softmax row: what the gradient has left.",
    gradient_gain="Trace of the normaliser's Jacobian.",
    max_logit="The largest logit of a row.",
    mean_logit="The mean logit of a row.",
    logit_variance="Variance of a row's logits: 1/√d aims at 1.",
    logsumexp="log Σ exp(logits), the sink included.",
    mass="Sum of the weights: less than 1 where a sink takes its part.",
    support="How many keys have a weight above 0.",
    visible_keys="How many keys the mask leaves.",
)
ITSELF = "the model itself"  # the name of a root module is empty
SHARES = (0.05, 0.5, 0.95)


def payload(report, coarse: int, digits: int, changed: bool = True, spread: bool = True) -> dict:
    """The report's numbers to so many digits, histograms rebinned to `coarse` bins (0: none, and no curves).

    Without `changed` what-ifs are left to the table in words, without `spread` each statistic is its mean alone.
    """
    treatments = {"as measured": report.heads}
    if changed:
        treatments.update({name: one.heads for name, one in report.what_if.items()})
    readings = {id(head.reading): head.reading for heads in treatments.values() for head in heads}
    axes = _axes(list(readings.values()), coarse)
    layers = {key: _layer(reading, axes, digits, spread) for key, reading in readings.items()}
    named = {head.index: head.layer or ITSELF for head in report.heads}
    return dict(
        statistics=list(MEANING),
        meaning=list(MEANING.values()),
        layers=[dict(index=index, name=name) for index, name in sorted(named.items())],
        axes=[_edges(name, axes[name]) for name in MEANING],
        least=[_short(bins.least(name), 2) for name in MEANING],
        treatments=[
            dict(name=name, heads=[_head(head, layers[id(head.reading)], coarse, digits) for head in heads])
            for name, heads in treatments.items()
        ],
        ill=sorted({place for finding in report.findings for place in finding.places}),
    )


def _axes(readings: list, coarse: int) -> dict[str, tuple[int, int, int]]:
    """Per statistic, the used part of its bins in equal groups: (first bin, bins in a group, groups)."""
    if not coarse:
        return dict.fromkeys(MEANING, (0, BINS, 0))
    axes = {}
    for name in MEANING:
        used = sum((reading.histogram[ROW[name]].sum(0) for reading in readings), torch.zeros(BINS, dtype=torch.int64))
        at = used.nonzero().flatten().tolist()
        if not at:
            axes[name] = (0, BINS, 0)
            continue
        group = max(1, math.ceil((at[-1] - at[0] + 1) / coarse))
        axes[name] = (at[0], group, math.ceil((at[-1] - at[0] + 1) / group))
    return axes


def _edges(name: str, axis: tuple[int, int, int]) -> list[float | None]:
    first, group, count = axis
    values = bins.edges(name)
    return [_short(values[min(first + group * step, BINS)], 5) for step in range(count + 1)] if count else []


def _layer(reading, axes: dict, digits: int, spread: bool) -> tuple[list, list]:
    """(numbers [H][S][7], or [H][S][1], shapes [H][S][groups]) of a whole layer at once."""
    columns = [reading.mean]
    if spread:
        low, middle, high = reading.quantiles(SHARES)
        std = (reading.square / reading.count.clamp_min(1.0)).sqrt()
        columns += [std, reading.low, low, middle, high, reading.high]
    told = torch.stack(columns, -1).masked_fill((reading.count == 0)[..., None], math.nan)  # [S, H, 7]
    told = told[[ROW[name] for name in MEANING]].transpose(0, 1).tolist()
    numbers = [[[_short(x, digits) for x in several] for several in head] for head in told]
    shapes = [_shapes(reading.histogram[ROW[name]], axes[name]) for name in MEANING]  # [S][H][groups]
    return numbers, [list(head) for head in zip(*shapes, strict=True)]


def _shapes(histogram, axis: tuple[int, int, int]) -> list[list[int]]:
    """Per head, per mille of the rows in each group of bins."""
    first, group, count = axis
    if not count:
        return [[] for _ in histogram]
    part = histogram[:, first : first + group * count].double()
    part = torch.nn.functional.pad(part, (0, group * count - part.shape[1])).reshape(len(part), count, group).sum(-1)
    return (1000.0 * part / part.sum(-1, keepdim=True).clamp_min(1.0)).round().long().tolist()


def _head(head, layer: tuple[list, list], coarse: int, digits: int) -> dict:
    numbers, shapes = layer
    curve = head.curves["entropy_ratio"] if coarse else []
    return dict(
        layer=head.index,
        head=head.head,
        rows=head.statistics.count("entropy"),
        numbers=numbers[head.head],
        shapes=shapes[head.head],
        curve=[[position, _short(mean, digits)] for position, mean in curve],
    )


def _short(x: float, digits: int) -> float | None:
    return float(f"{x:.{digits}g}") if math.isfinite(x) else None
