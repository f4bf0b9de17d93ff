"""regard compare a.json b.json: two reports side by side, in a terminal and as one HTML file."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from regard.health import files
from regard.health.page.side_by_side import render
from regard.health.terminal import printable
from regard.table import Table

SHOWN = ("entropy_ratio", "max_weight", "first_key_mass", "gain_ratio", "max_logit")


def arguments(parser) -> None:
    parser.add_argument("a", type=Path, metavar="A.json")
    parser.add_argument("b", type=Path, metavar="B.json")
    parser.add_argument("--heads", type=int, default=5, help="how many of the most changed heads to list (5)")
    parser.add_argument("--out", type=Path, metavar="PATH", help="write them side by side: an .html file")


def main(options) -> int:
    out = options.out
    if out is not None and (out.suffix != ".html" or not out.parent.is_dir() or out.is_dir()):
        options.fail(f"--out must be a .html file in a folder that exists, got {str(out)!r}")
    try:
        a, b = read(options.a), read(options.b)
    except ValueError as error:
        print(f"regard compare: {error}", file=sys.stderr)
        return 1
    print(f"A: {printable(a['title'])}\nB: {printable(b['title'])}\n")
    tables = [by_layer(a, b), by_finding(a, b), most_changed(a, b, options.heads)]
    for table in tables:
        if table.rows:
            table.show()
            print()
    if out is not None:
        print(files.write(out, render(a, b, tables)))
    return 0


def read(path: Path) -> dict:
    """A report's JSON, checked to be one."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no file {str(path)!r}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{str(path)!r} is not JSON: {error}") from None
    if not _is_report(report):
        raise ValueError(f"{str(path)!r} is not a report of regard examine; make one with --json")
    return report


def _is_report(report) -> bool:
    """Does it hold what is read here? (The whole form is in health/schema.json.)"""
    if not isinstance(report, dict) or not isinstance(report.get("title"), str):
        return False
    heads, findings = report.get("heads"), report.get("findings")
    if not isinstance(heads, list) or not isinstance(findings, list):
        return False
    try:
        spreads = [head["statistics"][name] for head in heads for name in SHOWN if head["index"] >= 0 <= head["head"]]
        kinds = [one["kind"] for one in findings if isinstance(one["heads"], list)]
    except (KeyError, TypeError):
        return False
    return all("mean" in spread for spread in spreads) and all(isinstance(kind, str) for kind in kinds)


def by_layer(a: dict, b: dict) -> Table:
    """Means over each layer's heads, A → B."""
    left, right = _layers(a), _layers(b)
    rows = []
    for index in sorted(left.keys() | right.keys()):
        cells = []
        for name in SHOWN:
            cells.append(f"{_mean(left.get(index), name)} → {_mean(right.get(index), name)}")
        rows.append([str(index), *cells])
    return Table(["layer", *(name.replace("_", " ") for name in SHOWN)], rows, "means over heads, A → B", ["layer"])


def by_finding(a: dict, b: dict) -> Table:
    counts: tuple[Counter, Counter] = (Counter(), Counter())
    for count, report in zip(counts, (a, b), strict=True):
        for one in report["findings"]:
            count[one["kind"]] += len(one["heads"])  # a kind may be there twice: too large, too small
    kinds = sorted(counts[0].keys() | counts[1].keys())
    rows = [[kind, str(counts[0][kind]), str(counts[1][kind])] for kind in kinds] or [["none", "0", "0"]]
    return Table(["finding", "heads in A", "heads in B"], rows, numbers=["heads in A", "heads in B"])


def most_changed(a: dict, b: dict, count: int) -> Table:
    """The heads whose mean entropy ratio differs most; empty where the models' shapes differ."""
    left, right = ({(h["index"], h["head"]): h for h in report["heads"]} for report in (a, b))
    rows = []
    for key in left.keys() & right.keys() if left.keys() == right.keys() else ():
        before, after = (side[key]["statistics"]["entropy_ratio"]["mean"] for side in (left, right))
        if before is not None and after is not None:
            rows.append((abs(after - before), key, before, after))
    rows.sort(key=lambda row: (-row[0], row[1]))
    cells = [
        [f"{key[0]}·{key[1]}", f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"]
        for _, key, before, after in rows[:count]
    ]
    return Table(
        ["layer·head", "entropy ratio A", "B", "change"],
        cells,
        "most changed heads",
        ["entropy ratio A", "B", "change"],
    )


def _layers(report: dict) -> dict[int, list[dict]]:
    layers: dict[int, list[dict]] = {}
    for head in report["heads"]:
        layers.setdefault(head["index"], []).append(head)
    return layers


def _mean(heads: list[dict] | None, name: str) -> str:
    values = [head["statistics"][name]["mean"] for head in heads or ()]
    values = [value for value in values if value is not None]
    return f"{sum(values) / len(values):.3g}" if values else "–"
