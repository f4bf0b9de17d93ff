"""The report on one screen: verdict, causes, what to do first, a map that folds equal layers, what was not checked.

llama  24 layers × 16 heads · 4,096 tokens · 8.2 s
✗ CRITICAL  2 causes, the gravest: exploding logits since layers.12.attn
loss 6.06 ± 0.04 (next token, 16 sequences); guessing by frequency: 5.73

1 exploding logits  layers 12–23, all heads                          RG302
    found     …
    do first  …
    gain now  qk_norm: loss 6.06 → 6.08, no difference (Δ +0.02 [−0.01, +0.05])
    sure      …
  layer  heads             entropy  largest logit
   0–11  ················     0.98            3.1
  12–23  1111111111111111     0.24             70   ← 1 starts here
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TextIO

from regard.health import checks
from regard.health.checks.finding import MODEL, Finding
from regard.health.contract.diagnosis import Cause
from regard.health.report.report import Report
from regard.health.report.summary import (
    ROOT,
    count_causes,
    count_made,
    describe_loss,
    describe_mixers,
    describe_no_findings,
    find_unusual,
    list_late,
    list_names,
    name_places,
    number_layers,
)
from regard.health.report.writer import Writer, fold_numbers
from regard.table import count_noun, format_number

HEIGHT = 23  # lines, so that the prompt fits below them into 24; taller terminals are filled up to TALL
TALL = 44
SHOWN = 3  # causes
NOTED = 2  # notes, where there is no cause
HEADS = 32  # columns of the map
NOTHING, SEVERAL = "·", "+"
COLOURS = {"critical": "bold red", "warning": "yellow", "note": "cyan", "sound": "green"}

UNSURE = "A fault that none of these checks knows passes them all; they saw one text, without training."

Line = tuple[str, str]  # text, style


class Detail(NamedTuple):
    """How much the screen tells: lines of a field, changes that were tried, rows of the map."""

    first: int  # lines of the first cause's evidence and fix
    found: int  # of the others' evidence
    do: int  # of the others' fix
    tried: int
    sure: int
    rows: int
    skipped: int
    blank: int = 1


DETAILS = (
    Detail(4, 4, 4, 3, 3, 12, 2), Detail(3, 2, 2, 2, 2, 12, 2), Detail(2, 2, 2, 2, 2, 12, 2),
    Detail(2, 2, 2, 2, 2, 8, 1), Detail(2, 1, 1, 2, 2, 8, 1, 0), Detail(2, 1, 1, 1, 1, 8, 1, 0),
    Detail(2, 0, 1, 1, 1, 8, 1, 0), Detail(2, 0, 1, 1, 1, 4, 1, 0), Detail(1, 0, 1, 1, 1, 4, 1, 0),
    Detail(1, 0, 1, 0, 0, 2, 1, 0),
)  # fmt: skip


def show_screen(report: Report, file: TextIO | None = None, page: str = "", below: Sequence[str] = ()) -> None:
    """Prints the report, and lines `below` it, in 23 lines of 80 columns, in more on a taller terminal.

    `page` names the files that have the rest.
    """
    writer = Writer(file)
    most = max(HEIGHT, min(writer.height - 1, TALL)) - len(below)
    for detail in DETAILS:
        lines = list(_compose(writer, report, page, detail))
        if len(lines) <= most:
            break
    for text, style in [*lines, *((line, "") for line in below)]:
        writer.line(text, style, most=1)


def _compose(writer: Writer, report: Report, page: str, detail: Detail) -> Iterator[Line]:
    """The lines of the screen in this much detail."""
    causes = report.diagnosis
    shown = [cause for cause in causes if cause.severity != "note"][:SHOWN]
    yield _title(report), "bold"
    text, style = _verdict(report)
    for line in writer.wrap(text, 2, 2):
        yield line, style
    for text in (describe_loss(report), *describe_mixers(report)):
        for line in writer.wrap(text, 2, 2):
            yield line, ""
    if detail.blank:
        yield "", ""
    for number, cause in enumerate(shown, 1):
        yield from _describe_cause(writer, report, number, cause, detail)
    if not shown and report.heads:
        for note in causes[:NOTED]:
            yield from writer.list_field("noted", f"{note.code} {note.kind}: {note.evidence}", 2, indent=0)
        for one in find_unusual(report.heads, 1):
            text = f"{one.head.layer or ROOT}, head {one.head.head}: {one}"
            yield from writer.list_field("unusual", text, 1, indent=0)
        yield from writer.list_field("sure", UNSURE, 2, indent=0)
    if report.heads:
        yield from _draw_map(report, shown, detail.rows)
    yield from _foot(writer, report, causes, shown or causes[:NOTED], page, detail)


def _title(report: Report) -> str:
    counts: dict[int, int] = {}
    for head in report.heads:
        counts[head.index] = counts.get(head.index, 0) + 1
    heads = "/".join(map(str, sorted(set(counts.values()))))
    parts = [f"{count_noun(len(counts), 'layer')} × {heads} head{'s' * (heads != '1')}"] if counts else []
    parts += [str(report.how["input"])] if report.how.get("input") else []
    parts.append(f"{report.how['seconds'] + (report.checks.seconds if report.checks else 0.0):.1f} s")
    return f"{report.title}  {' · '.join(parts)}"


def _verdict(report: Report) -> Line:
    if report.interrupted:
        return f"✗ NOT FINISHED: {report.interrupted}", COLOURS["critical"]
    if causes := count_causes(report):
        severity = report.diagnosis[0].severity
        return f"✗ {severity.upper()}  {causes}", COLOURS[severity]
    text = describe_no_findings(report)
    found = text.removeprefix("No problem found ")
    if found == text:  # nothing was judged
        return f"– {'' if report.heads else 'NOTHING MEASURED: '}{text}", COLOURS["warning"]
    mark, style = ("–", "warning") if list_late(report) else ("✓", "sound")
    return f"{mark} NO PROBLEM FOUND {found}", COLOURS[style]


def _describe_cause(writer: Writer, report: Report, number: int, cause: Cause, detail: Detail) -> Iterator[Line]:
    head = f"{number} {cause.kind}  {describe_place(report, cause.finding)}  {cause.code}"
    *lines, last = writer.wrap(head, 2)
    for line in lines:
        yield line, COLOURS[cause.severity]
    yield (
        f"{last.removesuffix(cause.code).rstrip():<{writer.width - len(cause.code)}}{cause.code}",
        COLOURS[cause.severity],
    )
    is_first = number == 1
    found, do = (detail.first, detail.first) if is_first else (detail.found, detail.do)
    yield from writer.list_field("found", cause.evidence, found)
    if is_first and cause.symptoms:
        yield from writer.list_field("so", ", ".join(dict.fromkeys(one.kind for one in cause.symptoms)), 1)
    alone = is_first or detail.tried > 1  # a gain has its own line
    effect = "" if alone else _describe_effect(report, cause)
    for line, _ in writer.list_field("do first" if is_first else "do", cause.fix.rstrip(".") + (effect or "."), do):
        yield line, "bold" if is_first else ""
    for at, gain in enumerate(describe_gain(report, cause)[: detail.tried if is_first else 1] if alone else ()):
        yield from writer.list_field("gain now" if at == 0 else "", gain, 1 + (detail.tried > 1))
    if is_first:
        yield from writer.list_field("sure", describe_proof(cause), detail.sure)


def describe_proof(cause: Cause) -> str:
    """What the finding of a cause proves, and what it does not, in its rule's words."""
    rule = checks.rules().get(cause.code)
    return "" if rule is None else rule.proves


def describe_place(report: Report, finding: Finding) -> str:
    """`layers.12–23.attn, all heads`, `h.5.attn, head 0`, `the whole model`."""
    if finding.scope == MODEL or not finding.places:
        return finding.layer or "the whole model"
    return name_places(finding.places, list_names(report), [(head.index, head.head) for head in report.heads])


def describe_tries(report: Report, names: Sequence[str]) -> list[str]:
    """`qk_norm: loss 6.06 → 6.08, Δ +0.02 [−0.01, 0.05] (no difference)` of each change that was tried."""
    tried = {} if report.checks is None else report.checks.what_if
    return [f"{name}: {tried[name]}" for name in names if name in tried]


def describe_gain(report: Report, cause: Cause) -> list[str]:
    """What the changes that may mend a cause did to the loss, or why that is not known."""
    names = cause.finding.what_if
    if names:
        return describe_tries(report, names) or [f"not tried; --what-if {names[0]} tells"]
    return ["not known: none of the what-ifs makes this repair"]


def _describe_effect(report: Report, cause: Cause) -> str:
    """` (scale=sqrt helps: loss −0.016)` of the first change that was tried, empty if none was."""
    tried = {} if report.checks is None else report.checks.what_if
    names = [name for name in cause.finding.what_if if name in tried]
    return f" ({names[0]}: {tried[names[0]].word}, Δ {tried[names[0]].change:+.2g})".replace("-", "−") if names else ""


@dataclass
class Row:
    """Layers in a row that look alike: their indices, a mark per head, entropy ratios, the largest logit."""

    indices: list[int]
    marks: str
    entropy: list[float]
    largest: float

    def merge(self, other: Row) -> Row:
        """Both rows, whose marks are the same, as one."""
        largest = max(self.largest, other.largest)
        return Row(self.indices + other.indices, self.marks, self.entropy + other.entropy, largest)

    def distance(self, other: Row) -> float:
        """How different the entropies of two rows are; infinite where their marks differ."""
        return math.inf if self.marks != other.marks else abs(_mean(self.entropy) - _mean(other.entropy))


def make_rows(report: Report, causes: Sequence[Cause], most: int) -> list[Row]:
    """At most `most` rows: a row per layer, neighbours of the same marks folded, the most alike first.

    Of more rows those are kept where a cause begins, then those with a mark.
    """
    marks: dict[tuple[int, int], str] = {}
    for number, cause in reversed(list(enumerate(causes, 1))):
        if cause.scope != MODEL:
            marks.update(dict.fromkeys(cause.finding.places, str(number)))
    layers: dict[int, list] = {}
    for head in report.heads:
        layers.setdefault(head.index, []).append(head)
    rows = []
    for index, heads in sorted(layers.items()):
        entropy = [x for head in heads if (x := head.statistics.mean("entropy_ratio")) == x]
        logits = [x for head in heads if (x := head.statistics.max("max_logit")) == x]
        text = "".join(marks.get((index, head.head), NOTHING) for head in heads)
        rows.append(Row([index], text, [_mean(entropy)], max(logits, default=math.nan)))
    while len(rows) > 1:
        at = min(range(len(rows) - 1), key=lambda i: rows[i].distance(rows[i + 1]))
        is_same = rows[at].distance(rows[at + 1]) < 0.02
        if not is_same and (len(rows) <= most or rows[at].distance(rows[at + 1]) == math.inf):
            break
        rows[at : at + 2] = [rows[at].merge(rows[at + 1])]
    seen, ranks = {NOTHING}, []
    for at, row in enumerate(rows):
        ranks.append((not set(row.marks) - seen, set(row.marks) == {NOTHING}, at))
        seen |= set(row.marks)
    return [rows[at] for at in sorted(at for *_, at in sorted(ranks)[:most])]


def _draw_map(report: Report, causes: Sequence[Cause], most: int) -> Iterator[Line]:
    rows = make_rows(report, causes, most)
    if sum(len(row.indices) for row in rows) < len({head.index for head in report.heads}):
        rows = make_rows(report, causes, max(most - 1, 1))  # the line that says so needs room
    width, own = max(5, *(len(_fold_marks(row.marks)) for row in rows)), number_layers(list_names(report))
    yield f"{'layer':>7}  {'heads':<{width}}  entropy  largest logit", "dim"
    starts = {
        min(index for index, _ in cause.finding.places): number
        for number, cause in reversed(list(enumerate(causes, 1)))
        if cause.scope != MODEL and cause.finding.places
    }
    for row in rows:
        entropy = _mean(row.entropy)
        numbers = f"{'–' if entropy != entropy else f'{entropy:.2f}':>7}  {_number(row.largest):>13}"
        first = [str(starts[index]) for index in row.indices if index in starts]
        note = f"   ← {', '.join(first)} starts here" if first else ""
        marks = set(row.marks) - {NOTHING}
        style = COLOURS[causes[int(min(marks)) - 1].severity] if marks else ""
        layers = fold_numbers([own[index] for index in row.indices])
        yield f"{layers:>7}  {_fold_marks(row.marks):<{width}}  {numbers}{note}", style
    if left := {head.index for head in report.heads} - {index for row in rows for index in row.indices}:
        yield f"{'…':>7}  layers {fold_numbers(sorted(own[index] for index in left))} have no room here", "dim"


def _fold_marks(marks: str) -> str:
    """At most `HEADS` columns; one of several heads has the mark of the first that is marked, + where causes differ."""
    size = math.ceil(len(marks) / HEADS)
    parts = [marks[i : i + size] for i in range(0, len(marks), size)]
    kinds = [set(part) - {NOTHING} for part in parts]
    return "".join(NOTHING if not one else one.pop() if len(one) == 1 else SEVERAL for one in kinds)


def _foot(
    writer: Writer, report: Report, causes: Sequence[Cause], shown: Sequence[Cause], page: str, detail: Detail
) -> Iterator[Line]:
    """What is left out here: more causes and notes, other changes, what was not checked, where the rest is."""
    more = len([cause for cause in causes if cause.severity != "note"]) - len(shown)
    notes = len([cause for cause in causes if cause.severity == "note" and cause not in shown])
    left = [count_noun(more, "more cause")] * (more > 0) + [count_noun(notes, "note")] * (notes > 0)
    known = {name for cause in shown for name in cause.finding.what_if}
    lines = [("also", f"{', '.join(left)}: -v lists them")] if left else []
    others = describe_tries(report, [name for name in report.what_if if name not in known])
    lines += [("what if", text) for text in others[: detail.tried]]
    for layer, reason in report.unmeasured[:1]:
        rest = f"; and {count_noun(len(report.unmeasured) - 1, 'more layer')}" if len(report.unmeasured) > 1 else ""
        lines.append(("unread", f"{layer or 'the model itself'}: {reason}{rest}"))
    for name, text in lines:
        yield from writer.list_field(name, text, detail.skipped if name == "unread" else 1, indent=0)
    yield from writer.list_field("skipped", describe_skipped(report, detail.skipped > 1), detail.skipped, indent=0)
    if page:
        yield f"{'page':<{writer.LABEL}}{page}", ""


def describe_skipped(report: Report, listed: bool) -> str:
    """How many checks were made, and which were not."""
    made, left = count_checks(report), list_unmade(report)
    if not left:
        return made
    return f"{made} (-v says why): {'; '.join(left)}" if listed else f"{made}; -v lists them, with the reasons"


def count_checks(report: Report) -> str:
    """`45 checks made, 3 not`."""
    made = f"{count_noun(count_made(report), 'check')} made"
    if report.checks is None:
        return f"{made}, of the heads' numbers alone: the model was not run again"
    late = len(list_late(report))
    return f"{made}, {len(list_unmade(report))} not" + f", {late} out of time: give more with --seconds" * bool(late)


def list_unmade(report: Report) -> list[str]:
    """The checks that were not made: those that ran out of time first, then the gravest."""
    late, skipped = list_late(report), [] if report.checks is None else report.checks.skipped
    return late + [name for name, _ in skipped if name not in late]


def _mean(values: Sequence[float]) -> float:
    kept = [x for x in values if x == x]
    return sum(kept) / len(kept) if kept else math.nan


def _number(x: float) -> str:
    return "–" if x != x else format_number(x)
