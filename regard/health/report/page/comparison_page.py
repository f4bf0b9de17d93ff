"""The page of a `Comparison`: what changed, tables, and a map of A, of B and of B − A for every statistic."""

from collections.abc import Sequence
from typing import Any

from regard.health.report.comparison import Comparison, FindingChange, describe_gaps, describe_name
from regard.health.report.glossary import FINDINGS, link, make_glossary
from regard.health.report.page.document import escape, make_document, pack
from regard.health.report.page.payload import KEYS, describe_statistics, list_layers, list_numbers
from regard.health.report.page.problems import make_chips
from regard.table import Table

LIMIT = 2_500_000  # bytes of the packed numbers
DETAILS = ((KEYS, 5), (KEYS, 3), (KEYS[:1], 3))  # which numbers of a statistic, to how many digits


def render(comparison: Comparison, heads: int) -> str:
    """The HTML of a comparison, with so many of the most changed heads."""
    a, b = comparison.a, comparison.b
    first, second = comparison.names
    header = f"""<header>
<p class="brand">regard · two attention reports</p>
<h1>{escape(first)} <span class="versus">and</span> {escape(second)}</h1>
<div class="summary">{_describe_side("A", first, a)}{_describe_side("B", second, b)}</div>
</header>"""
    body = [header, _changes(comparison), *map(_table, comparison.tables(heads))]
    if a["heads"] or b["heads"]:
        body.append(MAPS)
    body.append(make_glossary())
    for keys, digits in DETAILS:
        numbers = pack(make_payload(a, b, keys, digits))
        if len(numbers) <= LIMIT:
            break
    title = f"{first} and {second}"
    return make_document(title=title, scripts=("compare.js",), body="\n".join(body), numbers=numbers)


def _describe_side(letter: str, name: str, report: dict[str, Any]) -> str:
    text = f"{letter}: {describe_name(name, report)}{describe_gaps(report)}"
    source = report.get("how", {}).get("input")
    return f"<p>{escape(text)}{escape(f', measured on {source}') if source else ''}</p>"


def _changes(comparison: Comparison) -> str:
    """What is new, resolved and changed in B, each kind with its heads, and the first layer that differs."""
    groups = (
        ("New in B", comparison.new, comparison.b),
        ("Resolved in B", comparison.resolved, comparison.a),
        ("Changed", comparison.changed, comparison.b),
    )
    parts = []
    for title, changes, report in groups:
        severity = {one["kind"]: one.get("severity", "note") for one in reversed(report["findings"])}
        cards = "".join(_card(change, severity.get(change.kind, "note")) for change in changes)
        parts.append(f"<h3>{title}</h3>{cards}" if cards else f'<p class="none">{title}: nothing.</p>')
    return f"""<section id="changes"><h2>What changed from A to B</h2>{"".join(parts)}
<p>{escape(comparison.summary()[-1])}</p></section>"""


def _card(change: FindingChange, severity: str) -> str:
    sides = (("in B only", change.appeared), ("in A only", change.gone))
    rows = "".join(
        f'<p class="chips"><span class="label">{words}, since layer {places[0][0]}</span>{make_chips(places)}</p>'
        for words, places in sides
        if places
    )
    return f"""<article class="card {severity}">
<h3>{link(change.kind)} <span class="pill {severity}">{severity}</span></h3>
<p>{escape(FINDINGS.get(change.kind, ""))}</p>{rows}</article>"""


def make_payload(a: dict[str, Any], b: dict[str, Any], keys: Sequence[str], digits: int) -> dict[str, Any]:
    return dict(
        **describe_statistics(),
        keys=list(keys),
        layers=list_layers([(head["index"], head["layer"]) for report in (b, a) for head in report["heads"]]),
        reports=[
            [
                dict(layer=head["index"], head=head["head"], numbers=list_numbers(head["statistics"], keys, digits))
                for head in report["heads"]
            ]
            for report in (a, b)
        ],
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    aligned = ' class="text"' if not table.numbers else ""
    rows = "".join(
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in table.rows
    )
    return f"""<section><h2>{escape(table.title)}</h2>
<div class="scroll"><table{aligned}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>
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
<h2><a id="chosen" href="#maps">A head</a></h2>
<div class="scroll"><table id="numbers-table">
<caption class="hidden">The chosen head in both reports</caption>
</table></div>
<noscript><p>The maps need JavaScript; the numbers are in the two JSON files.</p></noscript>
</section>"""
