"""Checks each argument of a row function by itself."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from regard._facts import has_numba, readable
from regard.normalizers import Parameter

LARGEST = 1e20  # a temperature, or its inverse


def check_scores(scores: Tensor, name: str = "scores") -> None:
    if not isinstance(scores, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(scores).__name__}")
    check_dense(scores, name)
    if not is_float(scores):
        raise TypeError(
            f"{name} must be float64, float32, bfloat16 or float16, got {scores.dtype}; convert with .float()"
        )


def check_dense(x: Tensor, name: str) -> None:
    if x.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested one; convert with .to_padded_tensor(-math.inf)")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}; convert with .to_dense()")


def fits(shape: Sequence[int], full: Sequence[int]) -> bool:
    """True if a tensor of `shape` broadcasts to `full`."""
    pairs = zip(reversed(shape), reversed(full), strict=False)
    return len(shape) <= len(full) and all(own == 1 or own == size for own, size in pairs)


def is_float(x: Tensor) -> bool:
    """True for float64, float32, bfloat16 and float16; not for float8, in which torch only stores."""
    return x.is_floating_point() and x.dtype.itemsize > 1


def check_flag(value: bool, name: str) -> bool:
    if not isinstance(value, (int, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}")
    return bool(value)


def check_dim(scores: Tensor, dim: int) -> int:
    rank = max(scores.ndim, 1)
    try:
        axis = operator.index(dim)
    except TypeError:
        raise TypeError(f"dim must be an int, got {type(dim).__name__}") from None
    if isinstance(dim, bool) or not -rank <= axis < rank:
        raise ValueError(f"dim must be an int in [{-rank}, {rank - 1}] for scores of {scores.ndim} dims, got {dim!r}")
    return axis % rank


def check_temperature(temperature: float | Tensor) -> float | Tensor:
    """A float ≥ 0 (inf allowed), or a tensor, whose values are checked where that costs no device sync."""
    if isinstance(temperature, Tensor):
        check_dense(temperature, "temperature")
        if not is_float(temperature):
            raise TypeError(f"temperature must be a number or a tensor of float16 or wider, got {temperature.dtype}")
        if readable(temperature) and not bool((temperature.detach() >= 0).all()):
            raise ValueError("temperature must be ≥ 0 and not NaN; the tensor has negative or NaN entries")
        return temperature
    if isinstance(temperature, bool) or not isinstance(temperature, numbers.Real):
        raise TypeError(f"temperature must be a number or a tensor, got {type(temperature).__name__}")
    if not temperature >= 0:
        raise ValueError(f"temperature must be ≥ 0 and not NaN, got {temperature!r}")
    if temperature not in (0.0, math.inf) and not 1.0 / LARGEST <= temperature <= LARGEST:
        raise ValueError(
            f"temperature must be 0, inf or between {1.0 / LARGEST:g} and {LARGEST:g}, got {temperature!r}"
        )
    return float(temperature)


def check_device(x: Tensor, name: str, scores: Tensor) -> None:
    if x.device != scores.device:
        raise ValueError(f"{name} must be on the scores' device {scores.device}, got {x.device}; move it with .to()")


def is_autocast(x: Tensor) -> bool:
    """True if autocast is on for the device of x. (`torch.amp.is_autocast_available` breaks graphs of torch 2.11.)"""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def under_autocast(scores: Tensor) -> Tensor:
    """Cast scores to the dtype that torch's softmax takes where autocast is on."""
    if is_autocast(scores):
        return scores.to(torch.softmax(scores.new_empty((1,)), 0).dtype)
    return scores


def check_mask(mask: Tensor, shape: torch.Size) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a bool tensor (True = visible), got {kind}; write e.g. mask != 0")
    check_dense(mask, "mask")
    try:
        return mask.expand(shape)
    except RuntimeError:
        raise ValueError(f"mask must broadcast to the scores' shape {tuple(shape)}, got {tuple(mask.shape)}") from None


def check_theta(theta: Tensor, parameter: Parameter) -> Tensor:
    name, low, high = parameter.name, parameter.low, parameter.high
    check_dense(theta, name)
    if not is_float(theta):
        raise TypeError(f"{name} must be a number or a tensor of float16 or wider, got {theta.dtype}")
    if readable(theta) and not bool(((theta.detach() >= low) & (theta.detach() <= high)).all()):
        raise ValueError(f"{name} must lie in [{low:g}, {high:g}]; the tensor has other entries")
    return theta


def column_of(x: Tensor, name: str, shape: torch.Size, dim: int) -> Tensor:
    """Expand a per-row tensor to size 1 in `dim` and move `dim` last."""
    want = [*shape]
    want[dim] = 1
    try:
        return x.expand(want).movedim(dim, -1)
    except RuntimeError:
        raise ValueError(
            f"{name} must broadcast to {tuple(want)} (the scores' shape with size 1 in dim {dim}), got {tuple(x.shape)}"
        ) from None


def choose_rows_backend(device: torch.device, backend: str | None) -> str:
    if backend is None:
        return "triton" if device.type == "cuda" else "cpu" if has_numba() else "reference"
    if backend not in ("cpu", "triton", "reference"):
        raise ValueError(f"backend must be 'cpu', 'triton' or 'reference' for rows, got {backend!r}")
    if backend == "cpu" and device.type != "cpu":
        raise ValueError(f"backend 'cpu' needs tensors on the CPU, got {device}; move them or use 'triton'")
    return backend
