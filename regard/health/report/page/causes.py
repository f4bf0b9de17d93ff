"""The left of the first screen: each cause with its place, what follows from it, what to do, what was tried."""

from collections.abc import Sequence

from regard.health.checks.finding import Finding
from regard.health.contract.diagnosis import Cause
from regard.health.report.glossary import link, link_words
from regard.health.report.page.document import escape
from regard.health.report.report import Report
from regard.health.report.screen import describe_place, describe_tries
from regard.health.report.summary import count_noun
from regard.health.what_if import parse

SHOWN, PLACES = 4, 6  # causes; heads of one


def make_causes(report: Report) -> str:
    """The section of causes, or nothing if there is none but notes."""
    grave = [cause for cause in report.diagnosis if cause.severity != "note"]
    if not grave:
        return ""
    items = "".join(_item(report, cause, is_first=cause is grave[0]) for cause in grave[:SHOWN])
    left = len(grave) - SHOWN
    more = f'<p class="meaning">and {count_noun(left, "more cause")}, in “Every finding”.</p>' if left > 0 else ""
    first = _first_step(grave[0])
    return f'<section id="causes"><h2>What is wrong</h2>{first}<ol class="causes">{items}</ol>{more}</section>'


def _first_step(cause: Cause) -> str:
    command = name_command(cause.finding)
    return f"""<p class="first-step"><b>Do first:</b> {link_words(cause.fix)}
<span class="command"><code id="command">{escape(command)}</code>
<button type="button" id="copy" data-copy="{escape(command)}">Copy</button></span></p>"""


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


def _item(report: Report, cause: Cause, is_first: bool) -> str:
    so = ", ".join(dict.fromkeys(link(one.kind) for one in cause.symptoms))
    therefore = f'<p class="so">Therefore: {so}.</p>' if so else ""
    tried = describe_tries(report, cause.finding.what_if)
    tries = f'<p class="meaning">Tried without training: {escape("; ".join(tried))}.</p>' if tried else ""
    pill = f'<span class="pill {cause.severity}">{cause.severity}</span>'
    fix = "" if is_first else f"<p><b>Do:</b> {link_words(cause.fix)}</p>"  # which stands above
    return f"""<li class="{cause.severity}"><h3>{link(cause.kind)} {pill} <code>{escape(cause.code)}</code></h3>
<p class="place">{escape(describe_place(report, cause).capitalize())}{_chips(cause)}</p>
<p>{link_words(cause.evidence)}</p>{therefore}{fix}{tries}</li>"""


def _chips(cause: Cause) -> str:
    places: Sequence[tuple[int, int]] = cause.finding.places
    chips = "".join(
        f'<button type="button" class="chip" data-layer="{index}" data-head="{head}">{index}·{head}</button>'
        for index, head in places[:PLACES]
    )
    more = f'<span class="more">and {len(places) - PLACES} more</span>' if len(places) > PLACES else ""
    return f' <span class="chips">{chips}{more}</span>' if chips else ""
