"""One head as a report tells it: `.layer`, `.index`, `.head`, `.statistics["entropy"].mean`, …"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from regard.health.bins import ROW
from regard.health.measure import Layer
from regard.health.readings import LayerReading, fetched
from regard.health.spreads import Spreads

LEAST_ROWS = 16  # fewer rows, or fewer keys to choose from, and no shape of a distribution is held against a head
LEAST_KEYS = 4
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
    return _heads([(layer, layer.reading) for layer in layers if layer.reading is not None])


def heads_if(layers: Iterable[Layer], name: str) -> list[HeadReading]:
    """The same heads under a what-if."""
    return _heads([(layer, layer.what_if[name]) for layer in layers if name in layer.what_if])


def _heads(pairs: Sequence[tuple[Layer, LayerReading]]) -> list[HeadReading]:
    found = []
    for (layer, _), reading in zip(pairs, fetched([reading for _, reading in pairs]), strict=True):
        alike = reading.likeness() < TWINS
        np.fill_diagonal(alike, False)
        twins = {head: tuple(np.flatnonzero(alike[head]).tolist()) for head in np.flatnonzero(alike.any(1)).tolist()}
        predicted, dtype = reading.predicted_variances(), str(layer.dtype).removeprefix("torch.")
        rows, keys = reading.numbers("count")[ROW["visible_keys"]], reading.numbers("mean")[ROW["visible_keys"]]
        judged = ((rows >= LEAST_ROWS) & (keys >= LEAST_KEYS)).tolist()
        for head, spreads in enumerate(reading.spreads()):
            if spreads.count("entropy"):
                told = predicted[head], dtype, judged[head], twins.get(head, ())
                found.append(HeadReading(layer.name, layer.index, head, spreads, reading, *told))
    return found
