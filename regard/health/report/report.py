"""What an examination found: `.heads`, `.findings`, `.unmeasured`, `.what_if`, `.how`; as HTML, JSON, PNG or text."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import regard
from regard.health.findings import Finding
from regard.health.measurement import norms, recorder
from regard.health.measurement.recorder import Layer
from regard.health.readings import histogram
from regard.health.readings.heads import HeadReading
from regard.health.report import files

THREE_DIMS = "called with (N, L, d), where heads cannot be told from sequences: all of them are read as one head"


@dataclass(frozen=True)
class WhatIfReading:
    """The heads as they would read under a change, and what would be found wrong with them."""

    heads: list[HeadReading]
    findings: list[Finding]
    refused: list[tuple[str, str]] = field(default_factory=list)  # (layer, why the change cannot be made there)

    def to_json(self) -> dict:
        return dict(
            heads=[head.to_json() for head in self.heads],
            findings=[finding.to_json() for finding in self.findings],
            refused=[list(pair) for pair in self.refused],
        )


@dataclass(frozen=True, repr=False)
class Report:
    """The result of `regard.examine`."""

    title: str
    heads: list[HeadReading]
    findings: list[Finding]
    unmeasured: list[tuple[str, str]]  # (layer, reason)
    what_if: dict[str, WhatIfReading]
    how: dict
    interrupted: str | None = None  # why the report does not cover everything that was asked

    def to_json(self) -> dict:
        """Plain numbers, lists and dicts, as regard/health/schema.json describes them."""
        return dict(
            title=self.title,
            heads=[head.to_json() for head in self.heads],
            findings=[finding.to_json() for finding in self.findings],
            unmeasured=[list(pair) for pair in self.unmeasured],
            what_if={name: reading.to_json() for name, reading in self.what_if.items()},
            how=self.how,
            interrupted=self.interrupted,
        )

    def save(self, path: str | os.PathLike) -> Path:
        """Write the report; the name's end says how: .html, .json or .png."""
        suffix = Path(path).suffix.lower()
        if suffix == ".json":
            return files.write(path, json.dumps(self.to_json(), ensure_ascii=False, indent=1, allow_nan=False) + "\n")
        if suffix in (".html", ".htm"):
            from regard.health.report.page import render

            return files.write(path, render(self))
        if suffix == ".png":
            from regard.health.report.figures import png

            return files.write(path, png(self))
        raise ValueError(f"path must end in .html, .json or .png, got {str(path)!r}")

    def show(self, file=None) -> None:
        """Print it: a table of layers, the findings and what remains unmeasured."""
        from regard.health.report.terminal import show

        show(self, file)

    def summary(self) -> list[str]:
        """The report in a few sentences."""
        return summarize(self)

    def __repr__(self) -> str:
        return f"<Report of {self.title}: {' '.join(self.summary())} .show() prints it, .save('report.html') draws it.>"


def summarize(report: Report) -> list[str]:
    layers = sorted({head.index for head in report.heads})
    said = ["Nothing was measured."]
    if report.heads:
        rows = {head.statistics.count("entropy") for head in report.heads}
        many = f"{counted(len(report.heads), 'head')} in {counted(len(layers), 'attention layer')}"
        least = f"{min(rows):,} to " if len(rows) > 1 else ""
        said = [f"{many}, measured on {least}{counted(max(rows), 'row')} each."]
    if report.findings:
        ill = {place for finding in report.findings for place in finding.places}
        where = sorted({index for index, _ in ill})
        spread = "" if len(layers) == 1 else " in every layer" if where == layers else f" in {_named(where)}"
        kinds = _listed(by_kind((finding.kind, len(finding.heads)) for finding in report.findings))
        measured = {(head.index, head.head) for head in report.heads}
        many = f"{len(ill)} of {counted(len(measured), 'head')}" if ill <= measured else counted(len(ill), "head")
        said.append(f"{many} {'has' if len(ill) == 1 else 'have'} findings{spread}: {kinds}.")
    elif report.heads:
        said.append(without_findings(report))
    if report.unmeasured:
        said.append(f"{counted(len(report.unmeasured), 'layer')} could not be measured; the reasons are given.")
    if report.interrupted:
        said.append(f"The examination did not finish: {report.interrupted}.")
    return said


def without_findings(report: Report) -> str:
    """What it means that nothing was found."""
    if not report.heads:
        return "Nothing was measured, so nothing was judged."
    few = sum(not head.can_be_judged for head in report.heads)
    if few == len(report.heads):
        return "No head has rows and keys enough to be judged; examine it on more, or longer, text."
    part = " that was measured" if report.unmeasured or report.interrupted else ""
    rest = f" {counted(few, 'head')} had too few rows or keys to be judged." if few else ""
    return f"No head{part} passed a threshold.{rest}"


def _named(layers: list[int]) -> str:
    shown = [str(layer) for layer in layers[:8]] + (["…"] if len(layers) > 8 else [])
    return f"layer{'' if len(layers) == 1 else 's'} {_listed(shown)}"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def by_kind(found: Iterable[tuple[str, int]]) -> list[str]:
    """Each kind with its heads, of (kind, heads) pairs: one kind may be several findings, as too large and too small.

    >>> from regard.health.report.report import by_kind
    >>> by_kind([("scale off", 12), ("dying gradient", 9), ("scale off", 4)])
    ['scale off (16)', 'dying gradient (9)']
    """
    total: Counter = Counter()
    for kind, heads in found:
        total[kind] += heads
    return [f"{kind} ({heads})" for kind, heads in total.items()]


def _firsts() -> str:
    """Which quantiles lie in a first bin."""
    told = dict(shares="mass", entropy_ratio="entropy_ratio", entropy="entropy", logit_variance="logit_variance")
    told["numbers of keys, distance"] = "distance"
    return ", ".join(f"{what} below {histogram.least(name):.2g}" for what, name in told.items())


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def how_measured(model: nn.Module, size: int, layers: Sequence[Layer], batches: int, seconds: float) -> dict:
    measured = [layer for layer in layers if layer.reading is not None]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    checked = (
        f"on {norms.SAMPLED_ROWS} rows of each call"
        if any(layer.sampled for layer in measured)
        else "on every counted row"
    )
    together = [layer.name for layer in measured if layer.together]
    folded = [layer.name or type(model).__name__ for layer in measured if layer.folded]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return dict(
        model=type(model).__name__,
        parameters=size,
        batches=batches,
        seconds=round(seconds, 3),
        device=f"{device.type}: {name}",
        dtypes=sorted({str(layer.dtype).removeprefix("torch.") for layer in measured}),
        paths=dict(Counter(layer.kind for layer in measured)),
        faithful=dict(
            checked=f"the output rebuilt from the measured weights against the model's own, {checked}",
            largest_relative_difference=max((layer.error for layer in measured), default=0.0),
            goes_on_with=f"the model's own output; beyond {recorder.WHOLE} queries the rebuilt one, if it agrees",
        ),
        counted="rows of padding queries and rows that see no key are left out",
        **({"used_too_often_to_be_layers_each": together} if together else {}),
        **({"three_dims": dict(layers=folded, means=THREE_DIMS)} if folded else {}),
        quantiles="from histograms of 512 fixed bins, within one bin's width; of those in the first, which reaches to "
        f"0, only that is known: {_firsts()}",
        versions=dict(regard=regard.__version__, torch=torch.__version__, python=platform.python_version()),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
