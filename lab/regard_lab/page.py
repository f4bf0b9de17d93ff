"""lab.html: the page of all claims in one file, without script or network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import regard
from regard_lab.claim import BEYOND, CORE, NOTES, OURS, Check
from regard_lab.mathml import formula_line
from regard_lab.run import Result

VERDICTS = {"holds": "holds", "holds_if": "holds if …", "wrong": "wrong"}
COUNTED = {"wrong": "are wrong", "holds_if": "hold under a condition", "holds": "hold"}
ROLES = {CORE: "the claim", BEYOND: "beyond the condition", OURS: "our derivation"}

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")


def page(results: Sequence[Result], seed: int = 0) -> str:
    """Return the page as HTML: the wrong claims first, the others folded; a page of one claim has no overview."""
    body = make_overview(results) if len(results) > 1 else "".join(map(section, results))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>regard lab</title><style>{STYLE}</style></head>
<body><main>{body}</main>
<footer class="rule">Seed {seed}, regard {regard.__version__}. Intervals are 99.99 %, those of trained models
95 % over seeds; a check agrees if its whole interval lies in what the claim allows.</footer></body></html>
"""


def make_overview(results: Sequence[Result]) -> str:
    """Return the page's title and every claim by verdict: those that are wrong in full, the others folded."""
    groups = {v: [one for one in results if one.verdict == v] for v in COUNTED}
    links = " · ".join(f'<a href="#{v}">{len(found)} {COUNTED[v]}</a>' for v, found in groups.items() if found)
    wrong = "".join(map(section, groups["wrong"]))
    parts = f'<h2 id="wrong">{len(groups["wrong"])} {COUNTED["wrong"]}</h2>{wrong}' if wrong else ""
    parts += "".join(  # a link into a group opens it
        f'<details><summary class="group">{len(found)} {COUNTED[v]}</summary><div id="{v}">{"".join(map(fold, found))}'
        "</div></details>"
        for v, found in groups.items()
        if found and v != "wrong"
    )
    return f"""<header><h1>What five study notes claim about attention, and what is true</h1>
<p>{len(results)} claims, each measured: {links}. Choose one to see how.</p></header>{parts}"""


def fold(result: Result) -> str:
    """Return one claim as a line that opens."""
    claim = result.claim
    return f"""<details class="claim" id="{claim.id}"><summary>{verdict_badge(result.verdict)} {escape(claim.statement)}
</summary>{_describe(result)}</details>"""


def section(result: Result) -> str:
    """Return one claim in full."""
    claim = result.claim
    return f"""<section id="{claim.id}"><h3>{escape(claim.statement)} {verdict_badge(result.verdict)}</h3>
{_describe(result)}</section>"""


def _describe(result: Result) -> str:
    """What is right, and the figure; folded below, the derivation and the checks."""
    claim, finding = result.claim, result.finding
    figure = f"<figure>{finding.figure.img()}</figure>" if finding.figure else ""
    derivation = "".join(map(formula_line, claim.derivation))
    remarks = [("Holds if", result.condition), ("Right", result.right), ("Remark", finding.remark)]
    words = "".join(f'<p class="said"><b>{label}:</b> {escape(text)}</p>' for label, text in remarks if text)
    notes = ", ".join(f"note {number}, <i>{escape(NOTES[number])}</i>" for number in claim.note.split(", "))
    return f"""<div class="beside"><div>{words}<p class="note">Claimed in {notes}. In the lab: {claim.id}</p>
<details><summary>Derivation, checks, rule</summary><div class="derivation">{derivation}</div>
<p class="rule">Rule: {escape(claim.rule)}</p><div class="wide">{checks_table(finding.checks)}</div></details></div>
{figure}</div>
"""


def verdict_badge(name: str) -> str:
    """Return a verdict as a coloured label."""
    return f'<span class="verdict {name}">{VERDICTS[name]}</span>'


def checks_table(checks: Sequence[Check]) -> str:
    """Return the checks as an HTML table."""
    rows = "".join(
        f'<tr><td>{escape(check.what)}</td><td class="number" data-label="predicted">{escape(check.allowed)}</td>'
        f'<td class="number" data-label="measured">{escape(repr(check.measured))}</td>'
        f"<td>{'✓ agrees' if check.agrees else '✗ disagrees'}</td><td>{ROLES[check.role]}</td></tr>"
        for check in checks
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("check", "predicted", "measured", "outcome", "part"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
