"""Where a monitor's numbers go: TensorBoard, Weights & Biases, a JSONL file, a function."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

MEANS = ("entropy_ratio", "max_weight", "first_key_mass", "gain_ratio", "logit_variance")
VALUES = ("max_logit", *MEANS)  # the largest logit, and the means of the rest

Writer = Callable[[list[dict]], None]


def writer(log) -> Writer:
    """The writer for what `regard.Monitor(log=…)` was given."""
    if log is None:
        return lambda rows: None
    if isinstance(log, (str, os.PathLike)):
        return _jsonl(Path(log))
    if hasattr(log, "add_scalar"):
        return _tensorboard(log)
    if callable(getattr(log, "log", None)) and not isinstance(log, logging.Logger):
        return lambda rows: log.log(_named(rows), step=rows[0]["step"])
    if callable(log):
        return _function(log)
    wanted = "have add_scalar, or a log that takes a dict, or be a path or a function"
    raise TypeError(f"log must {wanted}, got {type(log).__name__}")


def _function(log: Callable[[dict], object]) -> Writer:
    def write(rows: list[dict]) -> None:
        for row in rows:
            log(row)

    return write


def _named(rows: list[dict]) -> dict[str, float]:
    told = ((row, name) for row in rows for name in VALUES if not math.isnan(row[name]))
    return {f"attention/{row['layer']}/head{row['head']}/{name}": row[name] for row, name in told}


def _jsonl(path: Path) -> Writer:
    if not path.parent.is_dir():
        raise ValueError(f"log: there is no folder {str(path.parent)!r}; make it first")

    def write(rows: list[dict]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({name: _finite(x) for name, x in row.items()}) + "\n" for row in rows)

    return write


def _finite(x):
    """As JSON has it: it knows neither NaN nor infinity."""
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _tensorboard(log) -> Writer:
    """Scalars per head and, where the writer can, a histogram over the heads of each layer."""

    def write(rows: list[dict]) -> None:
        layer, step = rows[0]["layer"], rows[0]["step"]
        for name, value in _named(rows).items():
            log.add_scalar(name, value, step)
        if hasattr(log, "add_histogram"):
            for name in VALUES:
                if there := [row[name] for row in rows if math.isfinite(row[name])]:
                    log.add_histogram(f"attention/{layer}/{name}", torch.tensor(there), step)

    return write
