"""The findings: each cause with its place, what follows from it, what to do; below the first screen, all others."""

from collections.abc import Sequence
from typing import Any

from regard.health import checks
from regard.health.checks.finding import MODEL, Finding
from regard.health.contract.diagnosis import Cause
from regard.health.probe.task import WORDS
from regard.health.report.glossary import link, link_words
from regard.health.report.page.document import escape
from regard.health.report.report import Report
from regard.health.report.screen import describe_gain, describe_place, describe_proof
from regard.health.report.summary import ROOT, find_unusual
from regard.health.what_if import parse
from regard.table import count_noun

SHOWN = 4  # causes


def list_causes(report: Report) -> list[Cause]:
    """The causes without notes, the gravest first."""
    return [cause for cause in report.diagnosis if cause.severity != "note"]


def make_causes(report: Report, causes: Sequence[Cause], title: str = "What is wrong") -> str:
    """The section of causes, or nothing if there is none."""
    if not causes:
        return ""
    items = "".join(_item(report, cause, number) for number, cause in enumerate(causes[:SHOWN], 1))
    left = count_noun(len(causes) - SHOWN, "more cause")
    more = f'<p class="meaning">and {left}, <a href="#findings">below</a>.</p>' if len(causes) > SHOWN else ""
    return f"""<section id="causes"><h2>{title}</h2>{_first_step(report, causes[0])}
<ol class="causes">{items}</ol>{more}</section>"""


def _first_step(report: Report, cause: Cause) -> str:
    tried = {} if report.checks is None else report.checks.what_if
    command = name_command(cause.finding, [name for name, one in tried.items() if one.word == WORDS["worse"]])
    return f"""<p class="first-step"><b>Do first:</b> {link_words(cause.fix)}</p>
<p class="command"><code id="command" tabindex="0">{escape(command)}</code>
<button type="button" id="copy" data-copy="{escape(command)}">Copy</button></p>"""


def name_command(finding: Finding, worse: Sequence[str] = ()) -> str:
    """What to run first: the change that may cure it and did not make it `worse`, or the explanation of its code.

    >>> from types import SimpleNamespace
    >>> from regard.health.report.page.causes import name_command
    >>> name_command(SimpleNamespace(what_if=("qk_norm",), code="RG301"))
    'with regard.using(model, qk_norm=True): ...'
    >>> name_command(SimpleNamespace(what_if=("qk_norm",), code="RG301"), worse=["qk_norm"])
    'regard rule RG301'
    """
    names = [name for name in finding.what_if if name not in worse]
    if not names:
        return f"regard rule {finding.code}"
    change = parse(names[0])
    options = [f"{name}={value!r}" for name, value in change.options.items() if isinstance(value, (str, int, float))]
    return f"with regard.using(model, {', '.join([*options, *['qk_norm=True'] * change.qk_norm])}): ..."


def _item(report: Report, cause: Cause, number: int) -> str:
    so = ", ".join(dict.fromkeys(link(one.kind) for one in cause.symptoms))
    therefore = f'<p class="so">Therefore: {so}.</p>' if so else ""
    gains = "; ".join(
        gain + _describe_cure(report, cause.finding, gain.partition(":")[0]) for gain in describe_gain(report, cause)
    )
    pill = f'<span class="pill {cause.severity}">{cause.severity}</span>'
    return f"""<li class="{cause.severity}"><h3>{number} {link(cause.kind)} {pill}
<code>{escape(cause.code)}</code></h3>
<p>{_place(report, cause)}{link_words(cause.evidence)}</p>{therefore}
{_advice(cause, escape(gains), is_first=number == 1)}</li>"""


def _advice(cause: Cause, gains: str, is_first: bool) -> str:
    """What to do, what it gains, what the finding proves: in sight of the first cause, folded of the others."""
    gain = f"<p><b>Gain now, without training:</b> {gains}.</p><p><b>Sure:</b> {escape(describe_proof(cause))}</p>"
    reported = f"<p>Reported if {link_words(cause.finding.threshold)}.</p>"
    if is_first:  # what to do stands above
        return f"{gain}<details><summary>Threshold</summary>{reported}</details>"
    return f"""<p><b>Do:</b> {link_words(cause.fix)}</p>
<details><summary>Gain, how sure?</summary>{gain}{reported}</details>"""


def _place(report: Report, cause: Cause) -> str:
    """Where it is, as a button that shows only this cause on the map."""
    where = describe_place(report, cause.finding)
    if not cause.finding.places:
        return f'<span class="place">{escape(where)}:</span> '
    return f"{make_button(where, min(cause.finding.places), cause.kind)} "


def make_button(text: str, place: tuple[int, int], kind: str = "") -> str:
    """A button that chooses a head, and if it has the `kind` of a cause, marks only this cause's heads on the map."""
    own = f' place" data-kind="{escape(kind)}"' if kind else '"'
    return (
        f'<button type="button" class="chip{own} data-layer="{place[0]}" data-head="{place[1]}">{escape(text)}</button>'
    )


def _describe_cure(report: Report, finding: Finding, name: str) -> str:
    """` (ends it in 16 of 16 heads)` of a change under which the finding was judged again, else nothing."""
    if name not in report.what_if or not is_judged_again(finding.code):
        return ""
    still = {place for one in report.what_if[name].findings if one.kind == finding.kind for place in one.places}
    own = set(finding.places)
    return f", ends it in {len(own - still)} of {count_noun(len(own), 'head')}"


def is_judged_again(code: str) -> bool:
    """True if the finding is judged from the heads' statistics alone, which what-ifs measure anew."""
    return any(hasattr(module, "find") and code in {rule.code for rule in module.RULES} for module in checks.modules())


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
