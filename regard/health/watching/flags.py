"""Marks in a sample's tables which findings each head has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from regard.health.findings import collapsed, dead, diffuse, dying_gradient, exploding_logits, scale_off
from regard.health.findings._finding import HeadList, positional_heads
from regard.health.measurement.recorder import Layer
from regard.health.readings.heads import heads_of
from regard.health.watching.sample import AT

WATCHED = (exploding_logits, collapsed, dying_gradient, scale_off, dead, diffuse)


def mark_flags(layers: Sequence[Layer], tables: Mapping[int, Tensor]) -> None:
    """Writes the number of each finding (but no notes) into the tables, by the layers' index."""
    heads = HeadList(heads_of(layers))
    if not heads:
        return
    for module in WATCHED:
        find = getattr(module, "find_warnings", None) or getattr(module, "find", None)
        for finding in find(heads) if find is not None else module.find_in_layers(layers):
            if finding.severity != "note":
                for (index, head), number in zip(finding.places, finding.measured, strict=True):
                    tables[index][head, AT[module.KIND]] = number
    for head in positional_heads(heads)[1]:
        tables[head.index][head.head, AT["positional"]] = 1.0
