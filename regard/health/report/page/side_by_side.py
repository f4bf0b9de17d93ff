"""Two reports side by side as one HTML file: tables in words, and a map of A, of B and of B − A for every statistic.

It reads the JSON of reports, so that two runs of different days, or versions, can stand beside one another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from regard.health.readings import histogram
from regard.health.report.page.data import ITSELF, MEANING
from regard.health.report.page.document import document, escaped, packed
from regard.health.report.report import by_kind, counted
from regard.table import Table

KEYS = ("mean", "std", "min", "q05", "q50", "q95", "max")
LIMIT = 2_500_000  # bytes of the packed numbers
DETAIL = ((KEYS, 5), (KEYS, 3), (("mean",), 3))  # which numbers of a statistic, to how many digits


def render(a: dict, b: dict, tables: Sequence[Table]) -> str:
    """The page of two reports' JSON and the tables that `regard compare` prints."""
    body = [_header(a, b), *map(_table, tables)]
    if a["heads"] or b["heads"]:
        body.append(MAPS)
    title = f"{a['title']} beside {b['title']}"
    return document(title=title, script="compare.js", body="\n".join(body), numbers=_numbers(a, b))


def unknown(report: dict) -> str:
    """What keeps the absence of findings from meaning health, in brackets; nothing where nothing does."""
    told = [] if report["heads"] else ["nothing was measured"]
    if report["heads"] and report.get("unmeasured"):
        told.append(f"layers not measured: {len(report['unmeasured'])}")
    if report.get("interrupted"):
        told.append(f"not finished: {report['interrupted']}")
    return f" ({'; '.join(told)})" if told else ""


def _numbers(a: dict, b: dict) -> str:
    for keys, digits in DETAIL:
        numbers = packed(payload(a, b, keys, digits))
        if len(numbers) <= LIMIT:
            break
    return numbers


def payload(a: dict, b: dict, keys: Sequence[str] = KEYS, digits: int = 5) -> dict:
    """What compare.js draws: per report and head, per statistic, the numbers named by `keys`."""
    layers = {head["index"]: head["layer"] or ITSELF for report in (b, a) for head in report["heads"]}

    def told(head: dict) -> list[list[float | None]]:
        spreads = [head["statistics"].get(name, {}) for name in MEANING]
        return [[_short(spread.get(key), digits) for key in keys] for spread in spreads]

    return dict(
        statistics=list(MEANING),
        meaning=list(MEANING.values()),
        keys=list(keys),
        least=[_edge(histogram.least(name)) for name in MEANING],
        layers=[dict(index=index, name=name) for index, name in sorted(layers.items())],
        reports=[
            [dict(layer=head["index"], head=head["head"], numbers=told(head)) for head in report["heads"]]
            for report in (a, b)
        ],
    )


def _edge(x: float) -> float | None:
    return _short(x, 2) if math.isfinite(x) else None


def _short(x: float | None, digits: int) -> float | None:
    return None if x is None else float(f"{x:.{digits}g}")


def _header(a: dict, b: dict) -> str:
    def told(letter: str, report: dict) -> str:
        findings = ", ".join(by_kind((one["kind"], len(one["heads"])) for one in report["findings"])) or "no findings"
        return (
            f"<p><strong>{letter}</strong> {escaped(report['title'])}: {counted(len(report['heads']), 'head')}, "
            f"{escaped(findings + unknown(report))}.</p>"
        )

    return f"""<header>
<p class="brand">regard · two attention reports</p>
<h1>{escaped(a["title"])} <span class="versus">beside</span> {escaped(b["title"])}</h1>
<div class="summary">{told("A", a)}{told("B", b)}</div>
</header>"""


def _table(table: Table) -> str:
    if not table.rows:
        return ""
    head = "".join(f"<th>{escaped(column)}</th>" for column in table.columns)
    rows = "".join(
        f"<tr><th>{escaped(first)}</th>{''.join(f'<td>{escaped(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in table.rows
    )
    title = f"<h2>{escaped(table.title)}</h2>" if table.title else "<h2>findings</h2>"
    return f"""<section>{title}
<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>
</section>"""


MAPS = """<section id="maps"><h2>Layer × head</h2>
<div class="controls"><label>Statistic <select id="statistic"></select></label></div>
<p id="meaning" class="meaning"></p>
<div class="trio">
<figure><figcaption>A</figcaption><div id="map-a" class="map"></div>
<div id="scale-a" class="scale" aria-hidden="true"></div></figure>
<figure><figcaption>B</figcaption><div id="map-b" class="map"></div>
<div id="scale-b" class="scale" aria-hidden="true"></div></figure>
<figure><figcaption>B − A</figcaption><div id="map-change" class="map"></div>
<div id="scale-change" class="scale" aria-hidden="true"></div></figure>
</div>
<h2 id="chosen">A head</h2>
<div class="scroll"><table id="numbers-table">
<caption class="hidden">The chosen head in both reports</caption>
</table></div>
<noscript><p>The maps need JavaScript; the numbers are in the two JSON files.</p></noscript>
</section>"""
