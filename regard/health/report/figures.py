"""Layer × head maps of a report, drawn by matplotlib."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from regard.health.measure.histogram import NAMES
from regard.health.report.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = ("entropy_ratio", "max_weight", "first_key_mass", "gain_ratio", "distance", "max_logit")
FRACTIONS = ("entropy_ratio", "max_weight", "first_key_mass", "gain_ratio")
LIGHT = 0.7  # of the colour range: rings are black from here on


def plot(report: Report, statistic: str) -> Figure:
    """A figure with one map: the mean of `statistic` per layer and head."""
    if statistic not in NAMES:
        raise ValueError(f"statistic must be one of {', '.join(NAMES)}, got {statistic!r}")
    figure = _make_figure(report, 6.0, _map_height(report) + 1.0)
    axes = figure.subplots()
    _draw_map(figure, axes, report, statistic)
    axes.set_title(f"mean {axes.get_title()}{'; ○ heads with findings' if report.findings else ''}", fontsize=10)
    figure.suptitle(report.title, fontsize=11)
    return figure


def draw_png(report: Report, dpi: int = 150) -> bytes:
    """Six maps as the bytes of a PNG file."""
    figure = _make_figure(report, 10.0, 2 * _map_height(report) + 1.6)
    for axes, name in zip(figure.subplots(2, 3).flat, SHOWN, strict=True):
        _draw_map(figure, axes, report, name)
    figure.suptitle(f"{report.title}: means per head", fontsize=12)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def _make_figure(report: Report, width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError('figures need matplotlib: pip install "regard[report]"') from error
    if not report.heads:
        raise ValueError("the report has no measured heads to draw")
    return Figure(figsize=(width, height), layout="constrained")


def _map_height(report: Report) -> float:
    return min(max(1.6, 0.28 * len({head.index for head in report.heads})), 8.0)


def _draw_map(figure: Figure, axes: Axes, report: Report, name: str) -> None:
    """A map of the mean of one statistic; heads with findings are ringed."""
    from matplotlib.ticker import MultipleLocator

    layers = sorted({head.index for head in report.heads})
    rows = {index: row for row, index in enumerate(layers)}
    width = 1 + max(head.head for head in report.heads)
    grid = [[math.nan] * width for _ in layers]
    for head in report.heads:
        grid[rows[head.index]][head.head] = head.statistics.mean(name)
    largest = max((x for row in grid for x in row if x == x), default=1.0)  # gains of sparse normalisers exceed 1
    smallest = min((x for row in grid for x in row if x == x), default=0.0)
    low, high = (0.0, max(1.0, largest)) if name in FRACTIONS else (smallest, largest)
    image = axes.imshow(grid, aspect="auto", cmap="viridis", interpolation="nearest", vmin=low, vmax=high)
    for index, column in {place for finding in report.findings for place in finding.places}:
        value = grid[rows[index]][column] if index in rows else math.nan
        if value == value:
            edge = "black" if value - low > LIGHT * (high - low) else "white"
            axes.plot(column, rows[index], "o", mfc="none", mec=edge, ms=4, mew=1)
    axes.set_title(name.replace("_", " "), fontsize=10)
    axes.set_xlabel("head", fontsize=8)
    axes.set_ylabel("layer", fontsize=8)
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.tick_params(labelsize=7)
    axes.yaxis.set_major_locator(MultipleLocator(max(1, math.ceil(len(layers) / 8))))
    axes.xaxis.set_major_locator(MultipleLocator(max(1, math.ceil(width / 8))))
    figure.colorbar(image, ax=axes, shrink=0.85).ax.tick_params(labelsize=7)
