"""The report on one screen: verdict, causes, what to do first, a map that folds equal layers, what was not checked.

llama  24 layers × 16 heads · 4,096 tokens · 8.2 s
✗ CRITICAL   worse than word frequencies: loss 6.06 ± 0.04 against 5.73

1 exploding logits   layers 12–23, all heads                          RG302
    evidence …
    do …
  layer  heads            entropy  max logit
   0–11  ················    0.98       3.1
  12–23  1111111111111111    0.24        70   ← 1 starts here
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from regard.health.checks.finding import MODEL
from regard.health.contract.diagnosis import Cause
from regard.health.report.report import Report
from regard.health.report.summary import count_noun, describe_mixers, describe_no_findings
from regard.health.report.writer import Writer
from regard.table import format_number

HEIGHT, ROWS = 24, 12  # lines of the screen, and at most of the map
SHOWN = 3  # causes
HEADS = 32  # columns of the map
NOTHING, SEVERAL = "·", "+"
COLOURS = {"critical": "bold red", "warning": "yellow", "note": "cyan", "sound": "green"}


def show_screen(report: Report, file: TextIO | None = None, page: str = "") -> None:
    """Prints the report in at most 24 lines of 80 columns; `page` is the file that has the rest."""
    writer = Writer(file)
    causes = report.diagnosis
    shown = [cause for cause in causes if cause.severity != "note"][:SHOWN] or causes[:1]
    writer.line(_title(report), "bold")
    for text, style in _verdict(report, causes):
        writer.line(text, style, most=2)
    writer.line()
    for number, cause in enumerate(shown, 1):
        _show_cause(writer, report, number, cause, most=1 if len(shown) > 2 else 2)
    foot = _foot(report, causes, shown, page)
    space = HEIGHT - writer.lines - len(foot) - 3
    if report.heads and space > 1:
        _show_map(writer, report, shown, min(ROWS, space))
    for text in foot:
        writer.line(text, most=1)


def _title(report: Report) -> str:
    layers = len({head.index for head in report.heads})
    heads = {sum(head.index == index for head in report.heads) for index in {head.index for head in report.heads}}
    many = "/".join(map(str, sorted(heads)))
    parts = (
        [f"{count_noun(layers, 'layer')} × {count_noun(int(many), 'head') if many.isdigit() else f'{many} heads'}"]
        if report.heads
        else []
    )
    source = str(report.how.get("input", ""))
    parts += [source] if source else []
    parts.append(f"{report.how['seconds'] + (report.checks.seconds if report.checks else 0.0):.1f} s")
    return f"{report.title}  {' · '.join(parts)}"


def _verdict(report: Report, causes: Sequence[Cause]) -> list[tuple[str, str]]:
    """The verdict with the loss, and of a hybrid how much is attention."""
    grave = [cause for cause in causes if cause.severity != "note"]
    if report.interrupted:
        sign, word, style = "✗", "NOT FINISHED", COLOURS["critical"]
    elif grave:
        sign, word, style = "✗", grave[0].severity.upper(), COLOURS[grave[0].severity]
    elif not report.heads:
        sign, word, style = "–", "NOTHING MEASURED", COLOURS["warning"]
    else:
        sign, word, style = "✓", "NO PROBLEM FOUND", COLOURS["sound"]
    said = [report.interrupted] if report.interrupted else []
    said += [f"{len(grave)} {'cause' if len(grave) == 1 else 'causes'}"] if grave else []
    if not grave and not report.interrupted:
        said.append(describe_no_findings(report))
    lines = [(f"{sign} {word}  {'; '.join(said)}", style)]
    lines += [(text, "") for text in [describe_loss(report)] if text]
    return lines + [(text, "") for text in describe_mixers(report)]


def describe_loss(report: Report) -> str:
    """`loss 6.06 ± 0.04 (next token, 16 sequences); guessing by frequency 5.73`, empty if there is none."""
    loss = report.loss
    if loss is None:
        return ""
    half = (loss.high - loss.low) / 2
    spread = f" ± {half:.2g}" if math.isfinite(half) else ""
    text = f"loss {loss.mean:.3g}{spread} ({loss.kind}, {loss.sequences} sequence{'s' * (loss.sequences != 1)})"
    if loss.unigram is not None and loss.bigram is not None:
        text += f"; guessing by frequency {loss.unigram:.3g}, by the token before {loss.bigram:.3g}"
    return text


def _show_cause(writer: Writer, report: Report, number: int, cause: Cause, most: int) -> None:
    head = f"{number} {cause.kind}"
    place = describe_place(report, cause)
    gap = writer.width - len(head) - len(place) - len(cause.code) - 2
    writer.line(f"{head}  {place}{' ' * max(gap, 1)}{cause.code}", COLOURS[cause.severity], most=1)
    writer.field("found", cause.evidence, most)
    if cause.symptoms:
        writer.field("so", ", ".join(dict.fromkeys(one.kind for one in cause.symptoms)), most=1)
    writer.field("do", cause.fix, most)
    tried = describe_tries(report, cause.finding.what_if)
    if tried and most > 1:
        writer.field("tried", tried[0], most=1)


def describe_place(report: Report, cause: Cause) -> str:
    """`layers 12–23, all heads`, `layer 5, head 0`, `the whole model`."""
    if cause.scope == MODEL or not cause.finding.places:
        return cause.layer or "the whole model"
    layers = sorted({index for index, _ in cause.finding.places})
    where = f"layer{'s' * (len(layers) > 1)} {fold_numbers(layers)}"
    known = {(head.index, head.head) for head in report.heads if head.index in layers}
    heads = {head for _, head in cause.finding.places}
    if known <= set(cause.finding.places):
        return f"{where}, all heads"
    return f"{where}, {f'head {heads.pop()}' if len(heads) == 1 else f'{len(cause.finding.places)} heads'}"


def fold_numbers(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs folded.

    >>> from regard.health.report.screen import fold_numbers
    >>> fold_numbers([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7–8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def describe_tries(report: Report, names: Sequence[str]) -> list[str]:
    """`qk_norm: loss 6.06 → 6.08, Δ +0.02 [−0.01, 0.05] (no difference)` of each change that was tried."""
    tried = {} if report.checks is None else report.checks.what_if
    return [f"{name}: {tried[name]}" for name in names if name in tried]


@dataclass
class Row:
    """Layers in a row that look alike: their indices, a mark per head, entropy ratios, the largest logit."""

    indices: list[int]
    marks: str
    entropy: list[float]
    largest: float

    def merge(self, other: Row) -> Row:
        """Both rows as one; of two marks the cause with the smaller number."""
        marks = "".join(
            min(pair, key=lambda mark: (mark == NOTHING, mark)) for pair in zip(self.marks, other.marks, strict=True)
        )
        return Row(self.indices + other.indices, marks, self.entropy + other.entropy, max(self.largest, other.largest))

    def distance(self, other: Row) -> float:
        """How different two rows are: marks first, then entropy."""
        if len(self.marks) != len(other.marks):
            return math.inf
        differ = sum(a != b for a, b in zip(self.marks, other.marks, strict=True)) / len(self.marks)
        return 10.0 * differ + abs(_mean(self.entropy) - _mean(other.entropy))


def make_rows(report: Report, causes: Sequence[Cause], most: int) -> list[Row]:
    """A row per layer, neighbours folded until at most `most` are left: equal ones first, then the most alike."""
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
    return rows[:most]


def _show_map(writer: Writer, report: Report, causes: Sequence[Cause], most: int) -> None:
    rows = make_rows(report, causes, most)
    width = max(len(_fold_marks(row.marks)) for row in rows)
    writer.line(f"{'layer':>7}  {'heads':<{max(width, 5)}}  entropy  max logit", "dim")
    starts = {
        min(index for index, _ in cause.finding.places): number
        for number, cause in reversed(list(enumerate(causes, 1)))
        if cause.scope != MODEL and cause.finding.places
    }
    for row in rows:
        label = fold_numbers(row.indices)
        entropy = _mean(row.entropy)
        numbers = f"{'–' if entropy != entropy else f'{entropy:.2f}':>7}  {_number(row.largest):>9}"
        first = [str(starts[index]) for index in row.indices if index in starts]
        note = f"   ← {', '.join(first)} starts here" if first and row is not rows[0] else ""
        writer.line(f"{label:>7}  {_fold_marks(row.marks):<{max(width, 5)}}  {numbers}{note}", most=1)
    writer.line()


def _fold_marks(marks: str) -> str:
    """At most `HEADS` columns; one of several heads has the mark of the first that is marked, + where causes differ."""
    size = math.ceil(len(marks) / HEADS)
    parts = [marks[i : i + size] for i in range(0, len(marks), size)]
    kinds = [set(part) - {NOTHING} for part in parts]
    return "".join(NOTHING if not one else one.pop() if len(one) == 1 else SEVERAL for one in kinds)


def _foot(report: Report, causes: Sequence[Cause], shown: Sequence[Cause], page: str) -> list[str]:
    """What is left out here: more causes and notes, what was not checked, where the rest is."""
    lines = []
    more = len([cause for cause in causes if cause.severity != "note"]) - len(shown)
    notes = len([cause for cause in causes if cause.severity == "note" and cause not in shown])
    left = [f"{more} more cause{'s' * (more > 1)}"] * (more > 0) + [f"{notes} note{'s' * (notes != 1)}"] * (notes > 0)
    if left:
        lines.append(f"also      {', '.join(left)}: -v lists them")
    tries = [] if report.checks is None else describe_tries(report, list(report.what_if))
    lines += [f"what if   {text}" for text in tries[:2]]
    if report.unmeasured:
        first = report.unmeasured[0]
        rest = f", and {len(report.unmeasured) - 1} more" if len(report.unmeasured) > 1 else ""
        lines.append(f"unread    {first[0] or 'the model itself'}: {first[1]}{rest}")
    if report.checks is not None:
        lines.append(f"checks    {len(report.checks.done)} made, {len(report.checks.skipped)} skipped: -v says why")
    else:
        lines.append("checks    none: measured only")
    return [*lines, f"page      {page}"] if page else lines


def _mean(values: Sequence[float]) -> float:
    kept = [x for x in values if x == x]
    return sum(kept) / len(kept) if kept else math.nan


def _number(x: float) -> str:
    return "–" if x != x else format_number(x)
