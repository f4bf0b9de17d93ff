"""Which module computes: imported on first use, so that a missing package costs one line and only when it is needed."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

ROWS = {"cpu": "regard.cpu.rows", "triton": "regard.kernels.rows", "series": "regard._ops.series_rows"}
ATTENTION = {"cpu": "regard.cpu.attention", "triton": "regard.kernels.attention"}


def backend_module(table: dict[str, str], backend: str) -> ModuleType:
    try:
        return importlib.import_module(table[backend])
    except ModuleNotFoundError as error:
        package = {"cpu": "numba", "triton": "triton"}[backend]
        if error.name is not None and error.name.split(".")[0] == package:
            raise ImportError(f"backend {backend!r} needs {package}: pip install {package}") from error
        raise


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and row states."""
    return torch.float64 if dtype == torch.float64 else torch.float32
