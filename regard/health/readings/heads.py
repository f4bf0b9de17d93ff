"""One head as a report tells it: `.layer`, `.index`, `.head`, `.statistics["entropy"].mean`, …"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from regard.health.measurement.recorder import Layer, Recorder
from regard.health.measurement.side_stream import behind
from regard.health.readings.histogram import ROW
from regard.health.readings.layer_reading import (
    LayerReading,
    fetched,
    likeness,
    predicted_variances,
    spreads_of,
    stacked,
)
from regard.health.readings.spread import Spreads

LEAST_ROWS = 16  # fewer rows, or fewer keys to choose from, and no shape of a distribution is held against a head
LEAST_KEYS = 4
SEES_NOTHING = "none of its queries sees a key"
TWINS = 0.005  # of the rows' own variation: see findings/duplicate_heads.py


@dataclass(frozen=True)
class HeadReading:
    """The readings of one head over everything that was examined."""

    layer: str
    index: int  # of the layer, in order of execution
    head: int
    statistics: Spreads
    reading: LayerReading = field(repr=False)  # of the whole layer
    predicted_variance: float = math.nan  # of the logits, from the norms of q and k
    dtype: str = ""
    head_dim: int = 0
    scale: float = math.nan  # of the scores, over 1/√d; NaN where it is learned
    can_be_judged: bool = True  # enough rows with enough keys that the shape of the distribution says something
    twins: tuple[int, ...] = ()  # heads of the same layer with the same distribution, row by row

    @property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """[(position, mean)] of a few statistics against the query's position."""
        return self.reading.curves(self.head)

    def to_json(self) -> dict:
        predicted = self.predicted_variance
        return dict(
            layer=self.layer,
            index=self.index,
            head=self.head,
            statistics={name: spread.to_json() for name, spread in self.statistics.items()},
            predicted_logit_variance=predicted if math.isfinite(predicted) else None,
        )


def heads_of(layers: Iterable[Layer]) -> list[HeadReading]:
    """Every head that was measured, layer by layer."""
    known = [(layer, layer.reading) for layer in layers if layer.reading is not None]
    early = {
        id(layer): layer.told[1] for layer, reading in known if layer.told is not None and layer.told[0] is reading
    }
    late = [(layer, reading) for layer, reading in known if id(layer) not in early]
    told = early | {id(layer): heads for (layer, _), heads in zip(late, _heads(late), strict=True)}
    return [head for layer, _ in known for head in told[id(layer)]]


def tell_early(recorder: Recorder) -> None:
    """The heads of the layers that a GPU is done with, all at once, while it is at work on the layers after."""
    waiting = recorder.under_way()
    while waiting:
        device = waiting[0][1].reading.flat.device
        ready = [pair for pair in waiting if pair[1].reading.flat.device == device and pair[1].done.query()]
        ready = ready or waiting[:1]
        pairs = [(layer, sight.reading) for layer, sight in ready]
        with behind(ready[-1][1].done, device):
            for (layer, reading), heads in zip(pairs, _heads(pairs), strict=True):
                layer.told = reading, heads
        done = {id(layer) for layer, _ in ready}
        waiting = [pair for pair in waiting if id(pair[0]) not in done]


def heads_if(layers: Iterable[Layer], name: str) -> list[HeadReading]:
    """The same heads under a what-if."""
    pairs = [(layer, layer.what_if[name]) for layer in layers if name in layer.what_if]
    return [head for heads in _heads(pairs) for head in heads]


def uncounted(layers: Iterable[Layer], heads: Iterable[HeadReading]) -> list[tuple[str, str]]:
    """(layer, reason) of those that were read faithfully, but have heads without a row that counts."""
    told = {(head.index, head.head) for head in heads}
    found = []
    for layer in layers:
        without = [head for head in range(layer.heads) if (layer.index, head) not in told]
        if layer.reading is None or not without:
            continue
        if len(without) == layer.heads:
            who = SEES_NOTHING if any(layer.blind) else "all of its rows are padding, or it has none"
            found.append((layer.name, who))
        else:
            found.append((layer.name, f"in its heads {', '.join(map(str, without))} no query sees a key"))
    return found


def _heads(pairs: Sequence[tuple[Layer, LayerReading]]) -> list[list[HeadReading]]:
    """Per layer, the heads of a reading of it."""
    readings = fetched([reading for _, reading in pairs])
    told: dict[int, list[HeadReading]] = {}
    for many in {reading.heads for reading in readings}:  # layers of as many heads at once: numpy is slow to start
        places = [at for at, reading in enumerate(readings) if reading.heads == many]
        alike = [readings[at] for at in places]
        twins, predicted, can_be = twins_of(alike), predicted_variances(alike), judged(alike)
        for row, (at, spreads) in enumerate(zip(places, spreads_of(alike), strict=True)):
            layer, reading = pairs[at][0], readings[at]
            dtype = str(layer.dtype).removeprefix("torch.")
            told[at] = [
                HeadReading(
                    layer.name, layer.index, head, spread, reading, predicted[row][head], dtype, layer.head_dim,
                    layer.scale, can_be[row][head], twins.get((row, head), ()),
                )
                for head, spread in enumerate(spreads)
                if spread.count("entropy")
            ]  # fmt: skip
    return [told[at] for at in range(len(pairs))]


def judged(readings: Sequence[LayerReading]) -> list[list[bool]]:
    """Per reading and head, has it enough rows with enough keys that its shape says something?"""
    rows, keys = (stacked(readings, name)[:, ROW["visible_keys"]] for name in ("count", "mean"))
    return ((rows >= LEAST_ROWS) & (keys >= LEAST_KEYS)).tolist()


def twins_of(readings: Sequence[LayerReading]) -> dict[tuple[int, int], tuple[int, ...]]:
    """(which reading, head) -> the other heads of that layer with the same distribution, row by row."""
    found: dict[tuple[int, int], list[int]] = {}
    for at, head, other in np.argwhere(likeness(readings) < TWINS).tolist():
        if head != other:
            found.setdefault((at, head), []).append(other)
    return {place: tuple(others) for place, others in found.items()}
