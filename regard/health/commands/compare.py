"""regard compare a.json b.json: two reports side by side, in a terminal and as one HTML file."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from regard.health.commands.outputs import check, complain
from regard.health.report import files
from regard.health.report.page.side_by_side import render, unknown
from regard.health.report.terminal import printable
from regard.table import Table

SHOWN = ("entropy_ratio", "max_weight", "first_key_mass", "gain_ratio", "max_logit")
MOST = 1_000_000  # layers, or heads of one: a larger number is not read as one
LARGEST = sys.float_info.max  # of a statistic


def arguments(parser) -> None:
    parser.add_argument("a", type=Path, metavar="A.json")
    parser.add_argument("b", type=Path, metavar="B.json")
    parser.add_argument("--heads", type=int, default=5, help="how many of the most changed heads to list (5)")
    parser.add_argument("--out", type=Path, metavar="PATH", help="write them side by side: an .html file")


def main(options) -> int:
    if options.out is not None:
        check(options, options.out, ".html")
    if options.heads < 0:
        options.fail(f"--heads must be at least 0, got {options.heads}")
    try:
        a, b = read(options.a), read(options.b)
    except ValueError as error:
        complain("compare", str(error))
        return 1
    tables = [by_layer(a, b), by_finding(a, b), most_changed(a, b, options.heads)]
    if options.out is not None:
        try:
            files.write(options.out, render(a, b, tables))
        except OSError as error:
            complain("compare", f"{str(options.out)!r} could not be written: {error.strerror or error}")
            return 1
    for letter, report in (("A", a), ("B", b)):
        print(f"{letter}: {printable(report['title'] + unknown(report))}")
    for table in tables:
        if table.rows:
            print()
            table.show()
    if options.out is not None:
        print(f"\n{options.out}")
    return 0


def read(path: Path) -> dict:
    """A report's JSON, checked to be one."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no file {str(path)!r}") from None
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not JSON: {error}") from None
    wrong = _wrong(report)
    if wrong:
        raise ValueError(f"{str(path)!r} is not a report of regard examine: {wrong}; make one with --json")
    return report


def _wrong(report) -> str | None:
    """What of all that is read here is not as it should be; the whole form is in health/schema.json."""
    if not isinstance(report, dict):
        return f"it holds a {type(report).__name__}"
    if not isinstance(report.get("title"), str):
        return "it has no title"
    for name, is_one in (("heads", _is_head), ("findings", _is_finding)):
        if not isinstance(report.get(name), list):
            return f"it has no list of {name}"
        at = next((at for at, one in enumerate(report[name]) if not is_one(one)), None)
        if at is not None:
            return f"{name}[{at}] is not one"
    if not isinstance(report.get("unmeasured", []), list):
        return "unmeasured is no list"
    return None


def _is_head(head) -> bool:
    try:
        places = (head["index"], head["head"])
        spreads = [head["statistics"][name] for name in SHOWN] + list(head["statistics"].values())
        numbers = [value for spread in spreads for value in (spread["mean"], *spread.values())]
    except (KeyError, TypeError, AttributeError):
        return False
    return (
        isinstance(head.get("layer"), str)
        and all(type(place) is int and 0 <= place < MOST for place in places)
        and all(x is None or (type(x) in (int, float) and abs(x) <= LARGEST) for x in numbers)
    )


def _is_finding(one) -> bool:
    return isinstance(one, dict) and isinstance(one.get("kind"), str) and isinstance(one.get("heads"), list)


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
    rows = [[printable(kind), str(counts[0][kind]), str(counts[1][kind])] for kind in kinds] or [["none", "0", "0"]]
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
