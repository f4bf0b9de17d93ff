"""The report in a terminal: a row per layer, then the findings in words; coloured by rich, plain when piped."""

from __future__ import annotations

import sys
from collections.abc import Callable

from regard.health.page.data import ITSELF
from regard.table import Table

BLOCKS = " ▁▂▃▄▅▆▇█"
COLUMNS = ("entropy_ratio", "max_weight", "first_key_mass", "gain_ratio")
TONES = {"critical": "red", "warning": "yellow", "note": "cyan"}


def show(report, file=None) -> None:
    file = sys.stdout if file is None else file
    say = _voice(file)
    say(f"\n{printable(report.title)}", "bold")
    for line in report.summary():
        say(line)
    if report.heads:
        table(report).show(file)
        print(
            f"one block per head, from 0 ({BLOCKS[1]}) to 1 ({BLOCKS[-1]}); logits: the largest of the layer", file=file
        )
    for finding in report.findings:
        say(
            f"\n{finding.kind} ({finding.severity}), {len(finding.heads)} heads: {heads_told(finding)}",
            TONES[finding.severity],
        )
        print(f"  {finding.evidence}\n  threshold: {finding.threshold}\n  remedy: {finding.remedy}", file=file)
    for name, reading in report.what_if.items():
        kinds = ", ".join(f"{one.kind} ({len(one.heads)})" for one in reading.findings) or "no findings"
        say(f"\nwhat if {name}: {kinds}", "bold")
        ratios = (
            [_mean(head, "entropy_ratio") for head in report.heads],
            [_mean(head, "entropy_ratio") for head in reading.heads],
        )
        before, after = (sum(values) / max(len(values), 1) for values in ratios)
        print(f"  mean entropy ratio {before:.3f} → {after:.3f}", file=file)
    for layer, reason in report.unmeasured:
        say(f"not measured: {printable(layer or ITSELF)}: {printable(reason)}", "yellow")


def printable(text: str) -> str:
    """The same without control characters, which a terminal would obey.

    >>> from regard.health.terminal import printable
    >>> printable("layer\\x1b[31m")
    'layer\\\\x1b[31m'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def table(report) -> Table:
    """A row per layer, a block per head."""
    layers: dict[int, list] = {}
    for head in report.heads:
        layers.setdefault(head.index, []).append(head)
    rows = []
    for index, heads in sorted(layers.items()):
        cells = ["".join(_block(_mean(head, name)) for head in heads) for name in COLUMNS]
        top = max(head.statistics["max_logit"].max for head in heads)
        rows.append([str(index), printable(heads[0].layer or ITSELF), *cells, f"{top:.3g}"])
    return Table(
        ["", "layer", *(name.replace("_", " ") for name in COLUMNS), "max logit"], rows, numbers=["", "max logit"]
    )


def heads_told(finding) -> str:
    shown = [f"{index}·{head}" for index, head in finding.places[:12]]
    return " ".join(shown) + (f" and {len(finding.heads) - 12} more" if len(finding.heads) > 12 else "")


def _mean(head, name: str) -> float:
    value = head.statistics[name].mean
    return value if value == value else 0.0


def _block(share: float) -> str:
    return BLOCKS[1 + min(int(max(share, 0.0) * 8), 7)]


def _voice(file) -> Callable:
    if not file.isatty():
        return lambda text, style=None: print(text, file=file)
    from rich.console import Console
    from rich.text import Text

    console = Console(file=file, highlight=False)
    return lambda text, style=None: console.print(Text(text, style=style or ""))
