"""Which module computes: imported on first use, so that a missing package costs one line and only when it is needed."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch
from torch import Tensor

ROWS = {
    "cpu": "regard._backends.cpu.rows.launch",
    "triton": "regard._backends.gpu.rows.launch",
    "series": "regard._core.ops.series_rows",
}
ATTENTION = {"cpu": "regard._backends.cpu.attention.launch", "triton": "regard._backends.gpu.attention.launch"}


def backend_module(table: dict[str, str], backend: str) -> ModuleType:
    try:
        return importlib.import_module(table[backend])
    except ModuleNotFoundError as error:
        package = {"cpu": "numba", "triton": "triton"}[backend]
        if error.name is not None and error.name.split(".")[0] == package:
            raise ImportError(f"backend {backend!r} needs {package}: pip install {package}") from error
        raise


def in_place(backend: str) -> AbstractContextManager:
    """Where a backend works: the CPU's makes its buffers there, whatever the default device is."""
    if backend != "cpu" or not torch._C._len_torch_function_stack():  # a default device is a mode there
        return nullcontext()
    return torch.device("cpu")


def refuse_tangents(*tensors: Tensor | None) -> None:
    """What a graph that was compiled outside of forward mode brings into it: an op would lose them in silence."""
    forward = torch.autograd.forward_ad
    given = () if forward._current_level < 0 else (x for x in tensors if x is not None)
    if any(forward.unpack_dual(x).tangent is not None for x in given):
        raise NotImplementedError("regard's fused ops carry no tangents; call what is not compiled, or torch.func.jvp")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and row states."""
    return torch.float64 if dtype == torch.float64 else torch.float32
