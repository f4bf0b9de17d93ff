"""`python -m bench accuracy`: |ours − float64| / size for every normaliser, statistic and dtype.

Weights are compared entry by entry, relative to the largest weight of their row; statistics relative to
|value| + `FLOOR`. Both start from the same rounded inputs as the float64 reference, so the error is that of the
arithmetic alone. The kinds of rows are those that break naive formulas: flat, nearly one-hot, a million keys.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import bench
import regard
from bench.measure import machine
from regard import normalizers, statistics
from regard.table import Table

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# the budget: a multiple of the dtype's eps for weights, a relative error for statistics
WEIGHTS = {torch.float64: 64.0, torch.float32: 16.0, torch.bfloat16: 1.0, torch.float16: 1.0}
STATISTICS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 1e-4, torch.float16: 1e-4}
LOOSE = {"entmax": 16.0}  # its power is computed through a logarithm
# statistics: exp(s) − 1 cancels for flat rows in the attention kernels; small weights amplify errors of logits
LOOSE_ON_A_GPU = {"softpick": 4.0, "entmax": 2.0, "entmax15": 2.0}
FLOOR = dict.fromkeys(statistics.NAMES, 1e-3) | dict(mean_logit=0.1, distance=1e-2, gradient_gain=1e-5)


@dataclass(frozen=True)
class Entry:
    """The largest and mean error of one quantity in one dtype over one kind of row, and the allowed error."""

    what: str
    kind: str
    dtype: str
    largest: float
    mean: float
    allowed: float
    which: str = ""  # of several quantities, the one with the largest error

    @property
    def is_within_budget(self) -> bool:
        """True if the largest error is allowed."""
        return self.largest <= self.allowed


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--quick", action="store_true", help="no rows of a million keys")
    bench.add_shared_arguments(parser)


def main(options: argparse.Namespace) -> int:
    """Measure and print the errors; return 1 if one is over budget."""
    device = bench.choose_device(options)
    entries = measure(device, options.quick)
    tables = [table(entries, names, title) for title, names in PARTS.items()]
    for part in tables:
        part.show()
    bench.write_page(options, "regard bench accuracy", machine(device), tables)
    broken = [entry for entry in entries if not entry.is_within_budget]
    for entry in broken:
        what = f"{entry.what} ({entry.which})" if entry.which else entry.what
        print(f"{what}, {entry.kind}, {entry.dtype}: {entry.largest:.2g} > {entry.allowed:.2g}", file=sys.stderr)
    return 1 if broken else 0


PARTS = {
    "Weights": tuple(normalizers.names()),
    "Statistics of softmax": statistics.NAMES,
    "Statistics of every normaliser: the worst of the fourteen": tuple(
        f"statistics of {x}" for x in normalizers.names()
    ),
}


def measure(
    device: str, quick: bool = False, dtypes: Sequence[torch.dtype] | None = None, names: Sequence[str] | None = None
) -> list[Entry]:
    """Measure every normaliser and statistic in every dtype over every kind of row."""
    dtypes = dtypes or (DTYPES if device == "cpu" else DTYPES[1:])
    kinds = [kind for kind in KINDS if not (quick and kind == "a million keys")]
    found = []
    for dtype in dtypes:
        for kind in kinds:
            for name in names or normalizers.names():
                found.append(_weights(name, kind, dtype, device))
                each = _statistics(name, kind, dtype, device)
                worst, mean = max(each, key=lambda entry: entry.largest), sum(entry.mean for entry in each) / len(each)
                found.append(replace(worst, what=f"statistics of {name}", mean=mean, which=worst.what))
                found += each if name == "softmax" else []
    return found


def scores(kind: str, device: str) -> Tensor:
    """Return scores (rows, n) of one kind in float64."""
    generator = torch.Generator().manual_seed(len(kind))
    rows, n, size = KINDS[kind]
    z = torch.randn(rows, n, generator=generator, dtype=torch.float64) * size
    if kind == "nearly one-hot":
        z[:, 3] = 12.0 + 2.0 * torch.arange(rows)
    return z.to(device)


KINDS = {  # rows, keys, size of the scores
    "normal": (64, 1024, 1.0),
    "sharp": (64, 1024, 30.0),
    "flat": (64, 1024, 1e-3),
    "nearly one-hot": (8, 1024, 1.0),
    "a million keys": (2, 1_000_000, 1.0),
}


def _weights(name: str, kind: str, dtype: torch.dtype, device: str) -> Entry:
    z = scores(kind, device).to(dtype)
    exact = regard.normalize(z.double(), name, backend="reference")
    size = exact.amax(-1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
    error = (regard.normalize(z, name).double() - exact).abs() / size
    allowed = WEIGHTS[dtype] * torch.finfo(dtype).eps
    if dtype.itemsize >= 4:
        allowed *= LOOSE.get(name, 1.0)
    if dtype == torch.float16 and kind == "a million keys":
        allowed = 1.0  # weights are below float16's smallest normal number
    return _entry(name, kind, dtype, error, allowed)


def _statistics(normalizer: str, kind: str, dtype: torch.dtype, device: str) -> list[Entry]:
    """Measure attention whose scores are the given rows: q holds one-hot queries into k's columns."""
    z = scores(kind, device).to(dtype)
    width = max(16, 1 << (z.shape[0] - 1).bit_length())
    q = torch.eye(z.shape[0], width, device=device, dtype=dtype)[None, None]
    k = torch.nn.functional.pad(z.T, (0, width - z.shape[0])).contiguous()[None, None]
    v = torch.randn(1, 1, z.shape[1], 16, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    options: dict[str, Any] = dict(scale=1.0, normalizer=normalizer, return_stats=True)
    ours = regard.attention(q, k, v, **options)[1]
    exact = regard.attention(q.double(), k.double(), v.double(), **options, backend="reference")[1]
    allowed, found = STATISTICS[dtype] * (LOOSE_ON_A_GPU.get(normalizer, 1.0) if device == "cuda" else 1.0), []
    for name in statistics.NAMES:
        error = (ours[name].double() - exact[name]).abs() / (exact[name].abs() + FLOOR[name])
        found.append(_entry(name, kind, dtype, error, allowed))
    return found


def _entry(what: str, kind: str, dtype: torch.dtype, error: Tensor, allowed: float) -> Entry:
    largest = float(error.max()) if bool(error.isfinite().all()) else math.inf
    return Entry(what, kind, str(dtype).removeprefix("torch."), largest, float(error.mean()), allowed)


def table(entries: list[Entry], names: tuple[str, ...], title: str) -> Table:
    """Return one line per quantity and dtype: largest (mean) error over each kind of row."""
    kinds = list(dict.fromkeys(entry.kind for entry in entries))
    lines = []
    for name in names:
        for dtype in dict.fromkeys(entry.dtype for entry in entries):
            mine = {entry.kind: entry for entry in entries if (entry.what, entry.dtype) == (name, dtype)}
            cells = [f"{mine[kind].largest:.1e} ({mine[kind].mean:.0e})" for kind in kinds]
            worst = max(mine.values(), key=lambda entry: entry.largest / entry.allowed)
            lines.append([name, dtype, *cells, f"{worst.allowed:.1e} {'✓' if worst.is_within_budget else '✗'}"])
    return Table(["", "dtype", *kinds, "allowed"], lines, title=title)
