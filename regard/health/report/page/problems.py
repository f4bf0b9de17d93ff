"""The first part of a page: what is wrong, since which layer, what to do, what it would gain."""

from collections.abc import Sequence
from typing import Any

from regard.health import checks
from regard.health.checks.finding import Finding
from regard.health.report.glossary import link, link_words
from regard.health.report.page.document import escape
from regard.health.report.report import Report
from regard.health.report.summary import count_noun, describe_no_findings, find_unusual

CHIPS = 48  # heads of a finding


def checks_of(report: Report) -> dict[str, Any]:
    """What more forwards showed, as JSON: loss, what-ifs' losses, ablation, checks; empty if they were not made."""
    return {} if report.checks is None else report.checks.to_json()


def describe_where(report: Report, finding: Finding) -> str:
    """`since layer 2, in 12 of 48 heads (layers 2 to 5)`."""
    layers = sorted({index for index, _ in finding.places})
    known = sorted({head.index for head in report.heads} | set(layers))
    total = len({(head.index, head.head) for head in report.heads} | set(finding.places))
    heads = f"{len(set(finding.places))} of {count_noun(total, 'head')}"
    if len(known) == 1:
        return f"in {heads}"
    if layers == known:
        return f"in every layer, in {heads}"
    first = f"in layer {layers[0]} only" if len(layers) == 1 else f"since layer {layers[0]}"
    return f"{first}, in {heads}" + ("" if len(layers) == 1 else f" ({_list_layers(layers)})")


def _list_layers(layers: Sequence[int]) -> str:
    if list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    listed = ", ".join(map(str, layers[:8]))
    return f"layers {listed}{', …' if len(layers) > 8 else ''}"


def first_place(report: Report) -> tuple[int, int] | None:
    """The head to look at first: of the gravest finding, else the most unusual one; None if there is no head."""
    measured = {(head.index, head.head) for head in report.heads}
    for finding in report.findings:
        for place in sorted(finding.places):
            if place in measured:
                return place
    unusual = find_unusual(report.heads, 1)
    if unusual:
        return unusual[0].head.index, unusual[0].head.head
    return min(measured, default=None)


def make_problems(report: Report, folded: bool) -> str:
    """The section of findings, `folded` below causes, or what their absence means and the most unusual heads."""
    grave = [finding for finding in report.findings if finding.severity != "note"]
    notes = [finding for finding in report.findings if finding.severity == "note"]
    title = "What is wrong" if grave else "Worth knowing" if notes else "Nothing was found to be wrong"
    none = f'<p class="none">{escape(describe_no_findings(report))}</p>' if not report.findings else ""
    cards = "".join(_card(report, finding) for finding in grave)
    listed = "".join(_card(report, finding) for finding in notes)
    if listed and grave:
        title_of_notes = f"{count_noun(len(notes), 'note')}: facts worth knowing"
        listed = f'<details class="notes"><summary>{title_of_notes}</summary>{listed}</details>'
    unusual = "" if grave else _list_unusual(report)
    if folded:
        count = count_noun(len(report.findings), "finding")
        inner = f'<details class="about"><summary>Every finding in full: {count}</summary>{cards}{listed}</details>'
        return f'<section id="findings">{inner}</section>'
    return f'<section id="findings"><h2>{title}</h2>{none}{cards}{listed}{unusual}</section>'


def _list_unusual(report: Report) -> str:
    rows = "".join(
        f"<tr><th>{make_chips([(one.head.index, one.head.head)], [one.head.layer])}</th>"
        f"<td>{link_words(str(one))}</td></tr>"
        for one in find_unusual(report.heads)
    )
    if not rows:
        return ""
    return f"""<h3 id="unusual">The most unusual heads</h3>
<p class="meaning">They differ most from the model's other heads. That alone is no problem.</p>
<div class="scroll"><table class="text">{rows}</table></div>"""


def make_chips(places: Sequence[tuple[int, int]], layers: Sequence[str] = ()) -> str:
    """A button for each (layer index, head), 48 at most, that chooses the head; `layers` are shown on hover."""
    chips = "".join(
        f'<button type="button" class="chip" data-layer="{index}" data-head="{head}" title="{escape(layer)}">'
        f"{index}·{head}</button>"
        for (index, head), layer in zip(places[:CHIPS], layers or [""] * CHIPS, strict=False)
    )
    return chips + (f'<span class="more">and {len(places) - CHIPS} more</span>' if len(places) > CHIPS else "")


def _card(report: Report, finding: Finding) -> str:
    chips = make_chips(finding.places, [layer for layer, _ in finding.heads])
    return f"""<article class="card {finding.severity}">
<h3>{link(finding.kind)} <span class="pill {finding.severity}">{finding.severity}</span></h3>
<p>{link_words(finding.evidence)}</p>
<dl><dt>Where</dt><dd>{escape(describe_where(report, finding).capitalize())}.
<span class="chips"><span class="label">layer·head</span>{chips}</span></dd>
<dt>What to do</dt><dd>{link_words(finding.remedy)}</dd>
<dt>What it would gain</dt><dd>{_gain(report, finding)}</dd></dl>
<details><summary>Why?</summary><p>It is reported if: {link_words(finding.threshold)}.</p></details>
</article>"""


def _gain(report: Report, finding: Finding) -> str:
    """What the what-ifs that were tried do to a finding, and to the loss."""
    if not report.what_if:
        return "Not tried. Add a what-if to the examination, such as --what-if qk_norm, to see what it would change."
    losses = {} if report.checks is None else report.checks.what_if
    parts, own = [], set(finding.places)
    if not is_judged_again(finding.code):
        return "A change of the scores does not touch what this finding is about; it was not judged again under one."
    for name, reading in report.what_if.items():
        still = {place for one in reading.findings if one.kind == finding.kind for place in one.places}
        text = f"{name} ends it in {len(own - still)} of {count_noun(len(own), 'head')}"
        parts.append(f"{text}, {losses[name]}" if name in losses else text)
    known = "" if losses else " What it does to the loss was not measured."
    return f"On the same queries and keys, without training: {escape('; '.join(parts))}.{known}"


def is_judged_again(code: str) -> bool:
    """True if the finding is judged from the heads' statistics alone, which what-ifs measure anew."""
    return any(hasattr(module, "find") and code in {rule.code for rule in module.RULES} for module in checks.modules())
