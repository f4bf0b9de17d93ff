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
COUNTED = {"holds": "holds", "holds_if": "holds under a condition", "wrong": "wrong"}
ROLES = {CORE: "the claim", BEYOND: "beyond the condition", OURS: "our derivation"}

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")


def page(results: Sequence[Result], seed: int = 0) -> str:
    """Return the page as HTML; a page of one claim has no overview."""
    overview = make_overview(results) if len(results) > 1 else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>regard lab</title><style>{STYLE}</style></head>
<body>{overview}<main>{"".join(map(section, results))}</main>
<footer class="rule">Seed {seed}, regard {regard.__version__}. Intervals are 99.99 %, those of trained models
95 % over seeds; a check agrees if its whole interval lies in what the claim allows.</footer></body></html>
"""


def make_overview(results: Sequence[Result]) -> str:
    """Return the page's title, the number of claims by verdict, and links to all claims."""
    counts = "; ".join(f"{text}: {sum(r.verdict == v for r in results)}" for v, text in COUNTED.items())
    listed = "".join(  # a claim's statement shows where a mouse rests
        f'<li>{verdict_badge(result.verdict)} <a href="#{result.claim.id}" title="{escape(result.claim.statement)}">'
        f"{result.claim.id}</a></li>"
        for result in results
    )
    notes = ", ".join(f"{number} <i>{escape(title)}</i>" for number, title in NOTES.items())
    return f"""<header><h1>The lab: what the notes claim, and what is true</h1>
<p>{len(results)} claims tested. {counts.capitalize()}.</p>
<p>The notes are five study notes on softmax and attention, which are not in this package: {notes}.</p>
</header>
<nav aria-label="Claims"><ul>{listed}</ul></nav>"""


def section(result: Result) -> str:
    """Return one claim as HTML: statement, derivation, verdict, figure, checks."""
    claim, finding = result.claim, result.finding
    figure = f"<figure>{finding.figure.img()}</figure>" if finding.figure else ""
    derivation = "".join(map(formula_line, claim.derivation))
    remarks = [("Holds if", result.condition), ("Right", result.right), ("Remark", finding.remark)]
    words = "".join(f'<p class="said"><b>{label}:</b> {escape(text)}</p>' for label, text in remarks if text)
    return f"""<section id="{claim.id}"><div><h2>{claim.id} {verdict_badge(result.verdict)}</h2>
<p>{escape(claim.statement)} <span class="note">note {claim.note}</span></p><div class="derivation">{derivation}</div>
{words}<p class="rule">Rule: {escape(claim.rule)}</p></div>
{figure}<div class="wide">{checks_table(finding.checks)}</div></section>
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
