"""The page of a report: text in the HTML, numbers as compressed JSON that page.js draws.

Everything that comes from a model is escaped here, or set as text there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.health.report.page.document import escape, make_document, pack
from regard.health.report.page.payload import make_payload
from regard.health.report.summary import ROOT, count_kinds, count_noun, describe_no_findings
from regard.health.report.terminal import average

if TYPE_CHECKING:
    from regard.health.findings import Finding
    from regard.health.readings.heads import HeadReading
    from regard.health.report.report import Report

SHOWN = ("entropy_ratio", "max_weight", "gain_ratio", "logit_variance", "max_logit")
VERDICTS = dict(
    critical="critical findings",
    warning="warnings",
    note="notes only",
    clean="no problem found",
    partly="no problem found where measured",
    loaded="no findings",
    unmeasured="not measured",
    unjudged="too little data to judge",
)
LIMIT = 2_500_000  # bytes of the packed numbers; beyond it detail is left out, never a head
CHIPS = 48  # heads of a finding
LISTED = 200  # unmeasured layers
SAMPLE = 16  # heads from which the size of all is estimated


class Detail(NamedTuple):
    """How much of a report its page holds."""

    groups: int  # bars of a histogram; 0: no histograms and no curves
    digits: int
    changed: bool = True  # what-ifs per head
    spread: bool = True  # seven numbers per statistic, not only the mean

    def omissions(self) -> list[str]:
        """What the page lacks."""
        return [
            *([] if self.groups else ["distributions and curves by position"]),
            *([] if self.spread else ["all numbers but the means"]),
            *([] if self.changed else ["what-ifs per head"]),
        ]


DETAILS = (
    Detail(48, 5),
    Detail(0, 4),
    Detail(0, 3, spread=False),
    Detail(0, 3, changed=False, spread=False),
)


def render(report: Report) -> str:
    """The HTML of a report."""
    numbers, detail = _pack_numbers(report)
    parts = [
        _header(report),
        _findings(report),
        _explorer(report, detail),
        _what_if(report, detail),
        _unmeasured(report),
        _how(report),
    ]
    title = f"{report.title}: attention report"
    return make_document(title=title, script="page.js", body="\n".join(parts), numbers=numbers)


def _pack_numbers(report: Report) -> tuple[str, Detail]:
    """The numbers in as much detail as fits; what a sample of heads shows to be far too large is not tried."""
    what_if = {name: replace(one, heads=one.heads[:SAMPLE]) for name, one in report.what_if.items()}
    sample = replace(report, heads=report.heads[:SAMPLE], what_if=what_if)
    factor = max(len(report.heads) / SAMPLE, 1.0)
    for detail in DETAILS[1 if report.is_loaded else 0 : -1]:
        if len(pack(make_payload(sample, *detail))) * factor <= 1.5 * LIMIT:
            numbers = pack(make_payload(report, *detail))
            if len(numbers) <= LIMIT:
                return numbers, detail
    return pack(make_payload(report, *DETAILS[-1])), DETAILS[-1]


def _header(report: Report) -> str:
    lines = "".join(f"<p>{escape(line)}</p>" for line in report.summary())
    verdict = report.findings[0].severity if report.findings else _verdict_without_findings(report)
    stop = f'<p class="stop" role="alert">Incomplete: {escape(report.interrupted)}</p>' if report.interrupted else ""
    return f"""<header>
<p class="brand">regard · attention report</p>
<h1>{escape(report.title)} <span class="pill {verdict}">{VERDICTS[verdict]}</span></h1>
{stop}<div class="summary">{lines}</div>
</header>"""


def _verdict_without_findings(report: Report) -> str:
    """A key of VERDICTS; "clean" only if everything was measured and judged."""
    judged = [head.can_be_judged for head in report.heads]
    if not any(judged):
        return "unjudged" if judged else "unmeasured"
    if report.is_loaded:
        return "loaded"
    return "clean" if all(judged) and not (report.unmeasured or report.interrupted) else "partly"


def _findings(report: Report) -> str:
    none = "" if report.findings else f'<p class="none">{describe_no_findings(report)}</p>'
    return f'<section id="findings"><h2>Findings</h2>{none}{"".join(map(_card, report.findings))}</section>'


def _card(finding: Finding) -> str:
    chips = "".join(
        f'<button type="button" class="chip" data-layer="{index}" data-head="{head}" title="{escape(layer)}">'
        f"{index}·{head}</button>"
        for index, (layer, head) in zip(finding.indices[:CHIPS], finding.heads[:CHIPS], strict=True)
    )
    more = f'<span class="more">and {len(finding.heads) - CHIPS} more</span>' if len(finding.heads) > CHIPS else ""
    return f"""<article class="card {finding.severity}">
<h3>{escape(finding.kind)} <span class="pill {finding.severity}">{finding.severity}</span></h3>
<p>{escape(finding.evidence)}</p>
<p class="chips"><span class="label">layer·head</span>{chips}{more}</p>
<dl><dt>Remedy</dt><dd>{escape(finding.remedy)}</dd><dt>Threshold</dt><dd>{escape(finding.threshold)}</dd></dl>
</article>"""


def _explorer(report: Report, detail: Detail) -> str:
    if not report.heads:
        return ""
    omitted = ", ".join(detail.omissions())
    why = "The JSON file has no" if report.is_loaded and detail == DETAILS[1] else "Left out, for size:"
    note = f'<p class="meaning">{why} {omitted}.</p>' if omitted else ""
    return f"""<section id="explorer"><h2>Layer × head</h2>
{note}<div class="controls">
<label>Statistic <select id="statistic"></select></label>
<label>Scores <select id="treatment"></select></label>
<label>Layer <select id="layer"></select></label>
<label>Head <select id="head"></select></label>
</div>
<p id="meaning" class="meaning"></p>
<div id="map" class="map"></div>
<div id="scale" class="scale" aria-hidden="true"></div>
<div id="gallery" class="gallery"></div>
<h2 id="chosen">A head</h2>
{CHARTS if detail.groups else ""}<div class="scroll"><table id="numbers-table">
<caption class="hidden">Every statistic of the chosen head</caption>
</table></div>
<noscript><p>The maps need JavaScript; the numbers are in the JSON form of this report.</p></noscript>
</section>"""


CHARTS = """<div class="pair">
<figure><figcaption id="histogram-title"></figcaption><div id="histogram"></div></figure>
<figure><figcaption id="curve-title"></figcaption><div id="curve"></div></figure>
</div>
"""


def _what_if(report: Report, detail: Detail) -> str:
    if not report.what_if:
        return ""
    hint = "Choose one under “Scores” above to see it per head." if detail.changed else ""
    rows = [_what_if_row("as measured", report.heads, report.findings, [])]
    rows += [_what_if_row(name, one.heads, one.findings, one.refused) for name, one in report.what_if.items()]
    columns = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in SHOWN)
    return f"""<section id="what-if"><h2>What if</h2>
<p class="meaning">Means over all heads, with the same queries and keys and changed scores. {hint}</p>
<div class="scroll"><table>
<thead><tr><th>scores</th>{columns}<th>findings</th></tr></thead>
<tbody>{"".join(rows)}</tbody>
</table></div>
</section>"""


def _what_if_row(
    name: str, heads: Sequence[HeadReading], findings: Sequence[Finding], refused: Sequence[tuple[str, str]]
) -> str:
    cells = "".join(f"<td>{average(heads, statistic)}</td>" for statistic in SHOWN)
    text = ", ".join(count_kinds((finding.kind, len(finding.heads)) for finding in findings)) or "none"
    if refused:
        text += f"; not possible in {count_noun(len(refused), 'layer')}: {refused[0][1]}"
    return f"<tr><th>{escape(name)}</th>{cells}<td>{escape(text)}</td></tr>"


def _unmeasured(report: Report) -> str:
    if not report.unmeasured:
        return ""
    pairs = [(escape(name or ROOT), escape(reason)) for name, reason in report.unmeasured[:LISTED]]
    if len(report.unmeasured) > LISTED:
        pairs.append((f"{len(report.unmeasured) - LISTED} more layers", "listed in the JSON form of this report"))
    rows = "".join(f"<tr><th>{name}</th><td>{reason}</td></tr>" for name, reason in pairs)
    return f'<section id="unmeasured"><h2>Not measured</h2><div class="scroll"><table>{rows}</table></div></section>'


def _how(report: Report) -> str:
    rows = "".join(
        f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(_plain(value))}</dd>" for key, value in report.how.items()
    )
    return f'<section id="how"><h2>How it was measured</h2><dl>{rows}</dl></section>'


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key.replace('_', ' ')}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
