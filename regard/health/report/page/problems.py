"""The findings below the first screen: symptoms, notes and further causes in full, and the most unusual heads."""

from typing import Any

from regard.health.checks.finding import MODEL, Finding
from regard.health.report.glossary import link, link_words
from regard.health.report.page.causes import SHOWN, list_causes, make_button
from regard.health.report.page.document import escape
from regard.health.report.report import Report
from regard.health.report.screen import describe_place
from regard.health.report.summary import ROOT, find_unusual
from regard.table import count_noun


def checks_of(report: Report) -> dict[str, Any]:
    """What more forwards showed, as JSON: loss, what-ifs' losses, ablation, checks; empty if they were not made."""
    return {} if report.checks is None else report.checks.to_json()


def first_place(report: Report) -> tuple[int, int] | None:
    """The head to look at first: of the gravest finding, else the most unusual one; None if there is no head."""
    measured = {(head.index, head.head) for head in report.heads}
    for finding in (one for one in report.findings if one.scope != MODEL):
        for place in sorted(finding.places):
            if place in measured:
                return place
    unusual = find_unusual(report.heads, 1)
    if unusual:
        return unusual[0].head.index, unusual[0].head.head
    return min(measured, default=None)


def make_problems(report: Report) -> str:
    """The section of findings that the causes above do not tell, and the most unusual heads where nothing is wrong."""
    shown = list_causes(report)[:SHOWN]
    told = {id(cause.finding) for cause in shown}
    cards = "".join(_card(report, finding) for finding in report.findings if id(finding) not in told)
    count = len(report.findings) - len(told)
    unusual = "" if shown else _list_unusual(report)
    if not cards:
        return unusual and f'<section id="findings">{unusual}</section>'
    title = f"{count_noun(count, 'more finding')}: symptoms and notes" if shown else f"{count_noun(count, 'note')}"
    is_open = "" if shown else " open"
    return f"""<section id="findings"><details class="about"{is_open}><summary>{title}</summary>{cards}</details>
{unusual}</section>"""


def _list_unusual(report: Report) -> str:
    rows = "".join(
        f"<tr><th>{make_button(f'{one.head.layer or ROOT}, head {one.head.head}', (one.head.index, one.head.head))}"
        "</th>"
        f"<td>{link_words(str(one))}</td></tr>"
        for one in find_unusual(report.heads)
    )
    if not rows:
        return ""
    return f"""<h2 id="unusual">The most unusual heads</h2>
<p class="meaning">They differ most from the model's other heads. That alone is no problem.</p>
<div class="scroll"><table class="text">{rows}</table></div>"""


def _card(report: Report, finding: Finding) -> str:
    where = describe_place(report, finding)
    place = make_button(where, min(finding.places)) if finding.places else escape(where)
    return f"""<article class="card {finding.severity}">
<h3>{link(finding.kind)} <span class="pill {finding.severity}">{finding.severity}</span>
<code>{finding.code}</code></h3>
<p>{link_words(finding.evidence)}</p>
<dl><dt>Where</dt><dd>{place}</dd>
<dt>What to do</dt><dd>{link_words(finding.remedy)}</dd></dl>
<details><summary>How sure?</summary><p>Reported if {link_words(finding.threshold)}.</p></details>
</article>"""
