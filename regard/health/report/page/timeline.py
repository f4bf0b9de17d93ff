"""The timeline page of monitors' JSONL files: a row per incident, curves over training, a map of layers over samples.

Several runs are drawn over each other, each with its colour and dashes; the maps are those of the first.

One HTML file without script and without network; the curves are SVG.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from regard.health.checks.finding import LOGIT_LIMIT
from regard.health.report.files import read_text
from regard.health.report.page.document import escape, make_document
from regard.health.watching.incidents import ORDER, group_of
from regard.table import count_noun

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 660, 210, 68, 12, 14, 32
COLUMNS = 160  # of a map, at most; more samples are put together
STYLE = """
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1.2rem; }
@media (max-width: 30rem) { .grid { grid-template-columns: 1fr; } }
.limit { stroke: var(--critical); stroke-dasharray: 5 4; } .alarm { stroke: var(--tone); stroke-width: 1.5; }
.point, .cool { fill: var(--accent); } .hot { fill: var(--critical); } .gap { fill: var(--line); }
td, th { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }
td { white-space: normal; } td:first-child { font-variant-numeric: tabular-nums; }
.run1 { stroke: #d1495b; stroke-dasharray: 7 3; } .run2 { stroke: #2a9d8f; stroke-dasharray: 2 3; }
.run3 { stroke: #b5838d; stroke-dasharray: 9 3 2 3; } .key { display: inline-block; width: 2.2rem; height: .7rem; }
.grid svg text { font-size: 17px; }
@media (max-width: 44rem) {
  .map svg { width: 48rem; max-width: none; } .incidents thead { display: none; }
  .incidents tr { display: block; border-bottom: 1px solid var(--line); padding: .3rem 0; }
  .incidents td { display: block; border: 0; padding: 0; }
  .incidents td::before { content: attr(data-name) " "; color: var(--soft); }
}
"""


@dataclass(frozen=True)
class Curve:
    """One chart: the series that it shows, its title in words, and its vertical scale."""

    series: str
    title: str
    is_log: bool = False
    limit: float | None = None
    fraction: bool = False  # drawn from 0 to 1


CURVES = (
    Curve("loss", "Loss, as the training passed it in"),
    Curve("max_logit", "Largest logit of any head; beyond 100 training is at risk", is_log=True, limit=LOGIT_LIMIT),
    Curve("entropy_ratio_min", "Entropy ratio of the sharpest head (1: uniform rows, 0: one key each)", fraction=True),
    Curve("entropy_ratio_mean", "Entropy ratio, mean over heads", fraction=True),
    Curve("gradient_gain", "Gradient that passes through the softmax, mean over heads (0: none)", fraction=True),
    Curve("sink_rate", "Share of heads with more than 0.3 of their mass on the first key", fraction=True),
    Curve("q_norm", "Mean norm of queries", is_log=True),
    Curve("k_norm", "Mean norm of keys", is_log=True),
    Curve("v_norm", "Mean norm of values", is_log=True),
)


@dataclass
class Log:
    """What a monitor wrote: a dict per sample and per alarm."""

    samples: list[dict] = field(default_factory=list)
    alarms: list[dict] = field(default_factory=list)  # every change of an incident

    def incidents(self) -> list[dict]:
        """Returns one dict per incident: the first line of it, with its gravest severity, its last text and its end."""
        found: dict[tuple[str, str], dict] = {}
        for alarm in self.alarms:
            heads = alarm.get("heads") or [[""]]
            key = alarm.get("cause") or alarm["alarm"], group_of(str(heads[0][0]))
            one = found.setdefault(key, {**alarm, "alarm": key[0], "until": None})
            one["text"] = alarm["text"]
            one["action"] = alarm.get("action") or one.get("action", "")
            if alarm.get("event") == "resolved":
                one["until"] = alarm["step"]
                continue
            one["until"] = None
            one["severity"] = max(one["severity"], alarm["severity"], key=_gravity)
        return list(found.values())

    def series(self, name: str) -> list[tuple[int, float]]:
        """Returns (step, value) of a series, without missing values."""
        found = ((sample["step"], sample.get(f"attention/{name}")) for sample in self.samples)
        return [(step, value) for step, value in found if value is not None]

    def layers(self) -> list[str]:
        """Returns the names of the layers' series, in order."""
        names = {name.split("/")[1] for sample in self.samples for name in sample if name.count("/") == 2}
        return sorted(names, key=lambda name: int(name.rpartition("_")[2]))


def read_log(path: str | Path) -> Log:
    """Reads the JSONL file that `regard.Monitor(log=path)` wrote; raises ValueError where it is none."""
    log = Log()
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            row = json.loads(line)
            row["step"] + 0
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{str(path)!r}, line {number} is not of a monitor's log: {line[:60]!r}") from None
        if "alarm" in row:
            log.alarms.append(row)
        elif "attention/max_logit" in row:
            log.samples.append(row)
    if not log.samples:
        raise ValueError(f"{str(path)!r} has no samples; write it with regard.Monitor(model, log={str(path)!r})")
    return log


def render(logs: Mapping[str, Log], title: str) -> str:
    """Returns the page of one run, or of several over each other, by name."""
    first = next(iter(logs.values()))
    summaries = "".join(f"<p>{escape(_summarize(name, log, len(logs) > 1))}</p>" for name, log in logs.items())
    curves = [_draw_curve(logs, curve) for curve in CURVES if any(log.series(curve.series) for log in logs.values())]
    body = f"""<header><p class="brand">regard · attention during training</p><h1>{escape(title)}</h1>
<div class="summary">{summaries}</div>{_draw_key(logs)}</header>
{"".join(_list_incidents(name if len(logs) > 1 else "", log) for name, log in logs.items())}
<h2>Over the model</h2><p class="meaning">A vertical line is where an incident opened.</p>
<div class="grid">{"".join(curves)}</div>
{_draw_map(first, "max_logit", "Largest logit per layer; red beyond 100", _heat_of_logit)}
{_draw_map(first, "entropy_ratio_min", "Entropy ratio of each layer's sharpest head; red below 0.02", _heat_of_ratio)}
"""
    return make_document(title, body, style=STYLE)


def _gravity(severity: str) -> int:
    return ORDER.index(severity) if severity in ORDER else 0


def _summarize(name: str, log: Log, is_named: bool) -> str:
    steps = [sample["step"] for sample in log.samples]
    serious = [one for one in log.incidents() if one["severity"] != "note"]
    first = f"First incident at step {serious[0]['step']}: {serious[0]['text']}." if serious else "No incident."
    many = f"{count_noun(len(steps), 'sample')} from step {steps[0]} to step {steps[-1]}"
    counted = f"{many}, {count_noun(len(serious), 'incident')}."
    return f"{name + ': ' if is_named else ''}{first} {counted}"


def _draw_key(logs: Mapping[str, Log]) -> str:
    if len(logs) < 2:
        return ""
    marks = "".join(
        f'<span><svg class="key" viewBox="0 0 35 10"><line class="line {_style_of(at)}" x1="0" x2="35" y1="5" y2="5"/>'
        f"</svg> {escape(name)} </span>"
        for at, name in enumerate(logs)
    )
    return f"<p>{marks}</p>"


def _style_of(run: int) -> str:
    return "" if run == 0 else f"run{(run - 1) % 3 + 1}"


def _list_incidents(name: str, log: Log) -> str:
    incidents = log.incidents()
    if not incidents:
        return ""
    names = ("opened", "resolved", "severity", "cause", "what was seen", "what to do")
    rows = ""
    for one in incidents:
        severity = escape(one["severity"])
        cells = (
            one["step"], "open" if one["until"] is None else one["until"],
            f'<span class="pill {severity}">{severity}</span>', *(escape(one[x]) for x in ("alarm", "text", "action")),
        )  # fmt: skip
        told = "".join(f'<td data-name="{x}">{cell}</td>' for x, cell in zip(names, cells, strict=True))
        rows += f'<tr class="{severity}">{told}</tr>'
    head = "".join(f"<th>{x}</th>" for x in names)
    title = f"Incidents of {escape(name)}" if name else "Incidents"
    table = f'<table class="incidents"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<h2>{title}</h2><div class="scroll">{table}</div>'


def _draw_curve(logs: Mapping[str, Log], curve: Curve) -> str:
    runs = {at: log.series(curve.series) for at, log in enumerate(logs.values())}
    every = [sample["step"] for log in logs.values() for sample in log.samples]
    first, last = min(every), max(every)
    values = [value for points in runs.values() for _, value in points]
    values += [curve.limit] if curve.limit is not None else []
    low, high = (0.0, 1.0) if curve.fraction else (min(values), max(values))
    if curve.is_log:
        low, high = max(min(low, high / 10.0), high * 1e-6, 1e-3), max(high * 1.2, 1e-2)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / max(last - first, 1)

    def y(value: float) -> float:
        share = (value - low) / max(high - low, 1e-12)
        if curve.is_log:
            share = math.log(max(value, low) / low) / math.log(high / low)
        return TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - min(max(share, 0.0), 1.0))

    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
             f'<text x="{LEFT - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{v:.3g}</text>'
             for v in _ticks(low, high, curve.is_log)]  # fmt: skip
    parts += [
        f'<text x="{x(step):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">step {step}</text>'
        for step, anchor in ((first, "start"), (last, "end"))
    ]
    if curve.limit is not None:
        at = f"{y(curve.limit):.1f}"
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
    parts += [
        f'<line class="alarm {escape(one["severity"])}" x1="{x(one["step"]):.1f}" x2="{x(one["step"]):.1f}" '
        f'y1="{TOP}" y2="{HEIGHT - BOTTOM}"><title>step {one["step"]}: {escape(one["text"])}</title></line>'
        for log in logs.values()
        for one in log.incidents()
        if one["severity"] != "note"
    ]
    for run, points in runs.items():
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        parts.append(f'<polyline class="line {_style_of(run)}" points="{path}"/>')
        if len(points) == 1:
            parts.append(f'<circle class="point" cx="{x(points[0][0]):.1f}" cy="{y(points[0][1]):.1f}" r="3"/>')
    ends = ", ".join(f"{points[-1][1]:.3g}" for points in runs.values() if points)
    return f"""<figure><figcaption>{escape(curve.title)}: <strong>{ends}</strong> at the end</figcaption>
<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(curve.title)}">{"".join(parts)}</svg></figure>"""


def _ticks(low: float, high: float, is_log: bool) -> list[float]:
    """Returns a few round values between two numbers."""
    if is_log:
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        return [10.0**power for power in powers][-5:]
    return [low, (low + high) / 2, high]


def _heat_of_logit(value: float) -> tuple[str, float]:
    """Returns the class and opacity of a cell."""
    share = math.log1p(max(value, 0.0)) / math.log1p(LOGIT_LIMIT)
    return ("hot" if value > LOGIT_LIMIT else "cool"), min(1.0, max(0.05, share))


def _heat_of_ratio(value: float) -> tuple[str, float]:
    return ("hot" if value < 0.02 else "cool"), min(1.0, max(0.05, 1.0 - value))


def _draw_map(log: Log, series: str, title: str, heat: Callable[[float], tuple[str, float]]) -> str:
    """Draws one series of every layer, a row each, over the samples."""
    layers = [layer for layer in log.layers() if log.series(f"{layer}/{series}")]
    if len(layers) < 2:
        return ""
    size = math.ceil(len(log.samples) / COLUMNS)
    groups = [log.samples[at : at + size] for at in range(0, len(log.samples), size)]
    cell, row, left = (WIDTH * 1.5 - 80) / len(groups), max(8, min(18, 360 // len(layers))), 70
    worst = max if series == "max_logit" else min
    parts = []
    for at, layer in enumerate(layers):
        if row >= 12 or at % 4 == 0:
            parts.append(f'<text x="{left - 6}" y="{at * row + row - 3}" text-anchor="end">{escape(layer)}</text>')
        for column, samples in enumerate(groups):
            values = (sample.get(f"attention/{layer}/{series}") for sample in samples)
            numbers = [value for value in values if value is not None]
            name, opacity = heat(worst(numbers)) if numbers else ("gap", 1.0)
            tip = f"{layer}, step {samples[0]['step']}: " + (f"{worst(numbers):.3g}" if numbers else "not finite")
            parts.append(
                f'<rect class="{name}" fill-opacity="{opacity:.2f}" x="{left + column * cell:.1f}" y="{at * row}" '
                f'width="{cell:.1f}" height="{row - 1}"><title>{escape(tip)}</title></rect>'
            )
    end = len(layers) * row + 14
    for column in sorted({0, len(groups) // 2, len(groups) - 1}):
        parts.append(f'<text x="{left + column * cell:.1f}" y="{end}">{groups[column][0]["step"]}</text>')
    box = f"0 0 {left + len(groups) * cell + 40:.0f} {end + 6}"
    drawn = f'<svg viewBox="{box}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f"""<h2>{escape(title)}</h2><p class="meaning">A column per sample, by step.</p>
<div class="map" tabindex="0">{drawn}</div>"""
