"""One sample of a monitor: a table per layer, [heads, columns], that merges over ranks, and the scalars made of it.

| column | merged over ranks by |
| --- | --- |
| numbers of rows | adding |
| `max_logit`, `largest_activation` (of the block around the layer) | the largest |
| means over rows (`entropy_ratio`, …) | the mean weighted by rows |
| findings (NaN: the head does not have it) | the largest, if most ranks with rows of the head have it |
| `not_finite` | the largest |

Ranks that share a head (data and context parallel) merge by these rules; heads of tensor-parallel ranks and layers of
pipeline stages stand beside one another. Scalars are made afterwards, so that they are those of one process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.health.checks import dead, diffuse, large_logits, scale_off
from regard.health.checks.finding import LOGIT_LIMIT
from regard.health.measure.histogram import ROW
from regard.health.measure.layer_reading import LayerReading

COUNTS = ("rows", "ratio_rows", "query_rows", "key_rows", "gate_rows")
MEANS = {  # column -> the count that weights it
    "entropy_ratio": "ratio_rows",
    "gain_ratio": "ratio_rows",
    "max_weight": "rows",
    "first_key_mass": "rows",
    "logit_variance": "rows",
    "gradient_gain": "rows",
    "q_norm": "query_rows",
    "k_norm": "key_rows",
    "v_norm": "key_rows",
    "gate": "gate_rows",
    "median_activation": "rows",  # of the block around the layer, as its largest one; over ranks the mean of medians
}
NORMS = ("q_norm", "k_norm", "v_norm")
WATCHED = (large_logits, scale_off, dead, diffuse)  # checks made in every sample
FLAGS = (*(rule.kind for check in WATCHED for rule in check.RULES), "positional", "bounded")
LARGEST = ("max_logit", "largest_activation")
COLUMNS = (*COUNTS, *LARGEST, *MEANS, *FLAGS, "not_finite")
AT = {name: column for column, name in enumerate(COLUMNS)}
READ = tuple(name for name in MEANS if name in ROW)  # columns that are means of a reading
EMPTY_ROW = [math.nan if name in FLAGS else -math.inf if name in LARGEST else 0.0 for name in COLUMNS]
HEAD_VALUES = ("max_logit", "entropy_ratio", "max_weight", "first_key_mass", "gain_ratio", "logit_variance")
SINK = 0.3  # mean mass on the first key above which a head is a sink
MOST_SERIES = 400  # for layers and model; metrics per layer are left out, the last first, to stay below
MODEL_SERIES = 16  # room for those over the model
PER_LAYER = (
    "max_logit", "entropy_ratio_min", "entropy_ratio_mean", "sink_rate", "gradient_gain", *NORMS, "gate",
    "largest_activation", "median_activation",
)  # fmt: skip


class LayerKey(NamedTuple):
    """Identifies a layer's heads on a rank: pipeline stage, place in the model, name, first head, number of heads."""

    stage: int
    order: int
    label: str
    first_head: int
    heads: int


@dataclass
class LayerSample:
    """The table of one layer, [heads, columns], float64 on the CPU."""

    label: str
    table: Tensor


def empty_table(heads: int) -> Tensor:
    return torch.tensor([EMPTY_ROW], dtype=torch.float64).repeat(heads, 1)


def fill_table(table: Tensor, reading: LayerReading) -> None:
    """Writes a layer's reading (on the CPU) into its table."""
    cells = table.numpy()
    cells[:, [AT["rows"], AT["ratio_rows"]]] = reading.count.numpy()[[ROW["visible_keys"], ROW["entropy_ratio"]]].T
    cells[:, AT["max_logit"]] = reading.high.numpy()[ROW["max_logit"]]
    cells[:, [AT[name] for name in READ]] = reading.mean.numpy()[[ROW[name] for name in READ]].T
    cells[:, [AT["query_rows"], AT["key_rows"]]] = queries, keys = reading.norm_rows.numpy()
    for name, sums, count in zip(NORMS, reading.norms.numpy(), (queries, keys, keys), strict=True):
        cells[:, AT[name]] = sums / max(count, 1.0)


def fill_max_logits(table: Tensor, largest: Tensor) -> None:
    """Writes the largest logits of a layer's heads, where they alone are known, into its table."""
    table[:, AT["rows"]] = (largest > -torch.inf).double()
    table[:, AT["max_logit"]] = largest
    table[:, AT["exploding logits"]] = torch.where(largest > LOGIT_LIMIT, largest, torch.nan)


def merge_tables(tables: Tensor) -> Tensor:
    """Merges the tables of the ranks that share a layer's heads, [ranks, heads, columns] → [heads, columns]."""
    merged = empty_table(tables.shape[1])
    for name in COUNTS:
        merged[:, AT[name]] = tables[..., AT[name]].sum(0)
    for name in (*LARGEST, "not_finite"):
        merged[:, AT[name]] = tables[..., AT[name]].amax(0)
    for name, count in MEANS.items():
        weight = tables[..., AT[count]]
        parts = torch.where(weight > 0, weight * tables[..., AT[name]], 0.0)
        merged[:, AT[name]] = parts.sum(0) / weight.sum(0).clamp_min(1.0)
    has_rows = tables[..., AT["rows"]] > 0
    for name in FLAGS:
        numbers = tables[..., AT[name]]
        has = ~numbers.isnan() & has_rows
        most = 2 * has.sum(0) > has_rows.sum(0)
        largest = torch.where(has, numbers, -math.inf).amax(0)
        merged[:, AT[name]] = torch.where(most, largest, math.nan)
    return merged


def merge_ranks(keys: Sequence[LayerKey], tables: Sequence[Tensor]) -> list[LayerSample]:
    """Merges what ranks sent, tables [ranks, heads, columns] per key, into one per layer, in the model's order."""
    merged = merge_tables(torch.cat(list(tables), 1)).split([key.heads for key in keys]) if keys else ()
    layers: dict[tuple[int, int, str], list[tuple[int, Tensor]]] = {}
    for key, each in zip(keys, merged, strict=True):
        layers.setdefault(key[:3], []).append((key.first_head, each))
    stages: dict[str, set[int]] = {}
    for key in keys:
        stages.setdefault(key.label, set()).add(key.stage)
    found = []
    for (stage, _, label), parts in sorted(layers.items(), key=lambda item: item[0]):
        table = torch.cat([table for _, table in sorted(parts, key=lambda part: part[0])])
        found.append(LayerSample(label if len(stages[label]) == 1 else f"stage{stage}.{label}", table))
    return found


def series_names(labels: Sequence[str]) -> dict[str, str]:
    """Returns label → "layer_03", by the number in the names where it is the only difference, else by order.

    >>> from regard.health.watching.sample import series_names
    >>> series_names(["layers.2.attn", "layers.10.attn"]), series_names(["encoder", "decoder"])
    ({'layers.2.attn': 'layer_02', 'layers.10.attn': 'layer_10'}, {'encoder': 'layer_00', 'decoder': 'layer_01'})
    """
    parts = [re.split(r"(\d+)", label) for label in labels]
    alike = len(parts) > 1 and len({len(part) for part in parts}) == 1
    differ = [at for at in range(len(parts[0])) if len({part[at] for part in parts}) > 1] if alike else []
    if len(differ) == 1 and parts[0][differ[0]].isdigit():
        return {label: f"layer_{int(part[differ[0]]):02}" for label, part in zip(labels, parts, strict=True)}
    return {label: f"layer_{at:02}" for at, label in enumerate(labels)}


def scalars_of(layers: Sequence[LayerSample], names: Mapping[str, str]) -> dict[str, float]:
    """Returns the numbers over the model and per layer by series name; NaN where a sample lacks one."""
    found = {f"attention/{name}": value for name, value in _summarize(layers).items()}
    fitting = max(1, (MOST_SERIES - MODEL_SERIES) // max(len(names), 1))
    for layer in layers:
        numbers = _summarize([layer])
        found |= {
            f"attention/{names[layer.label]}/{name}": numbers[name] for name in PER_LAYER[:fitting] if name in numbers
        }
    return found


def _summarize(layers: Sequence[LayerSample]) -> dict[str, float]:
    """Returns each metric over the heads of these layers that have rows."""
    table = np.concatenate([layer.table.numpy() for layer in layers]) if layers else np.empty((0, len(COLUMNS)))
    table = table[table[:, AT["rows"]] > 0]

    def heads(name: str, count: str = "rows") -> np.ndarray:
        values = table[table[:, AT[count]] > 0, AT[name]]
        return values[~np.isnan(values)]

    def mean(values: np.ndarray) -> float:
        return float(values.mean()) if len(values) else math.nan

    ratios, tops, largest = heads("entropy_ratio", "ratio_rows"), heads("max_logit"), heads("largest_activation")
    blocks = {"largest_activation": float(largest.max()), "median_activation": mean(heads("median_activation"))} if (
        len(largest) and largest.max() > -math.inf
    ) else {}  # fmt: skip
    return {
        "max_logit": float(tops.max()) if len(tops) else math.nan,
        "entropy_ratio_min": float(ratios.min()) if len(ratios) else math.nan,
        "entropy_ratio_mean": mean(ratios),
        "sink_rate": mean((heads("first_key_mass") > SINK).astype(float)),
        "gradient_gain": mean(heads("gradient_gain")),
        **{name: mean(heads(name, MEANS[name])) for name in NORMS},
        **({"gate": mean(heads("gate", "gate_rows"))} if bool((table[:, AT["gate_rows"]] > 0).any()) else {}),
        **blocks,
    }


def head_rows(layers: Iterable[LayerSample], names: Mapping[str, str], step: int) -> list[dict]:
    """Returns a dict per head that has rows: step, layer, series, head, and its numbers."""
    found = []
    for layer in layers:
        numbers = layer.table[:, [AT["rows"], AT["ratio_rows"], *(AT[name] for name in HEAD_VALUES)]].tolist()
        for head, (rows, ratio_rows, *values) in enumerate(numbers):
            if not rows:
                continue
            row = dict(zip(HEAD_VALUES, values, strict=True))
            if not ratio_rows:
                row["entropy_ratio"] = row["gain_ratio"] = math.nan
            found.append(dict(step=step, layer=layer.label, series=names[layer.label], head=head, **row))
    return found


def flags_of(layers: Iterable[LayerSample]) -> dict[str, dict[tuple[str, int], float]]:
    """Returns, per finding and for "not finite", (layer, head) → number."""
    found: dict[str, dict[tuple[str, int], float]] = {name: {} for name in (*FLAGS, "not finite")}
    first, last = AT[FLAGS[0]], AT["not_finite"]
    for layer in layers:
        columns = layer.table.numpy()[:, first : last + 1]  # the flags, then not_finite
        columns = np.where(columns[:, -1:] == 0, [*[0.0] * len(FLAGS), math.nan], 0.0) + columns  # 2: its input too
        for head, at in np.argwhere(~np.isnan(columns)).tolist():
            name = "not finite" if at == len(FLAGS) else FLAGS[at]
            found[name][layer.label, head] = float(columns[head, at])
    return found
