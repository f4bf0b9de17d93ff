"""`ModelComparison`: what `regard.compare` returns for two models."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

from regard.health.probe.task import LossReading
from regard.health.report.writer import Writer, fold_numbers, printable
from regard.table import Table, count_noun

PARTS = ("q", "k", "v", "scores", "output", "block")
LISTED = 12  # layers that a sentence names
ROWS = 6  # of the table on the screen
FIRST = "mend this in the model that is wrong, then compare again: what follows the first difference is not judged"
TRIED = "the cause was tried: with it A's own tensors become B's, within rounding"
SEEN = "both runs show it; it was not tried whether it alone turns A's own tensors into B's"
UNTRIED = "the place is sure; no cause was found. Tried: {}"
UNCHECKED = "other text; decoding with a cache and training mode, before one forward agrees"


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
        losses: of A and of B on the batches, where they differ and have one.
        is_seen: True if the cause is at least what both runs show, as a dependence on padding is.
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
    losses: tuple[LossReading, LossReading] | None = None
    is_seen: bool = False

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
            lines.append(f"First difference: {self.first}, in {self._list_parts()}.")
        return [*lines, *self.notes]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts; an infinite difference is null."""
        layers = [{key: _plain(value) for key, value in asdict(layer).items()} for layer in self.layers]
        return dict(
            same=self.same, first=None if self.first is None else self.first.index,
            layer=None if self.first is None else self.first.layer, where=self.where, cause=self.cause,
            named=self.named, parts=self.parts, output=_plain(self.output), rounding=_plain(self.rounding),
            tried=self.tried, notes=self.notes, layers=layers,
            losses=None if self.losses is None else [one.to_json() for one in self.losses],
        )  # fmt: skip

    def show(self, file: TextIO | None = None) -> None:
        """Print one screen: the verdict, why, what to do first and what it gains, a row per layer."""
        writer = Writer(file)
        writer.line(f"{'✓' if self.same else '✗'} {self.verdict}", "green" if self.same else "bold red")
        for name, text in self.fields():
            writer.field(name, text, 3)
        table = self.table()
        if table.rows:
            replace(table, rows=table.rows[:ROWS]).show(writer.file)
        if len(table.rows) > ROWS:
            writer.line(f"… and {count_noun(len(table.rows) - ROWS, 'more row')}")

    def save(self, path: str | os.PathLike) -> Path:
        """Write the comparison as one .html file."""
        from regard.health.report.page.comparison_page import save_page

        return save_page(self, path)

    @property
    def verdict(self) -> str:
        """Where B differs and why, if it does."""
        return self.cause if self.same else f"B differs from A{' at ' * bool(self.where)}{self.line}"

    def fields(self) -> list[tuple[str, str]]:
        """What the verdict does not say, each with a name: what to do first, what that gains, how sure it is."""
        amount = "an unknown part" if math.isnan(self.output) else _number(self.output)
        outputs = ("outputs", f"differ by {amount} of their size; rounding explains {_number(self.rounding)}")
        if self.same:
            return [outputs, ("notes", " ".join(self.notes))]
        layer = "" if self.first is None else f"{self.first}, in {self._list_parts()}"
        gain = "not known: the loss of both was not measured"
        if self.losses is not None:
            a, b = (one.describe() for one in self.losses)
            gain = f"loss {a} in A, {b} in B ({self.losses[0].kind})"
        sure = TRIED if self.named else SEEN if self.is_seen else UNTRIED.format(", ".join(self.tried) or "nothing")
        return [
            ("since", layer), outputs, ("do first", FIRST), ("gain", gain), ("sure", sure),
            ("unchecked", UNCHECKED), ("notes", " ".join(self.notes)),
        ]  # fmt: skip

    def _list_parts(self) -> str:
        return ", ".join(f"{part} ({_number(getattr(self.first, part))})" for part in self.parts)

    def table(self) -> Table:
        """The relative difference of each tensor of each layer."""
        title = f"relative differences, {self.given}; of several the largest"
        return Table(["layers", "name of the first", *PARTS], self._rows(), title, PARTS)

    def _rows(self) -> list[list[str]]:
        """A row per layer; of many layers one per run of layers in which the same tensors differ."""
        runs = [[one] for one in self.layers]
        if len(runs) > ROWS:
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
