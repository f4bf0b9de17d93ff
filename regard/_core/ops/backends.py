"""Imports a backend on first use."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch.autograd import forward_ad

ROWS = {"cpu": "regard._backends.cpu.rows.launch", "triton": "regard._backends.gpu.rows.launch"}
LOSSES = {"cpu": "regard._backends.cpu.losses", "triton": "regard._backends.gpu.losses.launch"}
ATTENTION = {"cpu": "regard._backends.cpu.attention.launch", "triton": "regard._backends.gpu.attention.launch"}


def backend_module(table: dict[str, str], backend: str) -> ModuleType:
    """Import the module of a backend; an ImportError names the package that it needs."""
    try:
        return importlib.import_module(table[backend])
    except ModuleNotFoundError as error:
        package = {"cpu": "numba", "triton": "triton"}[backend]
        if error.name is not None and error.name.split(".")[0] == package:
            raise ImportError(f"backend {backend!r} needs {package}: pip install {package}") from error
        raise


def default_device(backend: str) -> AbstractContextManager:
    """A context in which the CPU backend allocates its buffers on the CPU, whatever torch's default device is."""
    if backend != "cpu" or not _len_torch_function_stack():  # a default device is a mode on that stack
        return nullcontext()
    return torch.device("cpu")


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raise if a graph compiled outside of forward mode is called with tangents, which an op would lose."""
    given = () if forward_ad._current_level < 0 else (x for x in tensors if x is not None)
    if any(forward_ad.unpack_dual(x).tangent is not None for x in given):
        raise NotImplementedError("regard's fused ops carry no tangents; call what is not compiled, or torch.func.jvp")
