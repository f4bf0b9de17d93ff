"""`regard.compare`: two reports side by side, and what differs between them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from regard.health.report import files
from regard.health.report.report import Report
from regard.health.report.saved import read_json
from regard.health.report.summary import ROOT, count_noun
from regard.health.report.writer import Writer, fold_numbers, printable
from regard.table import Table, format_number

SHOWN = {"entropy ratio": "entropy_ratio", "max weight": "max_weight", "gain ratio": "gain_ratio"}
LISTED, ROWS = 12, 6  # heads of a finding; rows of the table of layers on the screen

MARKS = {"same": "✓", "better": "✓", "worse": "✗", "different": "≠"}

UNSURE = "Statistics are compared, not outputs; regard compare MODEL MODEL compares those."

Place = tuple[int, int]  # layer index, head


class FindingChange(NamedTuple):
    """One kind of finding in both reports: its heads as (layer index, head)."""

    kind: str
    heads_a: frozenset[Place]
    heads_b: frozenset[Place]

    def __str__(self) -> str:
        parts = [
            f"{describe_places(heads)} {side} only"
            for side, heads in (("in A", self.gone), ("in B", self.appeared))
            if heads
        ]
        return f"{self.kind}, {'; '.join(parts)}"

    @property
    def appeared(self) -> list[Place]:
        """Heads that have it in B only."""
        return sorted(self.heads_b - self.heads_a)

    @property
    def gone(self) -> list[Place]:
        """Heads that have it in A only."""
        return sorted(self.heads_a - self.heads_b)


class Difference(NamedTuple):
    """The first layer in which a statistic's mean differs in some head, and by how much at most, relatively."""

    statistic: str
    index: int  # type: ignore[assignment]  # a tuple's method has this name
    layer: str
    amount: float  # inf where a head, or its number, is in one report only


class Comparison:
    """What differs between two reports, A and B.

    Attributes:
        new, resolved, changed: kinds of findings in B only, in A only, and in both but of other heads.
        first_differences: per statistic, the first layer that differs; a statistic that agrees everywhere is left out.
        names: what A and B are called: the file's name, or the report's title.
    """

    def __init__(
        self, a: dict[str, Any], b: dict[str, Any], tolerance: float, names: tuple[str, str] | None = None
    ) -> None:
        self.a, self.b, self.tolerance = a, b, tolerance
        self.names = names or (a["title"], b["title"])
        heads_a, heads_b = _heads_by_kind(a), _heads_by_kind(b)
        none: frozenset = frozenset()
        changes = [
            FindingChange(kind, heads_a.get(kind, none), heads_b.get(kind, none))
            for kind in sorted(heads_a.keys() | heads_b.keys())
        ]
        self.new = [change for change in changes if not change.heads_a]
        self.resolved = [change for change in changes if not change.heads_b]
        self.changed = [c for c in changes if c.heads_a and c.heads_b and c.heads_a != c.heads_b]
        self.first_differences = {one.statistic: one for one in _first_differences(a, b, tolerance)}

    @property
    def verdict(self) -> tuple[str, str]:
        """`better`, `worse`, `same` or `different`, and a sentence: which findings and which loss B has instead."""
        worse, better = ([describe_change(one) for one in self._causes(side)] for side in (self.new, self.resolved))
        parts = [f"{said}{', '.join(names)}" for said, names in (("", worse), ("no more ", better)) if names]
        losses = [describe_loss_of(report) for report in (self.a, self.b)]
        beside = f"loss {losses[0]} → {losses[1]}" if all(losses) else ""
        if gaps := [f"{letter} ({describe_gaps(one).strip(' ()')})" for letter, one in self._unfinished()]:
            return "different", f"No verdict: {' and '.join(gaps)}."
        if not parts and not self.first_differences and not self.changed:
            return "same", "B is the same as A."
        word = "different" if bool(worse) == bool(better) else "worse" if worse else "better"
        parts += [] if worse or better else [f"since layer {self.first_layer}, with the same causes"]
        verb = "differs from A" if word == "different" else f"is {word} than A"
        return word, f"B {verb}: {'; '.join([*parts, beside] if beside else parts)}."

    def _unfinished(self) -> list[tuple[str, dict[str, Any]]]:
        """The reports that were interrupted, or have no heads where the other has some."""
        both = (("A", self.a), ("B", self.b))
        some = bool(self.a["heads"] or self.b["heads"])
        return [(letter, one) for letter, one in both if one.get("interrupted") or (some and not one["heads"])]

    def _causes(self, changes: Sequence[FindingChange]) -> list[FindingChange]:
        """The changes that are causes and no notes."""
        if self._unfinished():
            return []  # what was not measured was not resolved
        told = {one["kind"] for report in (self.a, self.b) for one in report.get("diagnosis", report["findings"])}
        found = [one for report in (self.a, self.b) for one in report["findings"]]
        grave = {one["kind"] for one in found if one.get("severity") != "note"}
        return [change for change in changes if change.kind in told & grave]

    @property
    def first_step(self) -> str:
        """`Do first: multiply the scores by 1/√d exactly once (RG401).` for the gravest cause that is new in B."""
        kinds = [change.kind for change in self._causes(self.new)]
        fixes = [one for one in self.b.get("diagnosis", ()) if one["kind"] in kinds]
        return f"Do first: {fixes[0]['fix']} ({fixes[0]['code']})" if fixes else ""

    @property
    def first_layer(self) -> int:
        """The index of the first layer that differs, 0 if none does."""
        return min((one.index for one in self.first_differences.values()), default=0)

    def summary(self) -> list[str]:
        """The comparison in a few lines, the verdict first."""
        lines = [self.verdict[1]]
        lines += [
            f"{letter}: {describe_name(name, report)}{describe_gaps(report)}"
            for letter, name, report in zip("AB", self.names, (self.a, self.b), strict=True)
        ]
        ended = "Not found in B, which is not whole" if self._unfinished() else "Resolved in B"
        for title, changes in (("New in B", self.new), (ended, self.resolved)):
            told = self._causes(changes)  # by the verdict
            lines += [f"{title}: {describe_change(one)}" for one in changes if one not in told]
        lines += [f"Changed: {change}" for change in self.changed]
        if not (self.new or self.resolved or self.changed):
            lines.append("The findings are the same.")
        if not self.first_differences:
            return [*lines, f"No statistic differs by more than {self.tolerance:.2g} of its size."]
        first = min(self.first_differences.values(), key=lambda one: one.index)
        names = [one.statistic for one in self.first_differences.values() if one.index == first.index]
        listed = ", ".join(map(_words, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        lines.append(f"First difference: layer {first.index} ({first.layer or ROOT}), in {listed}.")
        return [*lines, self.first_step] if self.first_step else lines

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
                ", ".join(map(_describe_difference, found)),
            ]
            for (index, layer), found in layers.items()
        ]
        title = f"first layer that differs by more than {self.tolerance:.2g} of a statistic's size"
        return Table(["layer", "statistics that first differ here, and by how much"], rows, title)

    def show(self, file: TextIO | None = None, heads: int = 3) -> None:
        """Print the summary, the layers that differ, and the most changed heads."""
        writer = Writer(file)
        first, *rest = self.summary()
        writer.line(f"{MARKS[self.verdict[0]]} {first}", "bold")
        for line in rest:
            writer.line(line)
        layers, changed = compare_layers(self.a, self.b), list_most_changed(self.a, self.b, heads)
        writer.line(UNSURE, "dim")
        left = len(layers.rows) - ROWS
        more = [f"… and {count_noun(left, 'more layer')} that differ"] if left > 0 else []
        lines = replace(layers, rows=layers.rows[:ROWS]).plain().splitlines() if layers.rows else []
        lines += more + (["", *changed.plain().splitlines()] if changed.rows else [])
        for line in ["", *lines] if lines else []:
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
    from regard.health.comparing.sides import compare_sides, is_side

    if is_side(a) or is_side(b):
        return compare_sides(a, b, batches, tolerance)
    if batches is not None:
        raise TypeError("batches is for two models; two reports are compared without")
    tolerance = 0.01 if tolerance is None else tolerance
    return Comparison(_json_of("a", a), _json_of("b", b), tolerance, names_of(a, b))


def _json_of(name: str, report: Report | str | os.PathLike) -> dict[str, Any]:
    if isinstance(report, Report):
        return report.to_json()
    if isinstance(report, (str, os.PathLike)):
        return read_json(report)
    raise TypeError(f"{name} must be a Report or the path of its JSON file, got {type(report).__name__}")


def names_of(a: Report | str | os.PathLike, b: Report | str | os.PathLike) -> tuple[str, str]:
    """What two reports are called: files by their names, or by their paths if the names are the same."""
    first, second = (one.title if isinstance(one, Report) else Path(one).name for one in (a, b))
    are_files = not isinstance(a, Report) and not isinstance(b, Report)
    if first != second:
        return first, second
    return (str(a), str(b)) if are_files else (f"{first} (A)", f"{second} (B)")


def describe_name(name: str, report: dict[str, Any]) -> str:
    """`before.json (my-model)`; the title alone if the report was not a file."""
    return name if name == report["title"] else f"{name} ({report['title']})"


def describe_gaps(report: dict[str, Any]) -> str:
    """What was not measured, in brackets; empty if everything was."""
    gaps = [] if report["heads"] else ["nothing was measured"]
    if report["heads"] and report.get("unmeasured"):
        gaps.append(f"layers not measured: {len(report['unmeasured'])}")
    if report.get("interrupted"):
        gaps.append(f"not finished: {report['interrupted']}")
    return f" ({'; '.join(gaps)})" if gaps else ""


def _heads_by_kind(report: dict[str, Any]) -> dict[str, frozenset[Place]]:
    found: dict[str, set] = {}
    for one in report["findings"]:
        indices = one.get("indices") or [0] * len(one["heads"])
        found.setdefault(one["kind"], set()).update(
            (index, head[1]) for index, head in zip(indices, one["heads"], strict=False)
        )
    return {kind: frozenset(places) for kind, places in found.items()}


def _by_place(report: dict[str, Any]) -> dict[Place, dict[str, Any]]:
    return {(head["index"], head["head"]): head for head in report["heads"]}


def _first_differences(a: dict[str, Any], b: dict[str, Any], tolerance: float) -> Iterator[Difference]:
    left, right = _by_place(a), _by_place(b)
    places = sorted(left.keys() | right.keys())
    names = list(dict.fromkeys(name for head in [*left.values(), *right.values()] for name in head["statistics"]))
    for name in names:
        found: Difference | None = None
        for place in places:
            if found is not None and place[0] != found.index:
                break
            one, other = left.get(place), right.get(place)
            amount = _relative_difference(one, other, name)
            if amount > max(tolerance, found.amount if found else 0.0):
                found = Difference(name, place[0], (one or other)["layer"], amount)  # type: ignore[index]
        if found is not None:
            yield found


def _relative_difference(one: dict | None, other: dict | None, name: str) -> float:
    """|mean − mean| over the larger of the means' size and the spreads; inf if only one is there."""
    spreads = [(head or {}).get("statistics", {}).get(name, {}) for head in (one, other)]
    means = [spread.get("mean") for spread in spreads]
    if means[0] is None or means[1] is None:
        return 0.0 if means == [None, None] else float("inf")
    size = max(abs(means[0]), abs(means[1]), *(spread.get("std") or 0.0 for spread in spreads))
    return abs(means[1] - means[0]) / size if size else 0.0


def compare_layers(a: dict[str, Any], b: dict[str, Any]) -> Table:
    """A table of means over each layer's heads and of its largest logit, A → B; equal neighbours are one row."""
    indices = sorted({head["index"] for report in (a, b) for head in report["heads"]})
    rows: list[tuple[list[int], list[str]]] = []
    for index in indices:
        pairs = [(_mean(a, index, name), _mean(b, index, name)) for name in SHOWN.values()]
        pairs.append((_largest(a, index), _largest(b, index)))
        cells = ["=" if one == other else f"{one} → {other}" for one, other in pairs]
        if rows and rows[-1][1] == cells and set(cells) == {"="}:
            rows[-1][0].append(index)
        else:
            rows.append(([index], cells))
    columns = ["layers", *SHOWN, "largest logit"]
    title = "means over heads, A → B; = where they agree"
    return Table(columns, [[fold_numbers(found), *cells] for found, cells in rows], title)


def _mean(report: dict[str, Any], index: int, name: str) -> str:
    means = (head["statistics"][name]["mean"] for head in report["heads"] if head["index"] == index)
    values = [mean for mean in means if mean is not None]
    return format_number(sum(values) / len(values)) if values else "–"


def _largest(report: dict[str, Any], index: int) -> str:
    most = (head["statistics"]["max_logit"].get("max") for head in report["heads"] if head["index"] == index)
    values = [x for x in most if x is not None]
    return format_number(max(values)) if values else "–"


def describe_loss_of(report: dict[str, Any]) -> str:
    """`2.25 ± 0.07` of a report as JSON, empty if its loss is not known."""
    loss = (report.get("checks") or {}).get("loss") or {}
    if loss.get("mean") is None or loss.get("low") is None or loss.get("high") is None:
        return ""
    return f"{loss['mean']:.3g} ± {(loss['high'] - loss['low']) / 2:.1g}"


def list_most_changed(a: dict[str, Any], b: dict[str, Any], count: int) -> Table:
    """A table of the heads whose mean entropy ratio differs most; empty if the models' shapes differ."""
    left, right = _by_place(a), _by_place(b)
    rows = []
    for place in left if left.keys() == right.keys() else ():
        before, after = (heads[place]["statistics"]["entropy_ratio"]["mean"] for heads in (left, right))
        if before is not None and after is not None:
            rows.append((-abs(after - before), place, before, after))
    cells = [
        [f"{place[0]}·{place[1]}", f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"]
        for _, place, before, after in sorted(rows)[:count]
    ]
    numbers = ["entropy ratio A", "B", "change"]
    return Table(["layer·head", *numbers], cells, "most changed heads", numbers)


def _words(statistic: str) -> str:
    return statistic.replace("_", " ")


def _describe_difference(one: Difference) -> str:
    return f"{_words(one.statistic)} {'in one report only' if math.isinf(one.amount) else f'{one.amount:.0%}'}"


def describe_change(change: FindingChange) -> str:
    return f"{change.kind} {describe_places(change.appeared or change.gone)}"


def describe_places(places: Sequence[Place]) -> str:
    """`in 2 heads (0·1 3·2)`, or where there are many `since layer 12 (48 heads of layers 12–23)`."""
    heads = count_noun(len(places), "head")
    if not places:
        return "in the whole model"
    if len(places) <= LISTED:
        return f"in {heads} ({' '.join(f'{index}·{head}' for index, head in places)})"
    layers = sorted({index for index, _ in places})
    return f"since layer {layers[0]} ({heads} of layers {fold_numbers(layers)})"
