"""The page of a `Comparison`: what changed, tables, and a map of A, of B and of B − A for every statistic."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.health.measure.heads import HeadReading
from regard.health.report import files
from regard.health.report.comparison import UNSURE, Comparison, describe_gaps, describe_name
from regard.health.report.differences import FindingChange
from regard.health.report.glossary import FINDINGS, link, link_words, make_glossary
from regard.health.report.page.causes import SHOWN, make_button, make_causes
from regard.health.report.page.document import escape, make_document, pack
from regard.health.report.page.payload import KEYS, describe_statistics, list_layers, list_numbers
from regard.health.report.report import Report
from regard.health.report.screen import count_checks, list_unmade
from regard.health.report.summary import name_places
from regard.table import Table, count_noun

if TYPE_CHECKING:
    from regard.health.comparing.result import ModelComparison

TONES = {"same": "clean", "better": "clean", "worse": "critical", "different": "warning", "unknown": "warning"}
LIMIT = 2_500_000  # bytes of the packed numbers
DETAILS = ((KEYS, 5), (KEYS, 3), (KEYS[:1], 3))  # which numbers of a statistic, to how many digits


def render(comparison: Comparison, heads: int) -> str:
    """The HTML of a comparison, with so many of the most changed heads: the verdict, what changed, maps, details."""
    a, b = comparison.a, comparison.b
    first, second = comparison.names
    word, sentence = comparison.verdict
    header = f"""<header>
<p class="brand">regard · two attention reports</p>
<h1>{escape(first)} <span class="versus">and</span> {escape(second)} <span class="pill {TONES[word]}">{word}</span></h1>
<div class="summary"><p><b>{link_words(sentence)}</b></p>
<p>First: {escape(comparison.describe_first_difference())}. <span class="none">{UNSURE}</span></p>
{_describe_side("A", first, a)}{_describe_side("B", second, b)}</div>
</header>"""
    body = [header, f'<div class="first">{_changes(comparison)}{MAPS if a.heads or b.heads else ""}</div>']
    body += [HEAD] if a.heads or b.heads else []
    body += [*map(_table, comparison.tables(heads)), make_glossary()]
    for keys, digits in DETAILS:
        numbers = pack(dict(make_payload(a, b, keys, digits), first=comparison.first_layer))
        if len(numbers) <= LIMIT:
            break
    title = f"{first} and {second}"
    return make_document(title=title, scripts=("compare.js",), body="\n".join(body), numbers=numbers)


def _describe_side(letter: str, name: str, report: Report) -> str:
    text = f"{letter}: {describe_name(name, report)}{describe_gaps(report, checks=False)}"
    if not report.heads:
        return f"<p>{escape(text)}</p>"
    rest = [f"measured on {report.how.get('input', 'the batches given to regard.examine')}", *list_unmade(report)]
    return f"""<details class="about"><summary>{escape(f"{text}: {count_checks(report)}")}</summary>
<p>{escape("; ".join(rest))}</p></details>"""


def _changes(comparison: Comparison) -> str:
    """The causes that are new in B as its own page has them; below, folded, every other finding that changed."""
    causes = comparison.new_causes
    groups = (
        ("New in B", comparison.new, comparison.b),
        (comparison.gone.capitalize().replace(" b", " B"), comparison.resolved, comparison.a),
        ("In other heads", comparison.changed, comparison.b),
        ("Not checked in A", [one for one, side in comparison.unchecked if side == "A"], comparison.b),
        ("Not checked in B", [one for one, side in comparison.unchecked if side == "B"], comparison.a),
    )
    parts, empty, count = [], [], 0
    for title, changes, report in groups:
        severity = {one.kind: one.severity for one in reversed(report.findings)}
        told = {cause.kind for cause in report.diagnosis}
        others = [one for one in changes if one.kind not in {cause.kind for cause in causes[:SHOWN]}]
        others.sort(key=lambda one: one.kind not in told)
        cards = "".join(_card(change, severity.get(change.kind, "note")) for change in others)
        parts.append(f"<h3>{title}</h3>{cards}" if cards else "")
        empty += [] if changes or title.startswith("Not") else [title]
        count += len(others)
    none = f'<p class="none">{", ".join(empty)}: nothing.</p>' if empty else ""
    cards = "".join(parts)
    if causes and cards:
        cards = f"<details><summary>{count_noun(count, 'more finding')} that changed</summary>{cards}</details>"
    first = make_causes(comparison.b, causes, "New in B") or "<h2>What changed</h2>"
    return f"""<section id="changes">{first}{cards}{none}</section>"""


def _card(change: FindingChange, severity: str) -> str:
    sides = (("In B only", change.appeared), ("In A only", change.gone))
    rows = "".join(
        f"<p>{side}: {make_button(name_places(places, change.names), places[0])}</p>"
        for side, places in sides
        if places
    )
    return f"""<article class="card {severity}">
<h3>{link(change.kind)} <span class="pill {severity}">{severity}</span></h3>
<p>{escape(FINDINGS.get(change.kind, ""))}</p>{rows}</article>"""


def save_page(comparison: ModelComparison, path: str | os.PathLike) -> Path:
    """Writes the page of two models that were compared: the verdict, why, what to do first, a table of layers."""
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"path must end in .html, got {str(path)!r}")
    tone, word = ("clean", "same") if comparison.same else ("critical", "different")
    fields = "".join(
        f"<dt>{escape(name)}</dt><dd>{link_words(text)}</dd>" for name, text in comparison.fields() if text
    )
    table = comparison.table()
    body = f"""<header><p class="brand">regard · two models</p>
<h1>A and B <span class="pill {tone}">{word}</span></h1>
<div class="summary"><p><b>{link_words(comparison.verdict)}</b></p></div></header>
<dl class="fields">{fields}</dl>{_table(table, is_open=True) if table.rows else ""}{make_glossary()}"""
    return files.write(path, make_document(title=f"A and B: {word}", body=body))


def make_payload(a: Report, b: Report, keys: Sequence[str], digits: int) -> dict[str, Any]:
    return dict(
        **describe_statistics(),
        keys=list(keys),
        layers=list_layers([(head.index, head.layer) for report in (b, a) for head in report.heads]),
        reports=[[_pack_head(head, keys, digits) for head in report.heads] for report in (a, b)],
    )


def _pack_head(head: HeadReading, keys: Sequence[str], digits: int) -> dict[str, Any]:
    return dict(layer=head.index, head=head.head, numbers=list_numbers(head.to_json()["statistics"], keys, digits))


def _table(table: Table, is_open: bool = False) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    aligned = ' class="text"' if not table.numbers else ""
    rows = "".join(
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in table.rows
    )
    title = f"{table.title[:1].upper()}{table.title[1:]}"
    return f"""<section><details class="about"{" open" * is_open}><summary>{escape(title)}</summary>
<div class="scroll" tabindex="0"><table{aligned}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>
</details></section>"""


MAPS = """<section id="maps"><h2>Every layer and head</h2>
<div class="controls"><label>Statistic <select id="statistic"></select></label></div>
<p id="meaning" class="meaning"></p>
<div class="trio">
<figure><figcaption>A</figcaption><div id="map-a" class="map"></div>
<div id="scale-a" class="scale"></div></figure>
<figure><figcaption>B</figcaption><div id="map-b" class="map"></div>
<div id="scale-b" class="scale"></div></figure>
<figure><figcaption>B − A</figcaption><div id="map-change" class="map"></div>
<div id="scale-change" class="scale"></div></figure>
</div>
<noscript><p>The maps need JavaScript; the numbers are in the two JSON files.</p></noscript>
</section>"""
HEAD = """<section><h2><a id="chosen" href="#maps">A head</a></h2>
<details class="about" id="numbers-of-head"><summary>Its numbers in A and B</summary>
<div class="scroll" tabindex="0"><table id="numbers-table">
<caption class="hidden">The chosen head in both reports</caption>
</table></div></details></section>"""
