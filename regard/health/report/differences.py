"""How two reports differ: kinds of findings, the first layer of each statistic, means per layer, heads, losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from regard.health.measure.heads import HeadReading
from regard.health.probe.task import LossReading
from regard.health.report.report import Report
from regard.health.report.summary import name_layers, name_places
from regard.health.report.terminal import average
from regard.health.report.writer import fold_numbers
from regard.table import Table, format_number

SHOWN = {"entropy ratio": "entropy_ratio", "max weight": "max_weight", "gain ratio": "gain_ratio"}
Place = tuple[int, int]  # layer index, head


class FindingChange(NamedTuple):
    """One kind of finding in both reports: its heads as (layer index, head), and each layer's name."""

    kind: str
    heads_a: frozenset[Place]
    heads_b: frozenset[Place]
    names: Mapping[int, str]

    def __str__(self) -> str:
        parts = [
            f"{name_places(heads, self.names)} {side} only"
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


def heads_by_kind(report: Report) -> dict[str, frozenset[Place]]:
    found: dict[str, frozenset[Place]] = {}
    for one in report.findings:
        found[one.kind] = found.get(one.kind, frozenset()) | set(one.places)
    return found


def _by_place(report: Report) -> dict[Place, HeadReading]:
    return {(head.index, head.head): head for head in report.heads}


def find_first_differences(a: Report, b: Report, tolerance: float) -> Iterator[Difference]:
    left, right = _by_place(a), _by_place(b)
    places = sorted(left.keys() | right.keys())
    names = list(dict.fromkeys(name for head in [*a.heads, *b.heads] for name in head.statistics))
    for name in names:
        found: Difference | None = None
        for place in places:
            if found is not None and place[0] != found.index:
                break
            one, other = left.get(place), right.get(place)
            amount = _relative_difference(one, other, name)
            if amount > max(tolerance, found.amount if found else 0.0):
                found = Difference(name, place[0], (one or other).layer, amount)  # type: ignore[union-attr]
        if found is not None:
            yield found


def _relative_difference(one: HeadReading | None, other: HeadReading | None, name: str) -> float:
    """|mean − mean| over the larger of the means' size and the spreads; inf if only one is there."""
    spreads = [head.statistics[name] for head in (one, other) if head is not None and name in head.statistics]
    known = [spread for spread in spreads if spread.mean == spread.mean]
    if len(known) < 2:
        return math.inf if known else 0.0
    means = [spread.mean for spread in known]
    size = max(map(abs, [*means, *(spread.std for spread in known if spread.std == spread.std)]))
    return abs(means[1] - means[0]) / size if size else 0.0


def compare_layers(a: Report, b: Report) -> Table:
    """A table of means over each layer's heads and of its largest logit, A → B; equal neighbours are one row."""
    indices = sorted({head.index for report in (a, b) for head in report.heads})
    rows: list[tuple[list[int], list[str]]] = []
    for index in indices:
        here = [[head for head in report.heads if head.index == index] for report in (a, b)]
        pairs = [(average(here[0], name), average(here[1], name)) for name in SHOWN.values()]
        pairs.append((_largest(here[0]), _largest(here[1])))
        cells = ["=" if one == other else f"{one} → {other}" for one, other in pairs]
        if rows and rows[-1][1] == cells and set(cells) == {"="}:
            rows[-1][0].append(index)
        else:
            rows.append(([index], cells))
    columns = ["layers", *SHOWN, "largest logit"]
    title = "means over heads, A → B; = where they agree"
    return Table(columns, [[fold_numbers(found), *cells] for found, cells in rows], title)


def _largest(heads: Sequence[HeadReading]) -> str:
    values = [x for head in heads if (x := head.statistics.max("max_logit")) == x]
    return format_number(max(values)) if values else "–"


def compare_losses(a: LossReading | None, b: LossReading | None, tolerance: float) -> str:
    """`worse` or `better` where the 95 % intervals are apart, `different` beyond the tolerance, or else empty."""
    if a is None or b is None:
        return ""
    if math.isfinite(a.mean) != math.isfinite(b.mean):
        return "worse" if math.isfinite(a.mean) else "better"
    if not abs(b.mean - a.mean) > tolerance * max(abs(a.mean), abs(b.mean)):
        return ""
    return "worse" if b.low > a.high else "better" if b.high < a.low else "different"


def list_most_changed(a: Report, b: Report, count: int) -> Table:
    """A table of the heads whose mean entropy ratio differs most; empty if the models' shapes differ."""
    left, right = _by_place(a), _by_place(b)
    rows = []
    for place in left if left.keys() == right.keys() else ():
        before, after = (heads[place].statistics.mean("entropy_ratio") for heads in (left, right))
        if not math.isnan(after - before):
            rows.append((-abs(after - before), place, before, after))
    cells = [
        [f"{place[0]}·{place[1]}", f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"]
        for _, place, before, after in sorted(rows)[:count]
    ]
    numbers = ["entropy ratio A", "B", "change"]
    return Table(["layer·head", *numbers], cells, "most changed heads", numbers)


def words_of(statistic: str) -> str:
    return statistic.replace("_", " ")


def describe_difference(one: Difference) -> str:
    return f"{words_of(one.statistic)} {'in one report only' if math.isinf(one.amount) else f'{one.amount:.0%}'}"


def describe_change(change: FindingChange) -> str:
    """`scale off since h.0.attn (h.0–3.attn, heads 0–1)`, `dead in h.5.attn, head 0`."""
    places = change.appeared or change.gone
    layers = {index for index, _ in places}
    if not places:
        return f"{change.kind}, the whole model"
    where, first = name_places(places, change.names), name_layers([min(layers)], change.names)
    return f"{change.kind} since {first} ({where})" if len(layers) > 1 else f"{change.kind} in {where}"
