"""`readings`: how sharply a model attends, as means of statistics over layers, heads and rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.statistics import Statistics

MEANS = ("entropy", "max_weight", "mass", "distance", "first_key_mass", "gradient_gain")
WANTED = ("visible_keys", "max_logit", "support", *MEANS)
BY_HEAD = ("entropy_ratio", "max_weight", "distance", "first_key_mass", "gradient_gain")


def readings(layers: Sequence[Statistics], rows: Sequence[Tensor] | None = None) -> dict[str, float]:
    """Return the mean statistics of rows with two visible keys or more (a row of one key is always sharp).

    `rows` [B, L] per layer leaves padding queries out. entropy_ratio is entropy / ln n, support_share the part of the
    keys with weight, max_logit the largest of all.
    """
    heads = [by_head(stats, None if rows is None else rows[i]) for i, stats in enumerate(layers)]
    means = torch.stack([torch.stack([head[name].mean() for head in heads]).mean() for name in heads[0]])
    top = torch.stack([stats.max_logit.max() for stats in layers]).max()
    *values, largest = torch.cat([means, top[None]]).tolist()  # one device sync
    return {**dict(zip(heads[0], values, strict=True)), "max_logit": largest}


def by_head(stats: Statistics, real: Tensor | None = None) -> dict[str, Tensor]:
    """Return name → means over batch and rows [H]."""
    n = stats.visible_keys  # [B, H, L]
    rows = n > 1 if real is None else (n > 1) & real[:, None]
    values = {name: stats[name] for name in MEANS}
    values["entropy_ratio"] = stats.entropy / n.clamp_min(2).log()
    values["support_share"] = stats.support / n.clamp_min(1)
    count = rows.sum((0, 2))
    return {name: (value * rows).sum((0, 2)) / count for name, value in values.items()}


def head_table(layers: Sequence[Statistics]) -> list[list[dict[str, float]]]:
    """Return the readings of each [layer][head], for records."""
    found = []
    for stats in layers:
        heads = by_head(stats)
        columns = torch.stack([heads[name] for name in BY_HEAD], -1).tolist()
        found.append([dict(zip(BY_HEAD, row, strict=True)) for row in columns])
    return found
