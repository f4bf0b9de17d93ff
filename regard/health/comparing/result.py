"""`ModelComparison`: what `regard.compare` returns for two models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, TextIO

from regard.health.report.writer import Writer, fold_numbers, printable
from regard.table import Table

PARTS = ("q", "k", "v", "scores", "output", "block")
LISTED = 12  # layers that a sentence names


@dataclass(frozen=True)
class LayerDifference:
    """One layer of both models: the relative difference of each tensor, for the same input of the layer.

    Attributes:
        index: 0, 1, … in order of execution.
        layer: its name in A.
        reference: its name in B.
        q, k, v: of the vectors that attention was given; inf for other shapes, None where no call was read.
        scores: of the logits; inf where other keys are visible.
        output: of what attention gave, before its output projection.
        block: of what the whole layer gave.
        differs: the tensors that differ by more than rounding.
    """

    index: int
    layer: str
    reference: str
    q: float | None = None
    k: float | None = None
    v: float | None = None
    scores: float | None = None
    output: float | None = None
    block: float | None = None
    differs: tuple[str, ...] = ()

    @property
    def numbers(self) -> list[float | None]:
        """The differences in the order of `PARTS`."""
        return [getattr(self, part) for part in PARTS]

    def __str__(self) -> str:
        return self.layer or "the model itself"


@dataclass(frozen=True)
class ModelComparison:
    """What differs between A and B, two models, fingerprints or dumps that should compute the same.

    Attributes:
        same: True if nothing differs by more than rounding.
        first: the first layer that differs; None if none does, or if the difference is before or after all layers.
        cause: the cause in a sentence, tried on A's own tensors; what was tried, if nothing explains the difference.
        named: True if a cause was found that reproduces B within rounding.
        where: the first place that differs.
        layers: every layer, in order of execution.
        parts: what differs in the first one, of q, k, v, scores, output and block.
        tried: the explanations that were tried.
        output: the relative difference of the models' outputs.
        rounding: how far rounding alone may bring the outputs apart.
        notes: what else is to be known.
        given: what the layers of the table were given.
    """

    same: bool
    first: LayerDifference | None
    cause: str
    named: bool
    where: str
    layers: list[LayerDifference]
    output: float
    rounding: float
    parts: list[str] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    given: str = "each layer given the same input"

    @property
    def line(self) -> str:
        """One line that a person can act on."""
        if self.same:
            return self.cause
        return f"{self.where}: {self.cause}" if self.where else self.cause

    def summary(self) -> list[str]:
        """The comparison in a few lines."""
        shown = "no number can be given" if math.isnan(self.output) else f"by {_number(self.output)} of their size"
        lines = [self.line, f"The outputs differ {shown}; rounding explains {_number(self.rounding)}."]
        if self.first is not None and self.parts:
            listed = ", ".join(f"{part} ({_number(getattr(self.first, part))})" for part in self.parts)
            lines.append(f"First difference: {self.first}, in {listed}.")
        return [*lines, *self.notes]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts; an infinite difference is null."""
        layers = [{key: _plain(value) for key, value in asdict(layer).items()} for layer in self.layers]
        return dict(
            same=self.same, first=None if self.first is None else self.first.index,
            layer=None if self.first is None else self.first.layer, where=self.where, cause=self.cause,
            named=self.named, parts=self.parts, output=_plain(self.output), rounding=_plain(self.rounding),
            tried=self.tried, notes=self.notes, layers=layers,
        )  # fmt: skip

    def show(self, file: TextIO | None = None) -> None:
        """Print the summary and a row per layer."""
        writer = Writer(file)
        first, *rest = self.summary()
        writer.line(f"{'✓' if self.same else '✗'} {first}", "green" if self.same else "bold red")
        for line in rest:
            writer.line(line)
        if self.layers:
            writer.line()
            title = f"relative differences, {self.given}; of several layers the largest"
            Table(["layers", "name of the first", *PARTS], self._rows(), title).show(writer.file)

    def _rows(self) -> list[list[str]]:
        """A row per layer; from 13 layers on one per run of layers in which the same tensors differ."""
        runs = [[one] for one in self.layers]
        if len(runs) > LISTED:
            runs = [list(run) for _, run in groupby(self.layers, key=lambda one: one.differs)]
        rows = []
        for run in runs:
            known = [[x for x in column if x is not None] for column in zip(*(one.numbers for one in run), strict=True)]
            largest = [max(column, default=None) for column in known]
            indices = fold_numbers([one.index for one in run])
            rows.append([indices, printable(run[0].layer or "the model itself"), *map(_number, largest)])
        return rows

    def __str__(self) -> str:
        return "\n".join(self.summary())


def _number(x: float | None) -> str:
    return "–" if x is None else "another" if math.isinf(x) else f"{x:.2g}"


def _plain(x: Any) -> Any:
    if isinstance(x, tuple):
        return list(x)
    return None if isinstance(x, float) and not math.isfinite(x) else x


def list_layers(indices: Sequence[int]) -> str:
    """`layer 3`, `layers 0–11` or `layers 0, 2, 4`.

    >>> from regard.health.comparing.result import list_layers
    >>> list_layers([3]), list_layers([0, 1, 2]), list_layers([0, 2, 4])
    ('layer 3', 'layers 0–2', 'layers 0, 2, 4')
    """
    if len(indices) == 1:
        return f"layer {indices[0]}"
    if list(indices) == list(range(indices[0], indices[-1] + 1)):
        return f"layers {indices[0]}–{indices[-1]}"
    more = f", … ({len(indices)} in all)" if len(indices) > LISTED else ""
    return f"layers {', '.join(map(str, indices[:LISTED]))}{more}"
