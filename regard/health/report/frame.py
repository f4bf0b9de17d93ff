"""A report as a data frame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.health.report.report import Report


def make_frame(report: Report) -> Any:
    """A pandas or polars DataFrame of `head_rows`."""
    rows = head_rows(report)
    try:
        from pandas import DataFrame
    except ModuleNotFoundError:
        try:
            from polars import DataFrame
        except ModuleNotFoundError:
            raise ImportError('to_frame needs pandas or polars: pip install "regard[frame]"') from None
    return DataFrame(rows)


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
