"""The report in a terminal: a row per layer, then the findings in words; coloured by rich, plain when piped."""

from __future__ import annotations

import sys
from collections.abc import Callable

from regard.health.report.page.data import ITSELF
from regard.health.report.report import by_kind, counted
from regard.table import Table

BLOCKS, DIGITS = " ▁▂▃▄▅▆▇█", " 0123456789"  # what a terminal has; the first is that of NaN
COLUMNS = ("entropy_ratio", "max_weight", "first_key_mass", "gain_ratio")
LISTED = 24  # layers that were not measured
TONES = {"critical": "red", "warning": "yellow", "note": "cyan"}


def show(report, file=None) -> None:
    file = sys.stdout if file is None else file
    say = _voice(file)
    say(f"\n{printable(report.title)}", "bold")
    for line in report.summary():
        say(printable(line))
    if report.heads:
        signs = signs_of(file)
        table(report, signs).show(file)
        one = "block" if signs == BLOCKS else "digit"
        print(
            f"one {one} per head, from 0 ({signs[1]}) to 1 ({signs[-1]}); logits: the largest of the layer", file=file
        )
    for finding in report.findings:
        say(
            f"\n{finding.kind} ({finding.severity}), {counted(len(finding.heads), 'head')}: {heads_told(finding)}",
            TONES[finding.severity],
        )
        for line in (finding.evidence, f"threshold: {finding.threshold}", f"remedy: {finding.remedy}"):
            print(f"  {printable(line)}", file=file)
    for name, reading in report.what_if.items():
        kinds = ", ".join(by_kind((one.kind, len(one.heads)) for one in reading.findings)) or "no findings"
        say(f"\nwhat if {printable(name)}: {kinds}", "bold")
        before, after = _average(report.heads, "entropy_ratio"), _average(reading.heads, "entropy_ratio")
        print(f"  mean entropy ratio {before} → {after}", file=file)
    for layer, reason in report.unmeasured[:LISTED]:
        say(f"not measured: {printable(layer or ITSELF)}: {printable(reason)}", "yellow")
    if len(report.unmeasured) > LISTED:
        say(f"not measured: {len(report.unmeasured) - LISTED} layers more, told in the report's files", "yellow")


def printable(text: str) -> str:
    """The same without control characters, which a terminal would obey.

    >>> from regard.health.report.terminal import printable
    >>> printable("layer\\x1b[31m")
    'layer\\\\x1b[31m'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def signs_of(file) -> str:
    """Blocks, or digits where the file's encoding has no blocks."""
    try:
        BLOCKS.encode(getattr(file, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return DIGITS
    return BLOCKS


def table(report, signs: str = BLOCKS) -> Table:
    """A row per layer, a sign per head."""
    layers: dict[int, list] = {}
    for head in report.heads:
        layers.setdefault(head.index, []).append(head)
    rows = []
    for index, heads in sorted(layers.items()):
        cells = ["".join(_sign(head.statistics.mean(name), signs) for head in heads) for name in COLUMNS]
        tops = [top for top in (head.statistics.max("max_logit") for head in heads) if top == top]
        top = f"{max(tops):.3g}" if tops else "–"
        rows.append([str(index), printable(heads[0].layer or ITSELF), *cells, top])
    return Table(
        ["", "layer", *(name.replace("_", " ") for name in COLUMNS), "max logit"], rows, numbers=["", "max logit"]
    )


def heads_told(finding) -> str:
    shown = [f"{index}·{head}" for index, head in finding.places[:12]]
    return " ".join(shown) + (f" and {len(finding.heads) - 12} more" if len(finding.heads) > 12 else "")


def _average(heads, name: str) -> str:
    values = [value for value in (head.statistics.mean(name) for head in heads) if value == value]
    return f"{sum(values) / len(values):.3f}" if values else "–"


def _sign(share: float, signs: str) -> str:
    """The last sign for a share of 1, the first for NaN: no row of that head has the statistic."""
    many = len(signs) - 1
    return signs[1 + min(int(many * min(max(share, 0.0), 1.0)), many - 1)] if share == share else signs[0]


def _voice(file) -> Callable:
    if not file.isatty():
        return lambda text, style=None: print(text, file=file)
    from rich.console import Console
    from rich.text import Text

    console = Console(file=file, highlight=False)
    return lambda text, style=None: console.print(Text(text, style=style or ""))
