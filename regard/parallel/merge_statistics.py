"""Merge finished statistics of parts of a row: the row is a mixture of its parts with shares π = z_part / z.

    entropy        H = Σ π·H_part − Σ π·log π                (chain rule, no cancellation)
    participation  Σp̄² = Σ π²·Σp̄²_part
    gradient_gain  1 − Σp̄² = Σ π²·gain_part + Σ_{a≠b} π_a·π_b       (softmax; pointwise maps add it)
    distance       Σ π·distance_part,  and so on

For softmax maps before their sink, and for pointwise maps, whose shares π are shares of the mass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.statistics import NAMES, Statistics

Stats = dict[str, Tensor]
# what merging a statistic needs besides itself
HELPERS = dict(logit_variance=("mean_logit",), effective_keys=("entropy",), max_weight=("max_logit",))
ALWAYS = ("visible_keys", "max_logit", "mass", "participation")


def required(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the statistics of parts that these statistics of rows are merged from."""
    wanted = {*names, *(ALWAYS if names else ()), *(helper for name in names for helper in HELPERS.get(name, ()))}
    return tuple(name for name in NAMES if name in wanted)


def with_first_key(stats: Stats, first: int) -> Stats:
    """Add the position of the first visible key; `first` is the part's first key."""
    if "first" in stats:  # merged before
        return stats
    visible = stats["visible_keys"] > 0
    return {**stats, "first": torch.where(visible, float(first), math.inf)}


def merge(a: Stats, b: Stats, old: Tensor, new: Tensor, pointwise: bool) -> Stats:
    """Merge the statistics of two parts; `old` and `new` are their sums z at a common shift."""
    total = old + new
    share = [torch.where(total == 0, 0.0, x / total) for x in (old, new)]
    both = share[0] * share[1]
    n = a["visible_keys"] + b["visible_keys"]
    ratio = b["visible_keys"] / n.clamp_min(1.0)
    found = {"visible_keys": n, "first": torch.minimum(a["first"], b["first"])}
    for name in a.keys() - found.keys():
        x, y = a[name], b[name]
        if name in ("max_logit", "max_weight"):
            value = torch.maximum(x, y)
        elif name == "mean_logit":
            value = x + (y - x) * ratio
        elif name == "logit_variance":
            gap = b["mean_logit"] - a["mean_logit"]
            value = x + (y - x) * ratio + gap * gap * ratio * (1.0 - ratio)
        elif name == "logsumexp":
            value = torch.logaddexp(x, y)
        elif name in ("mass", "support") or (name == "gradient_gain" and pointwise):
            value = x + y
        elif name == "entropy":
            value = share[0] * x + share[1] * y + _binary_entropy(*share)
        elif name == "participation":
            value = _inverse(share[0] ** 2 * _inverse(x) + share[1] ** 2 * _inverse(y))
        elif name == "gradient_gain":
            value = share[0] ** 2 * x + share[1] ** 2 * y + 2.0 * both
        elif name == "distance":
            value = share[0] * x + share[1] * y
        elif name == "first_key_mass":
            value = torch.where(b["first"] < a["first"], share[1] * y, share[0] * x)
        else:
            continue  # follows from the others
        found[name] = value
    return found


def finish(stats: Stats, names: tuple[str, ...], m: Tensor, z: Tensor, sinks: Tensor | None) -> Statistics:
    """Return the statistics of whole rows; `sinks` is the weight of their sinks, None for pointwise maps."""
    empty = stats["visible_keys"] == 0
    values = dict(stats)
    if sinks is not None:
        kept = torch.where(empty, 0.0, 1.0 - sinks)
        values["mass"] = kept
        values["logsumexp"] = m + torch.log(z)
        values["max_weight"] = torch.exp(stats["max_logit"] - m) / z
        if "gradient_gain" in stats:
            values["gradient_gain"] = kept * sinks + kept**2 * stats["gradient_gain"]
    values["support"] = stats["visible_keys"]
    if "entropy" in stats:
        values["effective_keys"] = torch.exp(stats["entropy"])
    lowest = {"max_logit": -math.inf, "logsumexp": -math.inf}
    return Statistics({name: torch.where(empty, lowest.get(name, 0.0), values[name]) for name in names})


def _binary_entropy(p: Tensor, q: Tensor) -> Tensor:
    """Return −p·log p − q·log q for p + q = 1, accurate for small p or q too."""
    small = torch.minimum(p, q)
    return -torch.xlogy(small, small) - (1.0 - small) * torch.log1p(-small)


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x == 0, 0.0, 1.0 / x)
