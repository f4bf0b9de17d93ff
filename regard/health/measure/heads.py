"""Head readings as a report holds them: `.layer`, `.index`, `.head`, `.statistics["entropy"].mean`, …"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from regard.health.measure.histogram import ROW, Spreads
from regard.health.measure.layer_reading import LayerReading, spreads_of, stack_parts
from regard.health.measure.recorder import Layer, Recorder
from regard.health.measure.side_stream import after_event, copy_to_host

LEAST_ROWS = 16  # with fewer rows, or fewer keys on average, the shape of a distribution is not judged
LEAST_KEYS = 4
SEES_NOTHING = "none of its queries sees a key"
CONSTANT = 1e-8  # variance of a feature below which it counts as constant
TWINS = 0.005  # of the rows' own variation: see findings/duplicate_heads.py


@dataclass(frozen=True)
class HeadReading:
    """The readings of one head over everything that was examined."""

    layer: str
    index: int  # of the layer, in order of execution
    head: int
    statistics: Spreads
    reading: LayerReading | None = field(repr=False)  # of the whole layer; None in a report read from a file
    predicted_variance: float = math.nan  # of the logits, from the norms of q and k
    dtype: str = ""
    head_dim: int = 0
    scale: float = math.nan  # of the scores, over 1/√d; NaN where it is learned
    can_be_judged: bool = True  # has it enough rows with enough keys?
    twins: tuple[int, ...] = ()  # heads of the same layer with the same distribution, row by row
    ablation: float = math.nan  # nats by which the loss rises without it, or relative change of the output
    gate: float = math.nan  # mean of its output gate σ(g); NaN without one
    gate_near_zero: float = math.nan  # share of the gate's numbers below 0.05
    saved_rows: int | None = None  # of a head that was read from a file

    @property
    def rows(self) -> int | None:
        """The number of rows that it was measured on; None if a file does not say."""
        return self.saved_rows if self.reading is None else self.statistics.count("entropy")

    @property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """[(position, mean)] of a few statistics over the query's position."""
        return {} if self.reading is None else self.reading.curves(self.head)

    def to_json(self) -> dict:
        predicted = self.predicted_variance
        return dict(
            layer=self.layer, index=self.index, head=self.head,
            statistics={name: spread.to_json() for name, spread in self.statistics.items()},
            predicted_logit_variance=predicted if math.isfinite(predicted) else None, rows=self.rows,
            judged=self.can_be_judged, **({"ablation": self.ablation} if math.isfinite(self.ablation) else {}),
            **(dict(gate=self.gate, gate_near_zero=self.gate_near_zero) if math.isfinite(self.gate) else {}),
        )  # fmt: skip


def heads_of(layers: Iterable[Layer]) -> list[HeadReading]:
    """Returns every head that was measured, layer by layer."""
    known = [(layer, layer.reading) for layer in layers if layer.reading is not None]
    early = {
        id(layer): layer.early_heads[1]
        for layer, reading in known
        if layer.early_heads is not None and layer.early_heads[0] is reading
    }
    late = [(layer, reading) for layer, reading in known if id(layer) not in early]
    known_heads = early | {id(layer): heads for (layer, _), heads in zip(late, _head_readings(late), strict=True)}
    return [head for layer, _ in known for head in _with_gates(layer, known_heads[id(layer)])]


def keep_on_host(layers: Iterable[Layer], heads: Iterable[HeadReading]) -> None:
    """Gives each layer the reading that its heads were made of, which is on the host."""
    readings = {head.index: head.reading for head in heads}
    for layer in layers:
        layer.reading = readings.get(layer.index, layer.reading)


def _with_gates(layer: Layer, heads: list[HeadReading]) -> list[HeadReading]:
    """Returns the heads with the readings of the layer's output gates, if it has any."""
    if layer.gates is None:
        return heads
    count, total, near = layer.gates.cpu()
    mean, share = (total / count).tolist(), (near / count).tolist()  # NaN for a head without rows
    return [replace(one, gate=mean[one.head], gate_near_zero=share[one.head]) for one in heads]


def read_early(recorder: Recorder) -> None:
    """Makes the head readings of layers that a GPU is done with, while it runs the layers after them."""
    waiting = recorder.pending_layers()
    while waiting:
        device = waiting[0][1].reading.flat.device
        ready = [one for one in waiting if one[1].reading.flat.device == device and one[2].query()] or waiting[:1]
        pairs = [(layer, batch.reading) for layer, batch, _ in ready]
        with after_event(ready[-1][2], device):
            for (layer, reading), heads in zip(pairs, _head_readings(pairs), strict=True):
                layer.early_heads = reading, heads
        done = {id(layer) for layer, *_ in ready}
        waiting = [one for one in waiting if id(one[0]) not in done]


def heads_if(layers: Iterable[Layer], name: str) -> list[HeadReading]:
    """Returns the heads under a what-if."""
    pairs = [(layer, layer.what_if[name]) for layer in layers if name in layer.what_if]
    return [head for heads in _head_readings(pairs) for head in heads]


def layers_without_rows(layers: Iterable[Layer], heads: Iterable[HeadReading]) -> list[tuple[str, str]]:
    """Returns (layer, reason) for measured layers with heads that have no row that counts."""
    counted = {(head.index, head.head) for head in heads}
    found = []
    for layer in layers:
        without = [head for head in range(layer.heads) if (layer.index, head) not in counted]
        if layer.reading is None or not without:
            continue
        if len(without) == layer.heads:
            reason = SEES_NOTHING if any(layer.empty_rows) else "all of its rows are padding, or it has none"
            found.append((layer.name, reason))
        else:
            found.append((layer.name, f"in its heads {', '.join(map(str, without))} no query sees a key"))
    return found


def _head_readings(pairs: Sequence[tuple[Layer, LayerReading]]) -> list[list[HeadReading]]:
    """Returns the heads of each reading."""
    readings = fetch_readings([reading for _, reading in pairs])
    found: dict[int, list[HeadReading]] = {}
    for many in {reading.heads for reading in readings}:  # layers of as many heads together, which saves numpy calls
        places = [at for at, reading in enumerate(readings) if reading.heads == many]
        alike = [readings[at] for at in places]
        twins, predicted, can_be = twins_of(alike), predicted_variances(alike), can_be_judged(alike)
        for row, (at, spreads) in enumerate(zip(places, spreads_of(alike), strict=True)):
            layer, reading = pairs[at][0], readings[at]
            dtype = str(layer.dtype).removeprefix("torch.")
            found[at] = [
                HeadReading(
                    layer.name, layer.index, head, spread, reading, predicted[row][head], dtype, layer.head_dim,
                    layer.scale, can_be[row][head], twins.get((row, head), ()),
                )
                for head, spread in enumerate(spreads)
                if spread.count("entropy")
            ]  # fmt: skip
    return [found[at] for at in range(len(pairs))]


def can_be_judged(readings: Sequence[LayerReading]) -> list[list[bool]]:
    """Returns, per reading and head, whether it has enough rows with enough keys to judge its shape."""
    rows, keys = (stack_parts(readings, name)[:, ROW["visible_keys"]] for name in ("count", "mean"))
    return ((rows >= LEAST_ROWS) & (keys >= LEAST_KEYS)).tolist()


def twins_of(readings: Sequence[LayerReading]) -> dict[tuple[int, int], tuple[int, ...]]:
    """Returns (reading, head) → the other heads of that layer with the same distribution, row by row."""
    found: dict[tuple[int, int], list[int]] = {}
    for at, head, other in np.argwhere(dissimilarity(readings) < TWINS).tolist():
        if head != other:
            found.setdefault((at, head), []).append(other)
    return {place: tuple(others) for place, others in found.items()}


def predicted_variances(readings: Sequence[LayerReading]) -> list[list[float]]:
    """Returns the logit variance that norms predict, per reading and head."""
    calls = stack_parts(readings, "calls")[:, None]
    return np.where(calls > 0, stack_parts(readings, "predicted") / np.maximum(calls, 1.0), math.nan).tolist()


def dissimilarity(readings: Sequence[LayerReading]) -> np.ndarray:
    """Returns Σ (f_g − f_h)² over rows relative to the variation of f: [L, H, H], 0 for equal heads, 2 for others."""
    products, totals, compared = (stack_parts(readings, name) for name in ("products", "totals", "compared"))
    compared = np.maximum(compared, 1.0)[:, None]  # [L, 1, H]
    own = products.diagonal(axis1=-2, axis2=-1)  # [L, F, H]
    with np.errstate(invalid="ignore"):  # NaN where a variance overflowed
        difference = own[..., :, None] + own[..., None, :] - 2.0 * products
        varies = own - np.square(totals) / compared
        mean = (varies[..., :, None] + varies[..., None, :]) / 2.0
        floor = CONSTANT * compared[..., None, :]
        return (np.maximum(difference, 0.0) / np.maximum(mean, floor)).max(1)  # every feature must agree


def fetch_readings(readings: Sequence[LayerReading]) -> list[LayerReading]:
    """Returns the readings on the CPU, with one wait for each device they are on."""
    if not any(one.flat.is_cuda for one in readings):
        return list(readings)
    host = copy_to_host([x for one in readings for x in (one.flat, one.histogram)])
    sums = zip(readings, host[::2], host[1::2], strict=True)
    return [LayerReading.from_sums(one.heads, flat, histogram) for one, flat, histogram in sums]
