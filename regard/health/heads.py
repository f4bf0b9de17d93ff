"""One head as a report tells it: `.layer`, `.index`, `.head`, `.statistics["entropy"].mean`, …"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from regard.health.measure import Layer
from regard.health.readings import LayerReading, Spreads

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
    return [head for layer in layers if layer.reading is not None for head in _heads(layer, layer.reading.cpu())]


def heads_if(layers: Iterable[Layer], name: str) -> list[HeadReading]:
    """The same heads under a what-if."""
    return [head for layer in layers if name in layer.what_if for head in _heads(layer, layer.what_if[name].cpu())]


def _heads(layer: Layer, reading: LayerReading) -> list[HeadReading]:
    alike = (reading.likeness() < TWINS).tolist()
    found = []
    for head, spreads in enumerate(reading.spreads()):
        found.append(
            HeadReading(
                layer=layer.name,
                index=layer.index,
                head=head,
                statistics=spreads,
                reading=reading,
                predicted_variance=reading.predicted_variance(head),
                dtype=str(layer.dtype).removeprefix("torch."),
                twins=tuple(other for other, same in enumerate(alike[head]) if same and other != head),
            )
        )
    return [head for head in found if head.statistics.count("entropy")]
