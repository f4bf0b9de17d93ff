"""Rows on the CPU: p = normaliser(scale · s), and ds = scale·(a·dp − b·δ) with δ = Σ c·dp, each row in one go.

>>> import torch
>>> from regard import normalizers
>>> from regard._backends.cpu.rows import launch as rows
>>> s = torch.tensor([[-2.0, 0.0, 0.5]])
>>> p, state = rows.forward(s, normalizers.get("sparsemax"))
>>> p
tensor([[0.0000, 0.2500, 0.7500]])
>>> rows.backward(torch.tensor([[0.0, 1.0, 0.0]]), p, state, normalizers.get("sparsemax"))[:, 1:]
tensor([[ 0.5000, -0.5000]])
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from regard._backends.cpu.jit.compile import kernel
from regard._backends.cpu.rows import pointwise as rows_pointwise
from regard._backends.cpu.rows import ratio as rows_ratio
from regard._backends.cpu.rows import threshold as rows_threshold
from regard._backends.cpu.rows.row_io import storage_tiles
from regard._backends.cpu.threads import over_rows
from regard.normalizers import Choice, Normalizer

SCRATCH, PADDING, LEAST = 4, 32, 2048  # rows of working space per thread; room behind each for whole vectors
_HALF = (torch.bfloat16, torch.float16)
_NO_MASK = torch.empty(0, dtype=torch.bool, device="cpu").numpy()
_FAMILIES = {"pointwise": rows_pointwise, "ratio": rows_ratio, "threshold": rows_threshold}


def forward(s: Tensor, choice: Choice, theta: Tensor | None = None, mask: Tensor | None = None, scale: float = 1.0):
    """(p, state): p [R, N] in s's dtype, state [2, R] = (shift, z) as `regard._core.problem.Forward` says.

    s: [R, N], float64, float32, bfloat16 or float16; the 16-bit types are computed in float32.
    theta: one parameter per row, [R]; None takes the choice's own. mask: bool [R, N], any strides, True = visible.
    """
    p = torch.empty_like(s, memory_format=torch.contiguous_format)
    state = torch.zeros((2, s.shape[0]), dtype=_accumulator(s))
    if s.numel():
        run = _kernel(choice.normalizer, "forward", s.dtype)
        hidden = _mask(mask, s)
        numbers = _theta(choice, theta, state)
        arrays = _array(s), _array(p), _array(state)
        _run(run, *s.shape, state.dtype, *arrays, *numbers, *hidden, scale)
    return p, state


def backward(
    dp: Tensor,
    saved: Tensor,
    state: Tensor,
    choice: Choice,
    theta: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """ds = scale·(a·dp − b·δ), [R, N]; saved is p where the choice has `slope_of_weight`, else s."""
    ds = torch.empty_like(saved, memory_format=torch.contiguous_format)
    if ds.numel():
        known = "of_scores" if choice.slope_of_weight is None else "of_weights"
        run = _kernel(choice.normalizer, f"backward_{known}", saved.dtype)
        hidden = _mask(mask, saved)
        numbers = _theta(choice, theta, state)
        arrays = _array(dp.to(saved.dtype)), _array(saved), _array(ds), _array(state)
        _run(run, *ds.shape, state.dtype, *arrays, *numbers, *hidden, scale)
    return ds


def _run(compiled: Callable, rows: int, columns: int, dtype: torch.dtype, *arguments) -> None:
    def work(first: int, last: int) -> None:
        scratch = torch.empty((SCRATCH, max(columns + PADDING, LEAST)), dtype=dtype).numpy()
        compiled(*arguments, scratch, first, last)

    over_rows(work, rows, columns)


@functools.cache
def _kernel(normalizer: Normalizer, job: str, dtype: torch.dtype) -> Callable:
    family = _FAMILIES[normalizer.family]
    precision = "float64" if dtype == torch.float64 else "float32"
    tiles = {**family.tiles(normalizer, dtype), **storage_tiles(dtype), "index": f"index_{precision}"}
    tiles["lanes"] = 8 if precision == "float64" else 16
    return kernel(getattr(family, job), tiles, precision, allocates=False)


def _accumulator(s: Tensor) -> torch.dtype:
    return torch.float64 if s.dtype == torch.float64 else torch.float32


def _array(x: Tensor):
    x = x.detach().contiguous()
    return (x.view(torch.int16) if x.dtype in _HALF else x).numpy()


def _theta(choice: Choice, theta: Tensor | None, state: Tensor):
    """(numbers, step): row i has numbers[i·step]."""
    if theta is not None:
        return _array(theta.to(state.dtype)), 1
    return _number(choice.theta or 0.0, state.dtype), 0


@functools.lru_cache(maxsize=256)
def _number(value: float, dtype: torch.dtype):
    return _array(torch.tensor([value], dtype=dtype))


def _mask(mask: Tensor | None, s: Tensor):
    """(entries, step, masked): row i sees entries[i·step:][:N], a flat view wherever the columns lie side by side."""
    if mask is None:
        return _NO_MASK, 0, False
    rows, columns = s.shape
    if columns > 1 and mask.stride(1) != 1:
        mask = mask.contiguous()
    step = mask.stride(0) if rows > 1 else 0
    return _array(mask.as_strided(((rows - 1) * step + columns,), (1,))), step, True
