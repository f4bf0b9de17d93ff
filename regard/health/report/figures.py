"""The report as one picture: layer × head maps of the statistics that matter most."""

from __future__ import annotations

import io
import math

SHOWN = ("entropy_ratio", "max_weight", "first_key_mass", "gain_ratio", "distance", "max_logit")
UNIT = ("entropy_ratio", "max_weight", "first_key_mass", "gain_ratio")
LIGHT = 0.7  # of the range of colours: from here on a ring is black


def png(report, dpi: int = 150) -> bytes:
    """Six maps, the bytes of a PNG file; heads in a finding are ringed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError('PNG figures need matplotlib: pip install "regard[report]"') from error
    layers = sorted({head.index for head in report.heads})
    if not layers:
        raise ValueError("the report has no measured heads to draw")
    heads = 1 + max(head.head for head in report.heads)
    ill = {place for finding in report.findings for place in finding.places}
    high = min(max(1.6, 0.28 * len(layers)), 8.0)
    figure = Figure(figsize=(10, 2 * high + 1.6), layout="constrained")
    axes = figure.subplots(2, 3)
    for axis, name in zip(axes.flat, SHOWN, strict=True):
        grid = [[math.nan] * heads for _ in layers]
        for head in report.heads:
            grid[layers.index(head.index)][head.head] = head.statistics[name].mean
        most = max((x for row in grid for x in row if x == x), default=1.0)  # gains of sparse maps pass 1
        limits = dict(vmin=0, vmax=max(1.0, most)) if name in UNIT else {}
        image = axis.imshow(grid, aspect="auto", cmap="viridis", interpolation="nearest", **limits)
        for head in report.heads:
            if (head.index, head.head) in ill:
                edge = "black" if image.norm(head.statistics[name].mean) > LIGHT else "white"
                axis.plot(head.head, layers.index(head.index), "o", mfc="none", mec=edge, ms=4, mew=1)
        axis.set_title(name.replace("_", " "), fontsize=10)
        axis.set_xlabel("head", fontsize=8)
        axis.set_ylabel("layer", fontsize=8)
        axis.set_yticks(range(len(layers)), layers)
        axis.tick_params(labelsize=7)
        axis.yaxis.set_major_locator(_few(len(layers)))
        axis.xaxis.set_major_locator(_few(heads))
        figure.colorbar(image, ax=axis, shrink=0.85).ax.tick_params(labelsize=7)
    figure.suptitle(f"{report.title}: means per head", fontsize=12)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def _few(count: int):
    from matplotlib.ticker import MultipleLocator

    return MultipleLocator(max(1, math.ceil(count / 8)))
