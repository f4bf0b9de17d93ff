"""The report as one HTML file that needs nothing else: no network, no dependency, the same size for any length.

Words stand in the HTML itself; numbers travel as compressed JSON and are drawn by page.js. Whatever comes from a model
is escaped here or set as text there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from regard.health.report.page.data import ITSELF, payload
from regard.health.report.page.document import document, escaped, packed
from regard.health.report.report import by_kind, counted, without_findings

SHOWN = ("entropy_ratio", "max_weight", "gain_ratio", "logit_variance", "max_logit")
WORDS = dict(
    critical="in trouble",
    warning="needs a look",
    note="fine, with notes",
    healthy="healthy",
    partly="healthy where measured",
    unmeasured="not measured",
    unjudged="too little to judge by",
)
LIMIT = 2_500_000  # bytes of the packed numbers; detail is dropped beyond, never a head
LISTED = 200  # layers that were not measured, told one by one
SAMPLE = 16  # heads by which the size of all is foretold


class Detail(NamedTuple):
    """How much of a report goes into its page."""

    bins: int  # of a histogram; 0: no histograms and no curves
    digits: int
    changed: bool = True  # what-ifs head by head, not in the table alone
    spread: bool = True  # seven numbers of each statistic, not the mean alone

    def left_out(self) -> list[str]:
        return [
            *([] if self.bins else ["distributions and curves by position"]),
            *([] if self.spread else ["all numbers but the means"]),
            *([] if self.changed else ["what-ifs head by head"]),
        ]


DETAILS = (
    Detail(48, 5),
    Detail(24, 4),
    Detail(0, 4),
    Detail(0, 3),
    Detail(0, 3, spread=False),
    Detail(0, 3, changed=False, spread=False),
)


def render(report) -> str:
    numbers, detail = _packed(report)
    parts = [
        _header(report),
        _findings(report),
        _explorer(report, detail),
        _what_if(report, detail),
        _unmeasured(report),
        _how(report),
    ]
    title = f"{report.title}: attention under examination"
    return document(title=title, script="page.js", body="\n".join(parts), numbers=numbers)


def _packed(report) -> tuple[str, Detail]:
    """The numbers in as much detail as fits; what is sure not to fit is not tried."""
    few = replace(
        report,
        heads=report.heads[:SAMPLE],
        what_if={name: replace(one, heads=one.heads[:SAMPLE]) for name, one in report.what_if.items()},
    )
    more = max(len(report.heads) / SAMPLE, 1.0)
    for detail in DETAILS[:-1]:
        if len(packed(payload(few, *detail))) * more <= 1.5 * LIMIT:
            numbers = packed(payload(report, *detail))
            if len(numbers) <= LIMIT:
                return numbers, detail
    return packed(payload(report, *DETAILS[-1])), DETAILS[-1]


def _header(report) -> str:
    lines = "".join(f"<p>{escaped(line)}</p>" for line in report.summary())
    worst = report.findings[0].severity if report.findings else _standing(report)
    stop = f'<p class="stop" role="alert">Incomplete: {escaped(report.interrupted)}</p>' if report.interrupted else ""
    word = WORDS[worst]
    return f"""<header>
<p class="brand">regard · attention report</p>
<h1>{escaped(report.title)} <span class="pill {worst}">{word}</span></h1>
{stop}<div class="summary">{lines}</div>
</header>"""


def _standing(report) -> str:
    """What to call a model without findings: healthy only if all of it was measured and judged."""
    judged = [head.can_be_judged for head in report.heads]
    if not any(judged):
        return "unjudged" if judged else "unmeasured"
    return "healthy" if all(judged) and not (report.unmeasured or report.interrupted) else "partly"


def _findings(report) -> str:
    if not report.findings:
        cards = f'<p class="none">{without_findings(report)}</p>'
    else:
        cards = "".join(map(_card, report.findings))
    return f'<section id="findings"><h2>Findings</h2>{cards}</section>'


def _card(finding) -> str:
    shown = "".join(
        f'<button type="button" class="chip" data-layer="{index}" data-head="{head}" title="{escaped(layer)}">'
        f"{index}·{head}</button>"
        for index, (layer, head) in zip(finding.indices[:48], finding.heads[:48], strict=True)
    )
    more = f'<span class="more">and {len(finding.heads) - 48} more</span>' if len(finding.heads) > 48 else ""
    return f"""<article class="card {finding.severity}">
<h3>{escaped(finding.kind)} <span class="pill {finding.severity}">{finding.severity}</span></h3>
<p>{escaped(finding.evidence)}</p>
<p class="chips"><span class="label">layer·head</span>{shown}{more}</p>
<dl><dt>Threshold</dt><dd>{escaped(finding.threshold)}</dd><dt>Remedy</dt><dd>{escaped(finding.remedy)}</dd></dl>
</article>"""


def _explorer(report, detail: Detail) -> str:
    if not report.heads:
        return ""
    lost = detail.left_out()
    note = f'<p class="meaning">Left out for so many heads: {", ".join(lost)}. The JSON form has the numbers.</p>'
    return f"""<section id="explorer"><h2>Layer × head</h2>
{note if lost else ""}<div class="controls">
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
<div class="pair">
<figure><figcaption id="histogram-title"></figcaption><div id="histogram"></div></figure>
<figure><figcaption id="curve-title"></figcaption><div id="curve"></div></figure>
</div>
<div class="scroll"><table id="numbers-table">
<caption class="hidden">Every statistic of the chosen head</caption>
</table></div>
<noscript><p>The maps need JavaScript; the numbers are in the JSON form of this report.</p></noscript>
</section>"""


def _what_if(report, detail: Detail) -> str:
    if not report.what_if:
        return ""
    choose = "Choose a row under “Scores” above to see it head by head." if detail.changed else ""
    rows = [_what_if_row("as measured", report.heads, report.findings, [])]
    rows += [_what_if_row(name, one.heads, one.findings, one.refused) for name, one in report.what_if.items()]
    columns = "".join(f"<th>{escaped(name.replace('_', ' '))}</th>" for name in SHOWN)
    return f"""<section id="what-if"><h2>What if</h2>
<p class="meaning">The same queries and keys, their scores treated otherwise: means over all heads.
{choose}</p>
<div class="scroll"><table>
<thead><tr><th>scores</th>{columns}<th>findings</th></tr></thead>
<tbody>{"".join(rows)}</tbody>
</table></div>
</section>"""


def _what_if_row(name: str, heads, findings, refused) -> str:
    cells = []
    for statistic in SHOWN:
        values = [head.statistics[statistic].mean for head in heads]
        values = [value for value in values if value == value]
        cells.append(f"<td>{sum(values) / len(values):.3g}</td>" if values else "<td>–</td>")
    said = ", ".join(by_kind((finding.kind, len(finding.heads)) for finding in findings)) or "none"
    if refused:
        said += f"; not possible in {counted(len(refused), 'layer')}: {refused[0][1]}"
    return f"<tr><th>{escaped(name)}</th>{''.join(cells)}<td>{escaped(said)}</td></tr>"


def _unmeasured(report) -> str:
    if not report.unmeasured:
        return ""
    pairs = [(escaped(name or ITSELF), escaped(reason)) for name, reason in report.unmeasured[:LISTED]]
    if len(report.unmeasured) > LISTED:
        pairs.append((f"{len(report.unmeasured) - LISTED} layers more", "told in the JSON form of this report"))
    rows = "".join(f"<tr><th>{name}</th><td>{reason}</td></tr>" for name, reason in pairs)
    return f'<section id="unmeasured"><h2>Not measured</h2><div class="scroll"><table>{rows}</table></div></section>'


def _how(report) -> str:
    def told(value) -> str:
        if isinstance(value, dict):
            return "; ".join(f"{key.replace('_', ' ')}: {told(item)}" for key, item in value.items())
        if isinstance(value, list):
            return ", ".join(map(str, value))
        if isinstance(value, float):
            return f"{value:.3g}"
        return f"{value:,}" if isinstance(value, int) else str(value)

    rows = "".join(f"<dt>{escaped(key)}</dt><dd>{escaped(told(value))}</dd>" for key, value in report.how.items())
    return f'<section id="how"><h2>How it was measured</h2><dl>{rows}</dl></section>'
