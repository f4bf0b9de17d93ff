"""regard replay run.regard: which tokens made the largest logit, since when, and what would have bounded it."""

import argparse
import math
from pathlib import Path
from typing import Any

import torch

from regard.health.commands.files import report_failure
from regard.health.watching.black_box import read_black_box
from regard.table import format_number

TOP = 5  # keys that are shown
GROWN = 2.0  # a logit of half the last one is not yet "large"
CLIP, TEMPERATURE = 100.0, 2.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="run.regard", help="what regard.Monitor(model, black_box=…) wrote")


def main(options: argparse.Namespace) -> int:
    try:
        content = read_black_box(options.file)
    except (ValueError, OSError) as error:
        return report_failure("replay", error, None)
    print("\n".join(describe(content)))
    return 0


def describe(content: dict[str, Any]) -> list[str]:
    """Returns the lines that `regard replay` prints."""
    lines = [f"{one['severity'].upper():8} step {one['opened']}: {one['cause']}: {one['text']}"
             for one in content["incidents"]]  # fmt: skip
    if not content["samples"]:
        return [*lines, "no samples"]
    groups: dict[str, list[tuple[int, dict]]] = {}
    for sample in content["samples"]:
        for row in sample["rows"]:
            groups.setdefault(row["layer"].translate(str.maketrans("", "", "0123456789")), []).append(
                (sample["step"], row)
            )
    for rows in groups.values():
        lines += ["", *_describe_group(rows)]
    return lines


def _describe_group(rows: list[tuple[int, dict]]) -> list[str]:
    step, row = max(rows, key=lambda pair: (_top(pair[1]), pair[0]))
    lines = [f"{row['layer']}, head {row['head']}, step {step}: largest logit {format_number(_top(row))}"]
    small = [at for at, other in rows if at < step and _top(other) < _top(row) / GROWN]
    if small:
        before = [(at, other) for at, other in rows if at <= step][-8:]
        told = ", ".join(f"{at}: {format_number(_top(other))}" for at, other in before)
        lines.append(f"  since: half as large at step {small[-1]}; samples: {told}")
    if not row["logits"]:
        return [*lines, "  no visible key"]
    lines.append(f"  query {_name(row, 'query', None)}, norm {format_number(row['q_norm'])}; {row['visible']} keys")
    weights = _weights(row["logits"], row["rest"])
    for at in range(min(TOP, len(row["keys"]))):
        lines.append(f"    key {_name(row, 'key', at)}: logit {format_number(row['logits'][at])}, weight "
                     f"{weights[at]:.3f}, norm {format_number(row['k_norms'][at])}")  # fmt: skip
    return [*lines, "  what would have become of it:", *("    " + text for text in _what_if(row))]


def _what_if(row: dict) -> list[str]:
    """Returns a line for each remedy: the largest logit and the largest weight with it."""
    logits, top = row["logits"], _top(row)
    cosine = [s / max(row["scale"] * row["q_norm"] * norm, 1e-30)
              for s, norm in zip(logits, row["k_norms"], strict=True)]  # fmt: skip
    normed = [c * row["scale"] * row["width"] for c in cosine]
    factor = min(1.0, CLIP / top) if top > 0 else 1.0
    rest = row["rest"]
    eps = torch.finfo(getattr(torch, row["dtype"], torch.float32)).eps
    lines = [
        f"as it was          logit {format_number(top)}, largest weight {_weights(logits, rest)[0]:.3f}",
        f"QK-norm            logit {format_number(max(normed))}, largest weight at most "
        f"{max(_weights(normed, None)):.3f}",
        f"clip at {CLIP:g}        logit {format_number(top * factor)}, largest weight "
        f"{_weights([factor * s for s in logits], None if rest is None else factor * rest)[0]:.3f}",
        f"temperature {TEMPERATURE:g}      logit {format_number(top / TEMPERATURE)}, largest weight "
        f"{_weights([s / TEMPERATURE for s in logits], None if rest is None else rest / TEMPERATURE)[0]:.3f}",
    ]
    if eps > 1e-6:
        step = format_number(eps * abs(top))
        lines.append(f"float32            the same; {row['dtype']} rounds a logit of this size to steps of {step}")
    return lines


def _top(row: dict) -> float:
    top = max(row["logits"], default=-math.inf)
    return math.inf if top != top else top


def _weights(logits: list[float], rest: float | None) -> list[float]:
    """Returns the softmax over the row, whose other keys sum to exp(rest)."""
    high = max([*logits, -math.inf if rest is None else rest])
    if not math.isfinite(high):
        return [math.nan] * len(logits)
    total = sum(math.exp(s - high) for s in logits) + (0.0 if rest is None else math.exp(rest - high))
    return [math.exp(s - high) / total for s in logits]


def _name(row: dict, which: str, at: int | None) -> str:
    """Returns "17 'the'", "17 (token 464)" or "17"."""
    place = row["query"] if at is None else row["keys"][at]
    for name, show in ((f"{which}_text", repr), (f"{which}_token", lambda x: f"(token {x})")):
        value = row.get(name if at is None else f"{name}s")
        if value is not None:
            return f"{place} {show(value if at is None else value[at])}"
    return str(place)
