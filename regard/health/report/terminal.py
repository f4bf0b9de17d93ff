"""All of a report as text: a row per layer, then every finding. `screen.py` has what is printed first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from regard.health.measure.heads import HeadReading
from regard.health.report.report import Report
from regard.health.report.summary import ROOT, count_kinds
from regard.health.report.writer import Writer, printable
from regard.table import Table, count_noun, format_number

BLOCKS, DIGITS = " ▁▂▃▄▅▆▇█", " 0123456789"  # the first is for NaN; digits where the encoding has no blocks
COLUMNS = ("entropy_ratio", "max_weight", "first_key_mass", "gain_ratio")
LISTED, HEADS_LISTED, ABLATED = 24, 12, 4  # unmeasured layers, heads of a finding, heads that matter most
COLOURS = {"critical": "red", "warning": "yellow", "note": "cyan"}


def show(report: Report, file: TextIO | None = None) -> None:
    """Prints all of a report: sentences, a row per layer, every finding, what-ifs, checks."""
    writer = Writer(file)
    writer.line()
    writer.line(report.title, "bold")
    for line in report.summary():
        writer.line(line)
    if report.heads:
        signs = _signs_for(writer.file)
        make_table(report, signs).show(writer.file)
        sign = "block" if signs == BLOCKS else "digit"
        writer.line(f"one {sign} per head, from 0 ({signs[1]}) to 1 ({signs[-1]}); largest logit: of the layer")
    for finding in report.findings:
        listed = " ".join(f"{index}·{head}" for index, head in finding.places[:HEADS_LISTED])
        more = f" and {len(finding.heads) - HEADS_LISTED} more" if len(finding.heads) > HEADS_LISTED else ""
        where = f"{count_noun(len(finding.heads), 'head')}: {listed}{more}" if finding.heads else finding.layer or ROOT
        writer.line()
        writer.line(f"{finding.code} {finding.kind} ({finding.severity}), {where}", COLOURS[finding.severity])
        for line in (finding.evidence, f"remedy: {finding.remedy}", f"threshold: {finding.threshold}"):
            writer.line(f"  {line}", hanging=4)
    for name, reading in report.what_if.items():
        kinds = ", ".join(count_kinds((one.kind, len(one.heads)) for one in reading.findings)) or "no findings"
        writer.line()
        writer.line(f"what if {name}: {kinds}", "bold")
        before, after = average(report.heads, "entropy_ratio"), average(reading.heads, "entropy_ratio")
        writer.line(f"  mean entropy ratio {before} → {after}")
        if reading.loss is not None:
            writer.line(f"  {reading.loss}")
        if report.checks is not None and name in report.checks.rounding:
            writer.line(f"  {report.checks.rounding[name]}", hanging=4)
    checks = describe_checks(report)
    for line in ["", *checks] if checks else []:
        writer.line(line)
    for layer, reason in report.unmeasured[:LISTED]:
        writer.line(f"not measured: {layer or ROOT}: {reason}", "yellow")
    if len(report.unmeasured) > LISTED:
        writer.line(f"not measured: {len(report.unmeasured) - LISTED} more layers, in the report's files", "yellow")


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
    return Table(["", "layer", *names, "largest logit"], rows, numbers=["", "largest logit"])


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
