"""The page of a report: text in the HTML, numbers as compressed JSON that page.js draws.

Everything that comes from a model is escaped here, or set as text there.
"""

from collections.abc import Sequence
from dataclasses import replace
from textwrap import shorten
from typing import Any, NamedTuple

from regard.health import checks as registry
from regard.health.checks.finding import Finding
from regard.health.measure.heads import HeadReading
from regard.health.report.glossary import link, link_words, make_glossary
from regard.health.report.page.causes import checks_of, list_causes, make_causes, make_problems
from regard.health.report.page.document import escape, make_document, pack
from regard.health.report.page.payload import make_payload
from regard.health.report.report import Report
from regard.health.report.screen import UNSURE, count_checks, list_unmade
from regard.health.report.summary import (
    ROOT,
    count_causes,
    count_kinds,
    describe_extent,
    describe_loss,
    describe_mixers,
    describe_no_findings,
    list_late,
    list_looked_for,
)
from regard.health.report.terminal import average
from regard.table import count_noun, format_number

SHOWN = ("entropy_ratio", "max_weight", "gain_ratio", "logit_variance", "max_logit")
VERDICTS = dict(
    critical="critical findings", warning="warnings", note="notes only", clean="no problem found",
    partly="no problem found where measured", unmeasured="not measured", unjudged="too little data to judge",
    late="checks ran out of time",
)  # fmt: skip
LIMIT = 2_500_000  # bytes of the packed numbers; beyond it detail is left out, never a head
PREVIEW = 160  # characters of the text
NAMES = 150  # characters of the names of skipped checks
LISTED = 200  # unmeasured layers
SAMPLE = 12  # heads from which the size of all is estimated


class Detail(NamedTuple):
    """How much of a report its page holds."""

    groups: int  # bars of a histogram; 0: no histograms and no curves
    digits: int
    changed: bool = True  # what-ifs per head
    spread: bool = True  # seven numbers per statistic, not only the mean

    def omissions(self) -> list[str]:
        return [
            *([] if self.groups else ["distributions and curves by position"]),
            *([] if self.spread else ["all numbers but the means"]),
            *([] if self.changed else ["what-ifs per head"]),
        ]


DETAILS = (Detail(48, 5), Detail(0, 4), Detail(0, 3, spread=False), Detail(0, 3, changed=False, spread=False))


def render(report: Report) -> str:
    numbers, detail = _pack_numbers(report)
    causes = make_causes(report, list_causes(report))
    parts = [
        _header(report), f'<div class="{"first" if causes else "alone"}">{causes}{_map(report, detail)}</div>',
        make_problems(report), _chosen(report, detail), _what_if(report), _checked(report), _how(report),
        make_glossary(),
    ]  # fmt: skip
    title = f"{report.title}: attention report"
    return make_document(title=title, scripts=("tokens.js", "page.js"), body="\n".join(parts), numbers=numbers)


def _pack_numbers(report: Report) -> tuple[str, Detail]:
    """The numbers in as much detail as fits; what a sample of heads shows to be far too large is not tried."""
    what_if = {name: replace(one, heads=one.heads[:SAMPLE]) for name, one in report.what_if.items()}
    sample = replace(report, heads=report.heads[:SAMPLE], what_if=what_if, tokens=None)
    factor = max(len(report.heads) / SAMPLE, 1.0)
    for detail in DETAILS[1 if report.is_loaded else 0 : -1]:
        if len(pack(make_payload(sample, *detail))) * factor <= 1.5 * LIMIT:
            numbers = pack(make_payload(report, *detail))
            if len(numbers) <= LIMIT:
                return numbers, detail
    return pack(make_payload(report, *DETAILS[-1])), DETAILS[-1]


def _header(report: Report) -> str:
    """The verdict, the loss with its interval, and how much was checked."""
    verdict = report.findings[0].severity if report.findings else _verdict_without_findings(report)
    stop = f'<p class="stop" role="alert">Incomplete: {escape(report.interrupted)}</p>' if report.interrupted else ""
    loss = describe_loss(report)
    cause = count_causes(report)
    said = f"<b>{link_words(f'{cause[:1].upper()}{cause[1:]}.' if cause else describe_no_findings(report))}</b>"
    said += link_words(f" {loss[:1].upper()}{loss[1:]}.") if loss else ""
    lines = [said, *map(link_words, describe_mixers(report)), *([] if cause else [UNSURE])]
    said = "".join(f"<p>{line}</p>" for line in lines)
    return f"""<header>
<p class="brand">regard · attention report</p>
<h1>{escape(report.title)} <span class="pill {verdict}">{VERDICTS[verdict]}</span></h1>
{stop}<div class="summary">{said}<p>{_describe_extent(report)}</p></div>
</header>"""


def _describe_extent(report: Report) -> str:
    """`Measured on the built-in sample. 21 checks made, 2 not: …`, with a link to the reasons."""
    source = escape(str(report.how.get("input", "the batches given to regard.examine")))
    names = shorten("; ".join(list_unmade(report)), NAMES, placeholder=" …")
    why = ' (<a href="#checked">why</a>)'
    return f"Measured on {source}. {escape(count_checks(report))}{f': {escape(names)}' if names else ''}{why}."


def _describe_text(report: Report) -> str:
    """The beginning of the text, and a remark if it is the built-in sample."""
    tokens = (report.tokens or {}).get("text") or []
    text = ("" if any("␣" in token for token in tokens) else " ").join(tokens)
    text = text.replace("␣", " ").replace(" ##", "").replace("⏎", " ").strip()
    named = bool(text) and not all(token.startswith("#") for token in tokens)
    begins = f"The text begins: <q>{escape(text[:PREVIEW])}{'…' if len(text) > PREVIEW else ''}</q>" if named else ""
    sample = "built-in sample" in str(report.how.get("input", ""))
    remark = "The sample comes with regard; heads may do other things on your text: pass it with --text." * sample
    return f'<p class="source">{begins} {remark}</p>'


def _verdict_without_findings(report: Report) -> str:
    """A key of VERDICTS; "clean" only if everything was measured and judged."""
    judged = [head.can_be_judged for head in report.heads]
    if not any(judged):
        return "unjudged" if judged else "unmeasured"
    if list_late(report):
        return "late"
    return "clean" if all(judged) and not (report.unmeasured or report.interrupted) else "partly"


def _map(report: Report, detail: Detail) -> str:
    """The right of the first screen: a map of layers and heads, and what the chosen head looks at."""
    if not report.heads:
        return ""
    omitted = ", ".join(detail.omissions())
    why = "The JSON file has no" if report.is_loaded and detail == DETAILS[1] else "Left out, for size:"
    note = f'<p class="meaning">{why} {omitted}.</p>' if omitted else ""
    return f"""<section id="explorer"><h2>Every layer and head</h2>
<div class="controls"><label>Statistic <select id="statistic"></select></label>
<fieldset id="treatment" class="switch"><legend>Scores</legend></fieldset></div>
<p id="meaning" class="meaning"></p>
<div class="beside"><div><div id="map" class="map"></div>
<div id="scale" class="scale"></div>{note}</div>
<div class="grow"><h3><a id="chosen" href="#explorer">A head</a></h3>
<div class="controls"><label>Layer <select id="layer"></select></label>
<label>Head <select id="head"></select></label></div>{_tokens(report)}</div></div>
<noscript><p>The maps need JavaScript; the numbers are in the JSON form of this report.</p></noscript>
</section>"""


def _chosen(report: Report, detail: Detail) -> str:
    """More of the chosen head: its largest weights, distributions and numbers."""
    if not report.heads:
        return ""
    weights = report.tokens is not None and "reason" not in report.tokens
    return f"""<section id="head-section"><h2 id="chosen-again">The chosen head</h2>
<div class="trio">{WEIGHTS if weights else ""}{CHARTS if detail.groups else ""}</div>
<details class="about" id="numbers-of-head"><summary>Its numbers</summary>
<div class="scroll" tabindex="0"><table id="numbers-table">
<caption class="hidden">Every statistic of the chosen head</caption>
</table></div></details>
</section>"""


def _tokens(report: Report) -> str:
    """The view of what a head looks at; tokens.js fills it."""
    if report.tokens is None or "reason" in report.tokens:
        why = (report.tokens or {}).get(
            "reason", "tokens are shown of batches that are token ids, with masks and labels of their shape or none"
        )
        return f'<p class="none">No tokens to show: {escape(why)}.</p>'
    return """<div id="tokens"><p id="head-kind"></p>
<p id="tokens-note" class="meaning" hidden>These weights are as measured, without the change.</p>
<p class="meaning">Colour: weight that a token receives. Choose one to see what it looks at.</p>
<div id="passage" class="passage"></div><p id="top-keys" class="meaning" aria-live="polite"></p></div>"""


WEIGHTS = """<figure><figcaption id="map-title"></figcaption>
<canvas id="weights" class="weights" role="img" aria-label="The largest weights"></canvas></figure>"""
CHARTS = """<figure><figcaption id="histogram-title"></figcaption><div id="histogram"></div></figure>
<figure><figcaption id="curve-title"></figcaption><div id="curve"></div></figure>"""


def _what_if(report: Report) -> str:
    if not report.what_if:
        return ""
    losses = {} if report.checks is None else report.checks.what_if
    own = f"{report.loss.mean:.3g}" if report.loss is not None else "–"
    rows = [_what_if_row("as measured", report.heads, report.findings, [], own)]
    rows += [
        _what_if_row(
            name,
            one.heads,
            one.findings,
            one.refused,
            f"{losses[name].loss:.3g}, {losses[name].word} ({losses[name].delta})" if name in losses else "–",
            "" if report.checks is None else str(report.checks.rounding.get(name, "")),
        )
        for name, one in report.what_if.items()
    ]
    columns = "".join(f"<th>{link(name.replace('_', ' '))}</th>" for name in SHOWN)
    return f"""<section id="what-if"><h2>What changes would do</h2>
<p class="meaning">Means over all heads, with the same queries and keys and changed scores, without training.</p>
<div class="scroll" tabindex="0"><table>
<thead><tr><th>scores</th><th class="words">{link("loss")}</th><th class="words">findings</th>{columns}</tr></thead>
<tbody>{"".join(rows)}</tbody>
</table></div>
</section>"""


def _what_if_row(
    name: str, heads: Sequence[HeadReading], findings: Sequence[Finding], refused: Sequence[tuple[str, str]], loss: str,
    rounding: str = "",
) -> str:  # fmt: skip
    cells = "".join(f"<td>{average(heads, statistic)}</td>" for statistic in SHOWN)
    text = ", ".join(count_kinds((finding.kind, len(finding.heads)) for finding in findings)) or "none"
    if rounding:
        text += f"; {rounding}"
    if refused:
        text += f"; not possible in {count_noun(len(refused), 'layer')}: {refused[0][1]}"
    words = "".join(f'<td class="words">{escape(part)}</td>' for part in (loss, text))
    return f"<tr><th>{escape(name)}</th>{words}{cells}</tr>"


def _checked(report: Report) -> str:
    """What was checked, and what was not: layers that could not be measured, checks that were not made."""
    found = {finding.kind for finding in report.findings}
    passed = [kind for kind in list_looked_for(report) if kind not in found]
    checks = checks_of(report)
    true = registry.passed(checks.get("done", ()), found)
    done = f"<p>Also true: {escape('; '.join(true))}.</p>" if true else ""
    gaps = [(name or ROOT, reason) for name, reason in report.unmeasured[:LISTED]]
    if len(report.unmeasured) > LISTED:
        gaps.append((f"{len(report.unmeasured) - LISTED} more layers", "listed in the JSON form of this report"))
    gaps += [(name, reason) for name, reason in checks.get("skipped", ())]
    if not checks:
        gaps.append(("the model's loss", "whether a head or a change matters to it was not measured"))
    few = sum(not head.can_be_judged for head in report.heads)
    if few:
        gaps.append((count_noun(few, "head"), "too few rows or keys to be judged"))
    grouped: dict[str, list[str]] = {}
    for name, reason in gaps:
        grouped.setdefault(reason, []).append(name)
    rows = "".join(
        f"<tr><th>{escape('; '.join(names))}</th><td>{escape(why)}</td></tr>" for why, names in grouped.items()
    )
    unsure = f"<p>{UNSURE}</p>" if count_causes(report) else ""  # else the header has it
    return f"""<section id="checked"><h2>What was checked, and what was not</h2>
{unsure}
<details class="about"><summary>Passed: {count_noun(len(passed) + len(true), "check")}</summary>
<p>Looked for and not found in the measured layers: {", ".join(map(link, passed)) or "nothing"}.</p>{done}</details>
<details class="about" open><summary>Not checked: {len(gaps)}, with the reasons</summary>
<div class="scroll" tabindex="0"><table class="text" id="unmeasured">{rows}</table></div></details></section>"""


def _how(report: Report) -> str:
    rows = "".join(
        f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(_plain(value))}</dd>"
        for key, value in report.how.items()
        if key != "looked_for"
    )
    extent = f"<p>{escape(describe_extent(report))}</p>{_describe_text(report)}"
    return f"""<section id="how"><h2>How it was measured</h2>
<details class="about"><summary>Text, model, device, precision</summary>{extent}<dl>{rows}</dl></details></section>"""


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key.replace('_', ' ')}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return format_number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
