"""Writers of a monitor's rows: TensorBoard, Weights & Biases, a JSONL file, a function."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MEANS = ("entropy_ratio", "max_weight", "first_key_mass", "gain_ratio", "logit_variance")
VALUES = ("max_logit", *MEANS)  # the largest logit, and the means of the rest

Writer = Callable[[list[dict]], None]


def make_writer(log: Any) -> Writer:
    """A function that writes the rows of one layer to `log`, the argument of `regard.Monitor`."""
    if log is None:
        return lambda rows: None
    if isinstance(log, (str, os.PathLike)):
        return _write_jsonl(Path(log))
    if hasattr(log, "add_scalar"):
        return _write_tensorboard(log)
    if callable(getattr(log, "log", None)) and not isinstance(log, logging.Logger):
        return lambda rows: log.log(_scalars(rows), step=rows[0]["step"])
    if callable(log):
        return _write_to_function(log)
    raise TypeError(
        "log must have add_scalar, or a log method that takes a dict, or be a path or a function, "
        f"got {type(log).__name__}"
    )


def _write_to_function(log: Callable[[dict], object]) -> Writer:
    def write(rows: list[dict]) -> None:
        for row in rows:
            log(row)

    return write


def _scalars(rows: list[dict]) -> dict[str, float]:
    """The numbers by the names under which they are logged, NaN left out."""
    numbers = ((row, name) for row in rows for name in VALUES if not math.isnan(row[name]))
    return {f"attention/{row['layer']}/head{row['head']}/{name}": row[name] for row, name in numbers}


def _write_jsonl(path: Path) -> Writer:
    if not path.parent.is_dir():
        raise ValueError(f"log: there is no folder {str(path.parent)!r}; create it first")

    def write(rows: list[dict]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({name: _json_number(x) for name, x in row.items()}) + "\n" for row in rows)

    return write


def _json_number(x: Any) -> Any:
    """`x`, or None if it is NaN or infinite, which JSON lacks."""
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _write_tensorboard(log: Any) -> Writer:
    """Writes scalars per head and, if the writer can, a histogram over the heads of each layer."""

    def write(rows: list[dict]) -> None:
        layer, step = rows[0]["layer"], rows[0]["step"]
        for name, value in _scalars(rows).items():
            log.add_scalar(name, value, step)
        if hasattr(log, "add_histogram"):
            for name in VALUES:
                if finite := [row[name] for row in rows if math.isfinite(row[name])]:
                    log.add_histogram(f"attention/{layer}/{name}", torch.tensor(finite), step)

    return write
