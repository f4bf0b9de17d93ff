"""lab.html: one file, no script, no network; written beside its place and then renamed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

import regard
from regard.lab.claim import BEYOND, CORE, OURS, Check
from regard.lab.mathematics import mathml
from regard.lab.run import Result, waiting

VERDICTS = {"holds": "holds", "holds_if": "holds if …", "wrong": "wrong"}
ROLES = {CORE: "the claim", BEYOND: "beyond the condition", OURS: "our derivation"}

STYLE = """
:root { color-scheme: light; --ink: #1f2933; --soft: #52606d; --line: #d9dee4; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; color: var(--ink); background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
a { color: #0b62a4; }
.verdict { display: inline-block; padding: 0 .55rem; border-radius: 1rem; font-size: .9rem; font-weight: 600; white-space: nowrap; }
.holds { background: #d8f0dc; color: #14532d; } .holds_if { background: #fdeec4; color: #5f4300; }
.wrong { background: #fbdcd6; color: #7c1d0c; } .waits { background: #e8ebee; color: #3e4c59; }
nav ul { columns: 17rem; padding: 0; list-style: none; } nav li { margin: .15rem 0; break-inside: avoid; }
section { border-top: 1px solid var(--line); padding: 1.2rem 0; display: grid; gap: 0 1.5rem; grid-template-columns: minmax(0, 1fr) auto; }
section > * { min-width: 0; } figure { margin: 0; align-self: start; } .figure { max-width: 100%; height: auto; }
.wide { grid-column: 1 / -1; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; } th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number { font-variant-numeric: tabular-nums; } math { font-size: 1.05rem; } .derivation { overflow-x: auto; padding: .2rem 0; }
.derivation math { display: block; margin: .5rem 0; text-align: left; } .note, .rule { color: var(--soft); font-size: .9rem; }
.said { border-left: 3px solid var(--line); padding-left: .8rem; margin: .4rem 0; } p { margin: .4rem 0; }
@media (max-width: 52rem) { section { grid-template-columns: minmax(0, 1fr); } thead { display: none; } tr { display: block; border-bottom: 1px solid var(--line); padding: .3rem 0; }
  td { display: block; border: 0; padding: 0; } td[data-label]::before { content: attr(data-label) " "; color: var(--soft); } }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def write(path: str | os.PathLike[str], results: Sequence[Result], seed: int = 0) -> None:
    """Write the page of these results; a page that was there stays whole until the new one is."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(page(results, seed), encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def page(results: Sequence[Result], seed: int = 0) -> str:
    counts = ", ".join(f"{sum(r.verdict == v for r in results)} {text}" for v, text in VERDICTS.items())
    listed = "".join(
        f'<li>{verdict(r.verdict)} <a href="#{r.claim.id}">{r.claim.id}</a></li>' for r in results
    ) + "".join(f'<li><span class="verdict waits">waits for training</span> {name}</li>' for name in waiting())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>regard lab</title><style>{STYLE}</style></head>
<body><header><h1>The lab: what the notes claim, and what is true</h1>
<p>{len(results)} claims put to the test: {counts}. Seed {seed}, regard {regard.__version__}. Intervals are 99.99 %; a check
agrees if its whole interval lies in what the claim allows.</p></header>
<nav aria-label="Claims"><ul>{listed}</ul></nav><main>{"".join(map(section, results))}</main></body></html>
"""


def section(result: Result) -> str:
    """One claim: statement, derivation, verdict, figure, checks."""
    claim, finding = result.claim, result.finding
    figure = f"<figure>{finding.figure().img()}</figure>" if finding.figure else ""
    derivation = "".join(mathml(line, block=True) for line in claim.derivation)
    told = [("Holds if", result.condition), ("Right", result.right), ("Remark", finding.remark)]
    said = "".join(f'<p class="said"><b>{label}:</b> {escape(text)}</p>' for label, text in told if text)
    return f"""<section id="{claim.id}"><div><h2>{claim.id} {verdict(result.verdict)}</h2>
<p>{escape(claim.statement)} <span class="note">note {claim.note}</span></p><div class="derivation">{derivation}</div>
{said}<p class="rule">Rule: {escape(claim.rule)}</p></div>{figure}<div class="wide">{checks(finding.checks)}</div></section>
"""


def verdict(name: str) -> str:
    return f'<span class="verdict {name}">{VERDICTS[name]}</span>'


def checks(made: Sequence[Check]) -> str:
    rows = "".join(
        f'<tr><td>{escape(check.what)}</td><td class="number" data-label="predicted">{escape(check.allowed)}</td>'
        f'<td class="number" data-label="measured">{escape(repr(check.measured))}</td>'
        f"<td>{'✓ agrees' if check.agrees else '✗ disagrees'}</td><td>{ROLES[check.role]}</td></tr>"
        for check in made
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("check", "predicted", "measured", "", "part"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
