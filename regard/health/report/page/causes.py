"""The left of the first screen: each cause with its place, what follows from it, what to do, what was tried."""

from regard.health import checks
from regard.health.checks.finding import Finding
from regard.health.contract.diagnosis import Cause
from regard.health.report.glossary import link, link_words
from regard.health.report.page.document import escape
from regard.health.report.report import Report
from regard.health.report.screen import describe_gain, describe_place, describe_proof
from regard.health.report.summary import count_noun
from regard.health.what_if import parse

SHOWN = 4  # causes


def list_shown(report: Report) -> list[Cause]:
    """The causes of the first screen; notes are none."""
    return [cause for cause in report.diagnosis if cause.severity != "note"][:SHOWN]


def make_causes(report: Report) -> str:
    """The section of causes, or nothing if there is none but notes."""
    shown = list_shown(report)
    if not shown:
        return ""
    items = "".join(_item(report, cause, number) for number, cause in enumerate(shown, 1))
    left = count_noun(len([cause for cause in report.diagnosis if cause.severity != "note"]) - len(shown), "more cause")
    more = "" if left.startswith("0") else f'<p class="meaning">and {left}, <a href="#findings">below</a>.</p>'
    return f"""<section id="causes"><h2>What is wrong</h2>{_first_step(shown[0])}
<ol class="causes">{items}</ol>{more}</section>"""


def _first_step(cause: Cause) -> str:
    command = name_command(cause.finding)
    return f"""<p class="first-step"><b>Do first:</b> {link_words(cause.fix)}</p>
<p class="command"><code id="command" tabindex="0">{escape(command)}</code>
<button type="button" id="copy" data-copy="{escape(command)}">Copy</button></p>"""


def name_command(finding: Finding) -> str:
    """What to run first: the change that may cure it, or the explanation of its code.

    >>> from types import SimpleNamespace
    >>> from regard.health.report.page.causes import name_command
    >>> name_command(SimpleNamespace(what_if=("qk_norm",), code="RG301"))
    'with regard.using(model, qk_norm=True): ...'
    >>> name_command(SimpleNamespace(what_if=(), code="RG101"))
    'regard rule RG101'
    """
    if not finding.what_if:
        return f"regard rule {finding.code}"
    change = parse(finding.what_if[0])
    options = [f"{name}={value!r}" for name, value in change.options.items() if isinstance(value, (str, int, float))]
    return f"with regard.using(model, {', '.join([*options, *['qk_norm=True'] * change.qk_norm])}): ..."


def _item(report: Report, cause: Cause, number: int) -> str:
    so = ", ".join(dict.fromkeys(link(one.kind) for one in cause.symptoms))
    therefore = f'<p class="so">Therefore: {so}.</p>' if so else ""
    fix = "" if number == 1 else f"<p><b>Do:</b> {link_words(cause.fix)}</p>"  # the first stands above
    gains = "; ".join(
        gain + _describe_cure(report, cause.finding, gain.partition(":")[0]) for gain in describe_gain(report, cause)
    )
    pill = f'<span class="pill {cause.severity}">{cause.severity}</span>'
    return f"""<li class="{cause.severity}"><h3>{number} {link(cause.kind)} {pill}
<code>{escape(cause.code)}</code></h3>
<p>{_place(report, cause)}{link_words(cause.evidence)}</p>{therefore}{fix}
<p class="meaning"><b>Gain:</b> {escape(gains)}.</p>
{_proof(cause, is_open=number == 1)}</li>"""


def _proof(cause: Cause, is_open: bool) -> str:
    """What the finding proves, in sight or folded, and from which number on it is reported."""
    proves, reported = escape(describe_proof(cause)), f"Reported if {link_words(cause.finding.threshold)}."
    if is_open:
        return f"<p><b>Sure:</b> {proves}</p><details><summary>Threshold</summary><p>{reported}</p></details>"
    return f"<details><summary>How sure?</summary><p>{proves} {reported}</p></details>"


def _place(report: Report, cause: Cause) -> str:
    """Where it is, as a button that shows only this cause on the map."""
    where = describe_place(report, cause.finding)
    text = f"{where[:1].upper()}{where[1:]}"
    if not cause.finding.places:
        return f'<span class="place">{escape(text)}.</span> '
    (index, head), *_ = sorted(cause.finding.places)
    title = "Show only this cause on the map"
    return f"""<button type="button" class="chip place" data-kind="{escape(cause.kind)}" data-layer="{index}"
data-head="{head}" aria-pressed="false" title="{title}">{escape(text)}</button> """


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
