"""`Report`, the result of `regard.examine`, and `WhatIfReading`, its part about one change."""

from __future__ import annotations

import datetime
import io
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import nn

import regard
from regard.health.checks import Finding, kinds
from regard.health.contract.diagnosis import Cause, diagnose
from regard.health.contract.run import Checks, LossChange, LossReading
from regard.health.contract.verdict import ContractError, count_from, describe
from regard.health.measure import histogram, norms, recorder
from regard.health.measure.heads import HeadReading
from regard.health.measure.recorder import Layer
from regard.health.report import files
from regard.health.report.summary import summarize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THREE_DIMS = "called with (N, L, d), which does not separate heads from sequences: measured as one head"
FIRST_BINS = {
    "shares": "mass", "entropy_ratio": "entropy_ratio", "entropy": "entropy", "logit_variance": "logit_variance",
    "numbers of keys, distance": "distance",
}  # fmt: skip


@dataclass(frozen=True)
class WhatIfReading:
    """The heads and findings under a change of the scores."""

    heads: list[HeadReading]
    findings: list[Finding]
    refused: list[tuple[str, str]] = field(default_factory=list)  # (layer, why the change is impossible there)
    loss: LossChange | None = None  # the effect on the model's loss, where every layer has the change

    def to_json(self) -> dict[str, Any]:
        return dict(
            heads=[head.to_json() for head in self.heads],
            findings=[finding.to_json() for finding in self.findings],
            refused=[list(pair) for pair in self.refused],
            **({} if self.loss is None else {"loss": self.loss.to_json()}),
        )


@dataclass(frozen=True, repr=False)
class Report:
    """The result of `regard.examine`: heads, findings, what could not be measured, what-ifs, and how it was done."""

    title: str
    heads: list[HeadReading]
    findings: list[Finding]
    unmeasured: list[tuple[str, str]]  # (layer, reason)
    what_if: dict[str, WhatIfReading]
    how: dict[str, Any]
    interrupted: str | None = None  # why the examination did not finish
    tokens: dict[str, Any] | None = None  # what each head looks at on a short text: see `look.to_json`
    checks: Checks | None = None  # what more forwards of the model showed; None if they were not made
    mixers: dict[str, Any] | None = None  # of a hybrid: the number of attention layers, and what was read of the others

    @classmethod
    def load(cls, path: str | os.PathLike) -> Report:
        """Read a report from the JSON file that `save` wrote.

        The file has no histograms: `.quantile` answers for 0.05, 0.5 and 0.95 only, and the page has no distributions.
        """
        from regard.health.report.saved import load_report

        return load_report(path)

    @property
    def loss(self) -> LossReading | None:
        """The model's loss on the examined text beside that of the text's frequencies; None if it is not known."""
        return None if self.checks is None else self.checks.loss

    @property
    def diagnosis(self) -> list[Cause]:
        """The findings grouped under their causes, gravest first."""
        return diagnose(self.findings)

    def raise_on(self, severity: str = "warning") -> Report:
        """Raises ContractError, an AssertionError, if a finding is of this severity or graver; else returns itself."""
        if count_from(self.findings, severity):
            raise ContractError("\n".join([describe(one) for one in self.findings if one.severity != "note"]))
        return self

    def with_checks(self, checks: Checks, findings: list[Finding]) -> Report:
        """Returns the report with the outcome of the checks, the ablation of each head and the loss of each what-if."""
        heads = self.heads
        if checks.ablation is not None:
            known = checks.ablation.heads
            heads = [replace(head, ablation=known.get((head.index, head.head), math.nan)) for head in heads]
        what_if = {name: replace(one, loss=checks.what_if.get(name)) for name, one in self.what_if.items()}
        return replace(self, heads=heads, findings=findings, what_if=what_if, checks=checks)

    @property
    def is_loaded(self) -> bool:
        """True if the report was read from a file, which has no histograms."""
        return any(head.reading is None for head in self.heads)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts, as regard/health/schema.json describes them."""
        return dict(
            title=self.title,
            heads=[head.to_json() for head in self.heads],
            findings=[finding.to_json() for finding in self.findings],
            diagnosis=[cause.to_json() for cause in self.diagnosis],
            unmeasured=[list(pair) for pair in self.unmeasured],
            what_if={name: reading.to_json() for name, reading in self.what_if.items()},
            how=self.how,
            interrupted=self.interrupted,
            **({} if self.tokens is None else {"tokens": self.tokens}),
            **({} if self.checks is None else {"checks": self.checks.to_json()}),
            **({} if self.mixers is None else {"mixers": self.mixers}),
        )

    def to_frame(self) -> Any:
        """A data frame (pandas, or polars if pandas is missing) with one row per head.

        Columns: `layer`, `index`, `head`, `findings` (kinds joined by ", "), `kind` (of head, if tokens were read),
        `rows`, `predicted_logit_variance`, and for each statistic its mean under its own name (`entropy_ratio`) and the
        rest with a suffix (`entropy_ratio_q95`).
        """
        try:
            from pandas import DataFrame
        except ModuleNotFoundError:
            try:
                from polars import DataFrame
            except ModuleNotFoundError:
                raise ImportError('to_frame needs pandas or polars: pip install "regard[frame]"') from None
        return DataFrame(head_rows(self))

    def plot(self, statistic: str = "entropy_ratio") -> Figure:
        """A matplotlib figure: the mean of `statistic` as a layer × head map, heads with findings ringed."""
        from regard.health.report.figures import plot

        return plot(self, statistic)

    def save(self, path: str | os.PathLike) -> Path:
        """Write the report as .html, .json or .png, by the suffix of `path`."""
        suffix = Path(path).suffix.lower()
        if suffix == ".json":
            return files.write(path, json.dumps(self.to_json(), ensure_ascii=False, indent=1, allow_nan=False) + "\n")
        if suffix in (".html", ".htm"):
            from regard.health.report.page.report_page import render

            return files.write(path, render(self))
        if suffix == ".png":
            from regard.health.report.figures import draw_png

            return files.write(path, draw_png(self))
        raise ValueError(f"path must end in .html, .json or .png, got {str(path)!r}")

    def show(self, file: TextIO | None = None, full: bool = False, page: str = "") -> None:
        """Print one screen: verdict, causes, what to do, a map; all there is if `full`. `page` is named at the end."""
        from regard.health.report import screen, terminal

        if full:
            terminal.show(self, file)
        else:
            screen.show_screen(self, file, page)

    def summary(self) -> list[str]:
        """The report in a few sentences."""
        return summarize(self)

    def __str__(self) -> str:
        """What `show` prints, as the command line does."""
        text = io.StringIO()
        self.show(text)
        return text.getvalue().strip("\n")

    def __repr__(self) -> str:
        return f"<Report of {self.title}: {' '.join(self.summary())} .show() prints it, .save('report.html') draws it.>"

    def _repr_html_(self) -> str:
        """The page in a sandboxed frame, as notebooks show it."""
        from regard.health.report.page.document import embed
        from regard.health.report.page.report_page import render

        return embed(render(self))


def head_rows(report: Report) -> list[dict[str, Any]]:
    """One dict per head: where it is, its findings, its kind on the short text, and every number of every statistic."""
    seen = {(one["index"], one["head"]): one for one in (report.tokens or {}).get("heads", ())}
    kinds: dict[tuple[int, int], list[str]] = {}
    for finding in report.findings:
        for place in finding.places:
            kinds.setdefault(place, []).append(finding.kind)
    rows = []
    for head in report.heads:
        data = head.to_json()
        row = {key: data[key] for key in ("layer", "index", "head")}
        row["findings"] = ", ".join(kinds.get((head.index, head.head), []))
        if seen:
            row["kind"] = seen.get((head.index, head.head), {}).get("kind")
        row |= {key: data.get(key) for key in ("rows", "ablation", "gate", "gate_near_zero") if key in data}
        row["predicted_logit_variance"] = data["predicted_logit_variance"]
        for name, spread in data["statistics"].items():
            row |= {name if key == "mean" else f"{name}_{key}": value for key, value in spread.items()}
        rows.append(row)
    return rows


def describe_measurement(
    model: nn.Module, parameters: int, layers: Sequence[Layer], batches: int, seconds: float,
    using: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:  # fmt: skip
    """How the numbers of a report were measured, as plain values."""
    measured = [layer for layer in layers if layer.reading is not None]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    sampled = any(layer.sampled for layer in measured)
    rows = f"on {norms.SAMPLED_ROWS} rows of each call" if sampled else "on every counted row"
    together = [layer.name for layer in measured if layer.together]
    three_dims = [layer.name or type(model).__name__ for layer in measured if layer.three_dims]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    edges = ", ".join(f"{what} below {histogram.least(name):.2g}" for what, name in FIRST_BINS.items())
    return dict(
        model=type(model).__name__,
        parameters=parameters,
        batches=batches,
        seconds=round(seconds, 3),
        device=f"{device.type}: {name}",
        dtypes=sorted({str(layer.dtype).removeprefix("torch.") for layer in measured}),
        paths=dict(Counter(layer.kind for layer in measured)),
        faithful=dict(
            checked=f"output rebuilt from the measured weights compared with the model's own, {rows}",
            largest_relative_difference=max((layer.error for layer in measured), default=0.0),
            goes_on_with=f"the model's own output; beyond {recorder.WHOLE} queries the rebuilt one, if it agrees",
        ),
        looked_for=kinds(runs=False),
        counted="rows of padding queries and rows without a visible key are not counted",
        **({"used_too_often_to_be_layers_each": together} if together else {}),
        **({"using": list(using)} if using else {}),
        **({"three_dims": dict(layers=three_dims, means=THREE_DIMS)} if three_dims else {}),
        quantiles="from histograms of 512 fixed bins, accurate to one bin width; a value in the first bin is only "
        f"known to be below its edge: {edges}",
        versions=dict(regard=regard.__version__, torch=torch.__version__, python=platform.python_version()),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )
