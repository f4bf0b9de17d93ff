"""`make_table`: statistics as an HTML table, which is how a notebook shows them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

COLUMNS = ("least", "median", "mean", "largest")
LEFT = "text-align: left; font-weight: normal"
RIGHT = "text-align: right; padding-left: 1.5em"


def summarize(values: Tensor) -> list[str]:
    """Return least, median, mean and largest of the finite values as text; "–" if there is none."""
    finite = values.detach().double().cpu().flatten()
    finite = finite[finite.isfinite()]
    if not finite.numel():
        return ["–"] * len(COLUMNS)
    return [f"{float(x):.4g}" for x in (finite.min(), finite.median(), finite.mean(), finite.max())]


def make_table(stats: Mapping[str, Tensor]) -> str:
    """Return one line per statistic: its name, and four numbers over all rows of queries."""
    rows = [("statistic", *COLUMNS), *((name, *summarize(values)) for name, values in stats.items())]
    lines = "".join(_make_row(*row) for row in rows)
    shape = next((" × ".join(map(str, values.shape)) for values in stats.values()), "0")
    return f"<table><caption>Statistics of {shape} rows</caption>{lines}</table>"


def _make_row(name: str, *cells: str) -> str:
    numbers = "".join(f"<td style='{RIGHT}'>{cell}</td>" for cell in cells)
    return f"<tr><th style='{LEFT}'>{name}</th>{numbers}</tr>"
