"""Rows on the CPU: p = normaliser(scale · s), and ds = scale·(a·dp − b·δ) with δ = Σ c·dp.

>>> import torch
>>> from regard import normalizers
>>> from regard._backends.cpu.rows import launch
>>> s = torch.tensor([[-2.0, 0.0, 0.5]])
>>> p, state = launch.forward(s, normalizers.get("sparsemax"))
>>> p
tensor([[0.0000, 0.2500, 0.7500]])
>>> launch.backward(torch.tensor([[0.0, 1.0, 0.0]]), p, state, normalizers.get("sparsemax"))[:, 1:]
tensor([[ 0.5000, -0.5000]])
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from regard._backends.cpu.jit.compile import cache_by_normalizer, kernel, precision_of
from regard._backends.cpu.rows import pointwise, ratio, threshold
from regard._backends.cpu.tasks import SMALL, run_row_ranges
from regard.normalizers import Choice, Normalizer

SCRATCH, PADDING, MIN_WIDTH = 4, 32, 2048  # rows of working space per thread; room behind each for whole vectors
HALF = (torch.bfloat16, torch.float16)
_NO_MASK = np.empty(0, np.bool_), 0, False
_FAMILIES = {"pointwise": pointwise, "ratio": ratio, "threshold": threshold}


def forward(
    s: Tensor, choice: Choice, theta: Tensor | None = None, mask: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(p, state): p [R, N] in s's dtype, state [2, R] = (shift, z) as `regard._call.problem.Forward` says.

    s: [R, N], float64, float32, bfloat16 or float16; the 16-bit dtypes are computed in float32.
    theta: one parameter per row, [R]; None takes the choice's own. mask: bool [R, N], any strides, True = visible.
    """
    if s.dtype in HALF:
        p, state = forward(s.float(), choice, theta, mask, scale)
        return p.to(s.dtype), state
    p = torch.empty_like(s, memory_format=torch.contiguous_format)
    state = torch.zeros((2, s.shape[0]), dtype=torch.float64 if s.dtype == torch.float64 else torch.float32)
    _run(choice, "forward", (s, p), state, theta, mask, scale)
    return p, state


def plan(like: Tensor, choice: Choice, scale: float) -> Callable[[Tensor], Tensor]:
    """Return a function s ↦ normaliser(scale·s) for tensors s [..., N] of the shape, strides and dtype of `like`."""
    columns = like.shape[-1]
    rows = like.numel() // columns
    is_plain = like.dtype not in HALF and like.stride() == like.new_empty(like.shape).stride()
    if not is_plain or rows * columns >= SMALL:
        return lambda s: forward(s.reshape(rows, columns), choice, None, None, scale)[0].view(s.shape)
    compiled, parameter = _row_kernel(choice.normalizer, "forward", like.dtype), _parameter(choice.theta, like.dtype)
    is_matrix, dtype = like.ndim == 2, parameter.dtype
    matrix, state, scratch = (rows, columns), (2, rows), (SCRATCH, max(columns + PADDING, MIN_WIDTH))
    mask, stride, masked = _NO_MASK

    def normalize(s: Tensor) -> Tensor:
        p = torch.empty_like(s)
        given, out = (s.detach() if s.requires_grad else s).numpy(), p.numpy()
        if not is_matrix:
            given, out = given.reshape(matrix), out.reshape(matrix)
        kept, room = np.empty(state, dtype), np.empty(scratch, dtype)
        compiled(given, out, kept, parameter, 0, mask, stride, masked, scale, room, 0, rows)
        return p

    return normalize


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
    if saved.dtype in HALF:
        return backward(dp.float(), saved.float(), state, choice, theta, mask, scale).to(saved.dtype)
    ds = torch.empty_like(saved, memory_format=torch.contiguous_format)
    job = "backward_of_scores" if choice.slope_of_weight is None else "backward_of_weights"
    _run(choice, job, (dp.to(saved.dtype), saved, ds), state, theta, mask, scale)
    return ds


def _run(
    choice: Choice,
    job: str,
    matrices: tuple[Tensor, ...],
    state: Tensor,
    theta: Tensor | None,
    mask: Tensor | None,
    scale: float,
) -> None:
    rows, columns = matrices[0].shape
    if not rows or not columns:
        return
    compiled = _row_kernel(choice.normalizer, job, matrices[0].dtype)
    parameters = _parameter(choice.theta, state.dtype), 0  # row i has parameters[i·step]
    if theta is not None:
        parameters = as_array(theta.to(state.dtype)), 1
    arrays = *map(as_array, matrices), as_array(state)
    visible = _NO_MASK if mask is None else _mask_array(mask)
    width = max(columns + PADDING, MIN_WIDTH)

    def work(first: int, last: int) -> None:
        scratch = np.empty((SCRATCH, width), arrays[-1].dtype)
        compiled(*arrays, *parameters, *visible, scale, scratch, first, last)

    run_row_ranges(work, rows, columns)


@cache_by_normalizer
def _row_kernel(normalizer: Normalizer, job: str, dtype: torch.dtype) -> Callable:
    family, precision = _FAMILIES[normalizer.family], precision_of(dtype)
    lanes = 8 if precision == "float64" else 16
    tiles = {**family.tile_functions(normalizer), "index": f"index_{precision}", "lanes": lanes}
    return kernel(getattr(family, job), tiles, precision)


def as_array(x: Tensor) -> np.ndarray:
    if x.requires_grad:
        x = x.detach()
    return x.contiguous().numpy()


@functools.lru_cache(maxsize=256)
def _parameter(value: float | None, dtype: torch.dtype) -> np.ndarray:
    return np.array([value or 0.0], precision_of(dtype))


def _mask_array(mask: Tensor) -> tuple[np.ndarray, int, bool]:
    """(entries, step, masked): row i sees entries[i·step:][:N], a flat view wherever the columns are adjacent."""
    rows, columns = mask.shape
    if columns > 1 and mask.stride(1) != 1:
        mask = mask.contiguous()
    step = mask.stride(0) if rows > 1 else 0
    return as_array(mask.as_strided(((rows - 1) * step + columns,), (1,))), step, True
