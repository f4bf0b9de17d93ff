"""Dead: whatever the weights are, the model gets the same. About layers.

The output of a head is Σ p_j v_j. Where the values of a sequence are all alike (0, or the bias alone) it is that value,
and the weights decide nothing; where the columns of the output projection that read the head are 0, nothing of it goes
on. Weight decay brings both about in heads that get no gradient, and so do pruning by zeros, a wrong slice in a
conversion of weights and an initialisation that was left out. Neither shows in any statistic of the weights.

Values that are alike in every head of a layer, and not 0, may be the text's doing: one token over and over. And output
projections that are 0 as a whole are how some models begin, so that a block is the identity. Both are notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from regard.health.findings._finding import Finding, finding
from regard.health.measurement.norms import NOTHING
from regard.health.readings.heads import can_be_judged, fetch_readings

KIND = "dead"
SAME = 1e-6  # of a head's largest value, or of the median of those over the layer's heads
VALUES = (
    "The values of a sequence are all alike (they differ by {range}): whatever the weights are, that is the output.",
    f"values of a sequence apart by ≤ {SAME:g} of the largest, the head's own or the median over its layer",
)
COLUMNS = (
    "The columns of the output projection that read these heads are 0: nothing of them reaches the model.",
    f"every number in them ≤ {NOTHING:g} of the layer's largest",
)


class Place(NamedTuple):
    layer: str
    index: int
    head: int


def find_in_layers(layers: Sequence) -> list[Finding]:
    alike: list[tuple[Place, float]] = []
    text: list[tuple[Place, float]] = []
    unread: list[tuple[Place, float]] = []
    begins: list[tuple[Place, float]] = []
    measured = [layer for layer in layers if layer.reading is not None]
    suspected = [(layer, dead) for layer in measured if (dead := _alike(layer.values))]
    readings = fetch_readings([layer.reading for layer, _ in suspected])
    for (layer, dead), reading in zip(suspected, readings, strict=True):
        constant = len(dead) == layer.heads and all(size > 0.0 for _, size in layer.values)
        (judged,) = can_be_judged([reading])
        for head in dead:
            if judged[head]:
                (text if constant else alike).append((Place(layer.name, layer.index, head), layer.values[head][0]))
    for layer in measured:
        for head in layer.unread:
            whole = len(layer.unread) == layer.heads
            (begins if whole else unread).append((Place(layer.name, layer.index, head), 0.0))
    return [
        *finding(
            KIND,
            "warning",
            alike,
            *VALUES,
            "Look at the value projection of these heads: zeros of pruning, of a conversion or of weight decay? "
            "Initialise it anew, or remove the heads.",
        ),
        *finding(
            KIND,
            "warning",
            unread,
            *COLUMNS,
            "Look at the output projection: zeros of pruning, of a conversion or of weight decay? Initialise these "
            "columns anew, or remove the heads.",
        ),
        *finding(
            KIND,
            "note",
            text,
            *VALUES,
            "Is the text one token over and over? Then examine on other text. Else the weights of the value projection "
            "are 0, and its bias is all it gives.",
        ),
        *finding(
            KIND,
            "note",
            begins,
            *COLUMNS,
            "If the model is freshly initialised with output projections of 0, this is how it starts. Else the layer's "
            "attention is switched off.",
        ),
    ]


def _alike(values: Sequence[tuple[float, float]]) -> list[int]:
    """The heads whose values are."""
    usual = median(size for _, size in values) if values else 0.0
    return [head for head, (apart, size) in enumerate(values) if apart <= SAME * max(size, usual)]
