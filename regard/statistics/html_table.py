"""`make_table`: statistics as an HTML table, which is how a notebook shows them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

COLUMNS = ("least", "median", "mean", "largest")


def summarize(values: Tensor) -> list[str]:
    """Return least, median, mean and largest of the finite values as text; "–" if there is none."""
    finite = values.detach().double().cpu().flatten()
    finite = finite[finite.isfinite()]
    if not finite.numel():
        return ["–"] * len(COLUMNS)
    return [f"{float(x):.4g}" for x in (finite.min(), finite.median(), finite.mean(), finite.max())]


def make_table(stats: Mapping[str, Tensor]) -> str:
    """Return one line per statistic: its name, and four numbers over all rows of queries."""
    head = "".join(f"<th>{name}</th>" for name in ("statistic", *COLUMNS))
    lines = "".join(
        f"<tr><td>{name}</td>{''.join(f'<td>{cell}</td>' for cell in summarize(values))}</tr>"
        for name, values in stats.items()
    )
    shape = next((" × ".join(map(str, values.shape)) for values in stats.values()), "0")
    return f"<table><caption>Statistics of {shape} rows</caption><tr>{head}</tr>{lines}</table>"
