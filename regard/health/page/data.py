"""The numbers of a report as page.js reads them: per head seven numbers and a coarse histogram of each statistic."""

from __future__ import annotations

import math

import torch

from regard.health import bins
from regard.health.bins import BINS, NAMES

MEANING = dict(
    entropy_ratio="Entropy over ln(visible keys): 1 is uniform, 0 is one key.",
    entropy="Entropy of the weights, in nats.",
    effective_keys="e to the entropy: how many keys share the weight.",
    participation="1/Σp²: how many keys share the weight, counting the strong ones.",
    max_weight="The largest weight of a row.",
    first_key_mass="The share of the first visible key: attention sinks.",
    distance="Mean distance, in tokens, from query to key.",
    gain_ratio="Trace of the softmax's Jacobian over that of a uniform row: what the gradient has left.",
    gradient_gain="Trace of the softmax's Jacobian.",
    max_logit="The largest logit of a row.",
    mean_logit="The mean logit of a row.",
    logit_variance="Variance of a row's logits: 1/√d aims at 1.",
    logsumexp="log Σ exp(logits), the sink included.",
    mass="Sum of the weights: less than 1 where a sink takes its part.",
    support="How many keys have a weight above 0.",
    visible_keys="How many keys the mask leaves.",
)
DIGITS = 5


def payload(report, coarse: int) -> dict:
    """The report's numbers, histograms rebinned to `coarse` bins (0: none)."""
    treatments = {"as measured": report.heads, **{name: one.heads for name, one in report.what_if.items()}}
    axes = {name: _axis(name, [head for heads in treatments.values() for head in heads], coarse) for name in NAMES}
    layers = {head.index: head.layer for head in report.heads}
    return dict(
        statistics=list(MEANING),
        meaning=list(MEANING.values()),
        layers=[dict(index=index, name=name) for index, name in sorted(layers.items())],
        axes=[axes[name]["edges"] for name in MEANING],
        treatments=[
            dict(name=name, heads=[_head(head, axes, measured=name == "as measured") for head in heads])
            for name, heads in treatments.items()
        ],
        ill=sorted({(layer, head) for finding in report.findings for layer, head in finding.heads}),
    )


def _axis(name: str, heads: list, coarse: int) -> dict:
    """The used part of a statistic's bins, in equal groups of them."""
    used = torch.zeros(BINS, dtype=torch.bool)
    for head in heads:
        used |= head.statistics[name].histogram > 0
    at = used.nonzero().flatten().tolist()
    if not at or not coarse:
        return dict(first=0, group=BINS, count=0, edges=[])
    first, last = at[0], at[-1]
    group = max(1, math.ceil((last - first + 1) / coarse))
    count = math.ceil((last - first + 1) / group)
    values = bins.edges(name)
    edges = [_short(values[min(first + group * step, BINS)]) for step in range(count + 1)]
    return dict(first=first, group=group, count=count, edges=edges)


def _head(head, axes: dict, measured: bool) -> dict:
    numbers, shapes = [], []
    for name in MEANING:
        spread = head.statistics[name]
        quantiles = [spread.quantile(share) if spread.count else math.nan for share in (0.05, 0.5, 0.95)]
        numbers.append([_short(x) for x in (spread.mean, spread.std, spread.min, *quantiles, spread.max)])
        shapes.append(_shape(spread.histogram, axes[name]))
    told = dict(layer=head.index, head=head.head, numbers=numbers, shapes=shapes)
    told["curve"] = [[position, _short(mean)] for position, mean in head.curves.get("entropy_ratio", [])]
    if measured:
        told["rows"] = head.statistics["entropy"].count
    return told


def _shape(histogram, axis: dict) -> list[int]:
    """Per mille of the rows in each group of bins."""
    if not axis["count"]:
        return []
    first, group, count = axis["first"], axis["group"], axis["count"]
    part = histogram[first : first + group * count]
    part = torch.nn.functional.pad(part, (0, group * count - part.numel()))
    grouped = part.reshape(count, group).sum(1).double()
    return (1000.0 * grouped / grouped.sum().clamp_min(1.0)).round().long().tolist()


def _short(x: float) -> float | None:
    return float(f"{x:.{DIGITS}g}") if math.isfinite(x) else None
