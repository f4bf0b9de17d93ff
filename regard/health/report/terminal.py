"""The report in a terminal: a row per layer, then the findings; coloured by rich, plain when piped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TextIO

from regard.health.readings.heads import HeadReading
from regard.health.report.report import Report
from regard.health.report.summary import ROOT, count_kinds, count_noun
from regard.table import Table, format_number

BLOCKS, DIGITS = " ▁▂▃▄▅▆▇█", " 0123456789"  # the first is for NaN; digits where the encoding has no blocks
COLUMNS = ("entropy_ratio", "max_weight", "first_key_mass", "gain_ratio")
LISTED, HEADS_LISTED, ABLATED = 24, 12, 4  # unmeasured layers, heads of a finding, heads that matter most
COLOURS = {"critical": "red", "warning": "yellow", "note": "cyan"}


def show(report: Report, file: TextIO | None = None) -> None:
    file = sys.stdout if file is None else file
    write = _line_writer(file)
    write(f"\n{printable(report.title)}", "bold")
    for line in report.summary():
        write(printable(line))
    if report.heads:
        signs = _signs_for(file)
        make_table(report, signs).show(file)
        sign = "block" if signs == BLOCKS else "digit"
        print(f"one {sign} per head, from 0 ({signs[1]}) to 1 ({signs[-1]}); max logit: the layer's largest", file=file)
    for finding in report.findings:
        listed = " ".join(f"{index}·{head}" for index, head in finding.places[:HEADS_LISTED])
        more = f" and {len(finding.heads) - HEADS_LISTED} more" if len(finding.heads) > HEADS_LISTED else ""
        heads = f"{count_noun(len(finding.heads), 'head')}: {listed}{more}"
        write(f"\n{finding.kind} ({finding.severity}), {heads}", COLOURS[finding.severity])
        for line in (finding.evidence, f"remedy: {finding.remedy}", f"threshold: {finding.threshold}"):
            print(f"  {printable(line)}", file=file)
    for name, reading in report.what_if.items():
        kinds = ", ".join(count_kinds((one.kind, len(one.heads)) for one in reading.findings)) or "no findings"
        write(f"\nwhat if {printable(name)}: {kinds}", "bold")
        before, after = average(report.heads, "entropy_ratio"), average(reading.heads, "entropy_ratio")
        print(f"  mean entropy ratio {before} → {after}", file=file)
        if reading.loss is not None:
            print(f"  {reading.loss}", file=file)
    checks = describe_checks(report)
    for line in ["", *checks] if checks else []:
        print(printable(line), file=file)
    for layer, reason in report.unmeasured[:LISTED]:
        write(f"not measured: {printable(layer or ROOT)}: {printable(reason)}", "yellow")
    if len(report.unmeasured) > LISTED:
        write(f"not measured: {len(report.unmeasured) - LISTED} more layers, listed in the report's files", "yellow")


def describe_checks(report: Report) -> list[str]:
    """The heads that matter most by ablation, and what was not checked."""
    if report.checks is None:
        return []
    lines, ablation = [], report.checks.ablation
    if ablation is not None and ablation.heads:
        most = sorted(ablation.heads.items(), key=lambda item: -item[1])[:ABLATED]
        unit = "the loss rises by" if ablation.unit == "loss" else "the output changes by, relatively,"
        listed = ", ".join(f"{change:.2g} ({index}·{head})" for (index, head), change in most)
        idle = sum(abs(change) <= ablation.small for change in ablation.heads.values())
        left = f"; {count_noun(ablation.missing, 'head')} left out, for time" if ablation.missing else ""
        lines.append(f"without a head {unit} up to {listed}; {idle} of {len(ablation.heads)} do not matter{left}")
    return lines + [f"not checked: {name}: {reason}" for name, reason in report.checks.skipped]


def printable(text: str) -> str:
    """`text` with control characters escaped, which a terminal would obey.

    >>> from regard.health.report.terminal import printable
    >>> printable("layer\\x1b[31m")
    'layer\\\\x1b[31m'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def make_table(report: Report, signs: str = BLOCKS) -> Table:
    """A row per layer, a sign per head."""
    layers: dict[int, list[HeadReading]] = {}
    for head in report.heads:
        layers.setdefault(head.index, []).append(head)
    rows = []
    for index, heads in sorted(layers.items()):
        cells = ["".join(_sign(head.statistics.mean(name), signs) for head in heads) for name in COLUMNS]
        logits = [logit for head in heads if (logit := head.statistics.max("max_logit")) == logit]
        largest = format_number(max(logits)) if logits else "–"
        rows.append([str(index), printable(heads[0].layer or ROOT), *cells, largest])
    names = [name.replace("_", " ") for name in COLUMNS]
    return Table(["", "layer", *names, "max logit"], rows, numbers=["", "max logit"])


def average(heads: Iterable[HeadReading], name: str) -> str:
    """The mean over heads of a statistic's mean, to three digits; a dash if no head has it."""
    values = [value for head in heads if (value := head.statistics.mean(name)) == value]
    return format_number(sum(values) / len(values)) if values else "–"


def _signs_for(file: TextIO) -> str:
    try:
        BLOCKS.encode(getattr(file, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return DIGITS
    return BLOCKS


def _sign(share: float, signs: str) -> str:
    """The last sign for 1, the first for NaN: no row of that head has the statistic."""
    many = len(signs) - 1
    return signs[1 + min(int(many * min(max(share, 0.0), 1.0)), many - 1)] if share == share else signs[0]


def _line_writer(file: TextIO) -> Callable[..., None]:
    """A function (text, style) that prints a line, coloured in a terminal."""
    if not file.isatty():
        return lambda text, style=None: print(text, file=file)
    from rich.console import Console
    from rich.text import Text

    console = Console(file=file, highlight=False)
    return lambda text, style=None: console.print(Text(text, style=style or ""))
