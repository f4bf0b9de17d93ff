"""`regard.compare`: two reports side by side, and what differs between them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from regard.health.contract.diagnosis import Cause
from regard.health.report import files
from regard.health.report.differences import (
    Difference,
    FindingChange,
    compare_layers,
    compare_losses,
    describe_change,
    describe_difference,
    find_first_differences,
    heads_by_kind,
    list_most_changed,
    words_of,
)  # fmt: skip
from regard.health.report.report import Report
from regard.health.report.saved import load_report
from regard.health.report.screen import describe_gain, describe_skipped
from regard.health.report.summary import ROOT, list_names, name_layers, was_checked
from regard.health.report.writer import Writer, printable
from regard.table import Table, count_noun

ROWS = 6  # of the table of layers on the screen

MARKS = {"same": "✓", "better": "✓", "worse": "✗", "different": "≠", "unknown": "–"}

UNSURE = "Statistics are compared, not outputs; regard compare MODEL MODEL compares those."


class Comparison:
    """What differs between two reports, A and B.

    Attributes:
        new, resolved, changed: kinds of findings in B only, in A only, and in both but of other heads.
        unchecked: kinds of findings in one report only, and "A" or "B", where their check was not made.
        first_differences: per statistic, the first layer that differs; a statistic that agrees everywhere is left out.
        names: what A and B are called: the file's name, or the report's title.
    """

    def __init__(self, a: Report, b: Report, tolerance: float, names: tuple[str, str] | None = None) -> None:
        self.a, self.b, self.tolerance = a, b, tolerance
        self.names = names or (a.title, b.title)
        heads_a, heads_b = heads_by_kind(a), heads_by_kind(b)
        none: frozenset = frozenset()
        layers = list_names(a, b)
        changes = [
            FindingChange(kind, heads_a.get(kind, none), heads_b.get(kind, none), layers)
            for kind in sorted(heads_a.keys() | heads_b.keys())
        ]
        new, gone = ([one for one in changes if one.kind not in found] for found in (heads_a, heads_b))
        self.new = [one for one in new if was_checked(a, one.kind)]
        self.resolved = [one for one in gone if was_checked(b, one.kind)]
        self.unchecked = [(one, "A") for one in new if one not in self.new]
        self.unchecked += [(one, "B") for one in gone if one not in self.resolved]
        self.changed = [c for c in changes if c.heads_a and c.heads_b and c.heads_a != c.heads_b]
        self.first_differences = {one.statistic: one for one in find_first_differences(a, b, tolerance)}

    @property
    def verdict(self) -> tuple[str, str]:
        """`better`, `worse`, `same`, `different` or `unknown`, and a sentence: which findings and which loss B has."""
        causes = (self._keep_causes(side) for side in (self.new, self.resolved))
        worse, better = ([describe_change(one) for one in side] for side in causes)
        parts = [f"{said}{', '.join(names)}" for said, names in (("", worse), ("no more ", better)) if names]
        gaps = [f"{letter}{describe_gaps(one, checks=False)}" for letter, one in self._unfinished()]
        if gaps:
            return "unknown", f"No verdict: {' and '.join(gaps)}."
        agree = not (parts or self.first_differences or self.changed)
        if not parts and not agree:
            first = name_layers([self.first_layer], list_names(self.a, self.b))
            parts = [f"since {first}, with the same causes"]
        losses = [report.loss.describe() for report in (self.a, self.b) if report.loss is not None]
        beside = [f"loss {' → '.join(losses)}"] if len(losses) == 2 else []
        by_loss = compare_losses(self.a.loss, self.b.loss, self.tolerance)
        if agree and not by_loss:
            return "same", f"{'; '.join(['B is the same as A in attention statistics', *beside])}."
        sides = {word for word, told in (("worse", worse), ("better", better)) if told or by_loss == word}
        word = sides.pop() if len(sides) == 1 else "different"
        verb = "differs from A" if word == "different" else f"is {word} than A"
        return word, f"B {verb}: {'; '.join([*(parts or ['the same attention statistics']), *beside])}."

    def _unfinished(self) -> list[tuple[str, Report]]:
        """The reports that were interrupted, or have no heads where the other has some."""
        both = (("A", self.a), ("B", self.b))
        some = bool(self.a.heads or self.b.heads)
        return [(letter, one) for letter, one in both if one.interrupted or (some and not one.heads)]

    @property
    def gone(self) -> str:
        """How findings of A alone are called: a report that is not whole proves nothing gone."""
        return "unseen" if self._unfinished() else "gone in B"

    def _keep_causes(self, changes: Sequence[FindingChange]) -> list[FindingChange]:
        """The changes that are causes and no notes, the gravest first."""
        if self._unfinished():
            return []  # what was not measured was not resolved
        kinds = [one.kind for report in (self.a, self.b) for one in report.diagnosis if one.severity != "note"]
        return sorted((one for one in changes if one.kind in kinds), key=lambda one: kinds.index(one.kind))

    @property
    def new_causes(self) -> list[Cause]:
        """The causes that B has and A has not, the gravest first."""
        kinds = {change.kind for change in self._keep_causes(self.new)}
        return [cause for cause in self.b.diagnosis if cause.kind in kinds]

    def describe_first_step(self) -> list[tuple[str, str]]:
        """What was found, what to do first, and what that gains, of the gravest cause that is new in B."""
        for cause in self.new_causes[:1]:
            gain = "; ".join(describe_gain(self.b, cause))
            return [("found", cause.evidence), ("do first", f"{cause.fix} ({cause.code})"), ("gain now", gain)]
        return []

    @property
    def first_layer(self) -> int:
        """The index of the first layer that differs, 0 if none does."""
        return min((one.index for one in self.first_differences.values()), default=0)

    def summary(self) -> list[str]:
        """The comparison in a few lines, the verdict first."""
        return [self.verdict[1], *(f"{name}: {text}" for name, text in self._fields())]

    def _fields(self) -> list[tuple[str, str]]:
        """What the verdict does not say, each with a name: why, what to do, what else changed, where, in what."""
        fields = self.describe_first_step()
        for title, changes in (("new in B", self.new), (self.gone, self.resolved)):
            told = self._keep_causes(changes)  # by the verdict
            rest = [describe_change(one) for one in changes if one not in told]
            fields += [(title, "; ".join(rest))] if rest else []
        fields += [("changed", str(change)) for change in self.changed]
        fields += [("unchecked", f"in {side}: {describe_change(one)}") for one, side in self.unchecked]
        if not (self.new or self.resolved or self.changed or self.unchecked):
            fields.append(("findings", "the same in both"))
        fields.append(("first", self.describe_first_difference()))
        return fields + [
            (letter, f"{describe_name(name, report)}{describe_gaps(report)}")
            for letter, name, report in zip("AB", self.names, (self.a, self.b), strict=True)
        ]

    def describe_first_difference(self) -> str:
        """The first layer that differs, and in which statistics."""
        if not self.first_differences:
            return f"no statistic differs by more than {self.tolerance:.2g} of its size"
        first = min(self.first_differences.values(), key=lambda one: one.index)
        names = [one.statistic for one in self.first_differences.values() if one.index == first.index]
        listed = ", ".join(map(words_of, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return f"{first.layer or ROOT} differs, in {listed}"

    def tables(self, heads: int = 5) -> list[Table]:
        """Means per layer, the first differences, and the `heads` most changed heads."""
        tables = [
            compare_layers(self.a, self.b),
            self._table_of_differences(),
            list_most_changed(self.a, self.b, heads),
        ]
        return [table for table in tables if table.rows]

    def _table_of_differences(self) -> Table:
        layers: dict[tuple[int, str], list[Difference]] = {}
        for one in sorted(self.first_differences.values(), key=lambda one: (one.index, -one.amount)):
            layers.setdefault((one.index, one.layer), []).append(one)
        rows = [
            [
                f"{index} {printable(layer or ROOT)}",
                ", ".join(map(describe_difference, found)),
            ]
            for (index, layer), found in layers.items()
        ]
        title = f"first layer that differs by more than {self.tolerance:.2g} of a statistic's size"
        return Table(["layer", "statistics that first differ here, and by how much"], rows, title)

    def show(self, file: TextIO | None = None, heads: int = 3) -> None:
        """Print one screen: the verdict, why, what to do, the most changed heads, the layers that differ."""
        writer = Writer(file)
        writer.line(f"{MARKS[self.verdict[0]]} {self.verdict[1]}", "bold")
        changed = list_most_changed(self.a, self.b, heads).rows
        most = ", ".join(f"{where} {before} → {after}" for where, before, after, _ in changed)
        fields = [("heads", f"entropy ratio of {most}")] if most else []
        for name, text in [*self._fields(), *fields, ("sure", UNSURE)]:
            writer.field(name, text, 1 if name in ("A", "B", "heads") else 2)
        layers = compare_layers(self.a, self.b)
        left = len(layers.rows) - ROWS
        more = [f"… and {count_noun(left, 'more layer')} that differ"] if left > 0 else []
        lines = replace(layers, rows=layers.rows[:ROWS]).plain().splitlines() if layers.rows else []
        for line in [*lines, *more]:
            writer.line(line)

    def save(self, path: str | os.PathLike, heads: int = 5) -> Path:
        """Write both reports side by side as one .html file, with the `heads` most changed heads."""
        if Path(path).suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"path must end in .html, got {str(path)!r}")
        return files.write(path, self._page(heads))

    def _page(self, heads: int = 5) -> str:
        from regard.health.report.page.comparison_page import render

        return render(self, heads)

    def __str__(self) -> str:
        return "\n".join(map(printable, self.summary()))

    def __repr__(self) -> str:
        counts = f"{len(self.new)} new, {len(self.resolved)} resolved, {len(self.changed)} changed"
        return f"<Comparison of {self.names[0]} and {self.names[1]}: findings {counts}>"

    def _repr_html_(self) -> str:
        """The page in a sandboxed frame, as notebooks show it."""
        from regard.health.report.page.document import embed

        return embed(self._page())


def compare(a: Any, b: Any, batches: Any = None, *, tolerance: float | None = None) -> Any:
    """Compare two models on batches, a model or a fingerprint with a fingerprint, or two reports.

    >>> layer, x = torch.nn.TransformerEncoderLayer(32, nhead=4, batch_first=True), torch.randn(2, 10, 32)
    >>> before = regard.examine(layer, [x])
    >>> _ = layer.self_attn.in_proj_weight.data.mul_(3.0)
    >>> regard.compare(before, regard.examine(layer, [x])).first_differences["entropy"].layer
    'self_attn'

    Args:
        a, b: a model and the reference that it should equal, each an nn.Module, a `Fingerprint`, its file, or a folder
            of tensors that another program wrote; or two reports, each a `Report` or the path of its JSON file.
        batches: for two models, what both are run on, as in `examine`; a function is called with each model. A model
            and a fingerprint are compared on the fingerprint's tokens.
        tolerance: how much a head's mean may differ, relative to the larger of its size and its spread over rows
            (0.01); for two models, how much a tensor may differ relative to its size (None: as rounding may).

    Returns:
        A `Comparison`: `.new`, `.resolved`, `.changed`, `.first_differences`. For two models a `ModelComparison`:
        `.same`, `.first` (the first layer that differs), `.where`, `.cause`, `.tried`, `.layers`.

    Raises:
        TypeError: `a` or `b` is nothing that can be compared, or not of the other's kind.
        ValueError: A file is no report or fingerprint, they are of other tokens, or `tolerance` is negative.
    """
    if tolerance is not None and not 0.0 <= tolerance < float("inf"):
        raise ValueError(f"tolerance must be a number ≥ 0, got {tolerance!r}")
    from regard.health.comparing.models import compare_sides, is_side

    if is_side(a) or is_side(b):
        return compare_sides(a, b, batches, tolerance)
    if batches is not None:
        raise TypeError("batches is for two models; two reports are compared without")
    tolerance = 0.01 if tolerance is None else tolerance
    return Comparison(_load("a", a), _load("b", b), tolerance, names_of(a, b))


def _load(name: str, report: Report | str | os.PathLike) -> Report:
    if isinstance(report, Report):
        return report
    if isinstance(report, (str, os.PathLike)):
        return load_report(report)
    raise TypeError(f"{name} must be a Report or the path of its JSON file, got {type(report).__name__}")


def names_of(a: Report | str | os.PathLike, b: Report | str | os.PathLike) -> tuple[str, str]:
    """What two reports are called: files by their names, or by their paths if the names are the same."""
    first, second = (one.title if isinstance(one, Report) else Path(one).name for one in (a, b))
    are_files = not isinstance(a, Report) and not isinstance(b, Report)
    if first != second:
        return first, second
    return (str(a), str(b)) if are_files else (f"{first} (A)", f"{second} (B)")


def describe_name(name: str, report: Report) -> str:
    """`before.json (my-model)`; the title alone if the report was not a file."""
    return name if name == report.title else f"{name} ({report.title})"


def describe_gaps(report: Report, checks: bool = True) -> str:
    """`: layers not measured: 2; 20 checks made, 3 not: …`; empty if nothing is missing."""
    gaps = [] if report.heads else ["nothing was measured"]
    if report.heads and report.unmeasured:
        gaps.append(f"layers not measured: {len(report.unmeasured)}")
    if report.interrupted:
        gaps.append(f"not finished: {report.interrupted}")
    if checks and report.heads and (report.checks is None or report.checks.skipped):
        gaps.append(describe_skipped(report, True).replace(" (-v says why)", ""))
    return f": {'; '.join(gaps)}" if gaps else ""
