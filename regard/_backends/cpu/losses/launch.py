"""Losses of rows on the CPU: Ω*(s) − s_y of every row of s [R, N], and ds = (p − e_y)·dl.

>>> import torch
>>> from regard import normalizers
>>> from regard._backends.cpu.losses import launch
>>> s, target = torch.tensor([[0.0, 0.5, -2.0]]), torch.tensor([0])
>>> loss, state = launch.forward(s, target, normalizers.get("sparsemax"))
>>> loss
tensor([0.5625])
>>> launch.backward(torch.ones(1), s, target, state, normalizers.get("sparsemax"))
tensor([[-0.7500,  0.7500,  0.0000]])
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from regard._backends.cpu.jit.compile import cache_by_normalizer, kernel, precision_of
from regard._backends.cpu.losses import kernels
from regard._backends.cpu.rows.launch import HALF, MIN_WIDTH, PADDING, as_array
from regard._backends.cpu.rows.threshold import tile_functions
from regard._backends.cpu.tasks import run_row_ranges
from regard._facts.dtypes import accumulator
from regard.normalizers import Choice, Normalizer
from regard.normalizers._language import speak

_NO_TARGET, _NO_MASK = np.empty(0, np.int64), np.empty(0, np.bool_)


def forward(s: Tensor, target: Tensor | None, choice: Choice, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """(loss [R], state [3, R]) of s [R, N], contiguous; without a target the loss is Ω*(s). target: int64 [R]."""
    s = s.float() if s.dtype in HALF else s
    rows, columns = s.shape
    loss = torch.empty(rows, dtype=accumulator(s.dtype))
    state = torch.empty((3, rows), dtype=loss.dtype)
    compiled = _kernel(choice.normalizer, "forward", s.dtype)
    scores, losses, states = map(as_array, (s, loss, state))
    targets = _NO_TARGET if target is None else as_array(target)
    parameter = states.dtype.type(choice.theta or 0.0)
    width = max(columns + PADDING, MIN_WIDTH)

    def work(first: int, last: int) -> None:
        scratch = np.empty((2, width), states.dtype)
        given = scores, targets, losses, states, parameter, ignore_index, target is not None, _NO_MASK
        compiled(*given, scratch, first, last)

    run_row_ranges(work, rows, columns)
    return loss, state


def backward(
    dl: Tensor, s: Tensor, target: Tensor | None, state: Tensor, choice: Choice, ignore_index: int = -100
) -> Tensor:
    """ds = (p − e_y)·dl [R, N], without a target p·dl; dl: [R]."""
    if s.dtype in HALF:
        return backward(dl, s.float(), target, state, choice, ignore_index).to(s.dtype)
    rows, columns = s.shape
    ds = torch.empty_like(s)
    compiled = _kernel(choice.normalizer, "backward", s.dtype)
    upstream, scores, states, gradients = map(as_array, (dl.to(state.dtype), s, state, ds))
    targets = _NO_TARGET if target is None else as_array(target)
    real = states.dtype.type
    gain = real(speak(choice.gain)(choice.theta or 0.0) if choice.family == "threshold" else 0.0)
    given = upstream, scores, targets, states, gradients, real(choice.theta or 0.0), gain, ignore_index
    run_row_ranges(lambda first, last: compiled(*given, target is not None, first, last), rows, columns)
    return ds


@cache_by_normalizer
def _kernel(normalizer: Normalizer, direction: str, dtype: torch.dtype) -> Callable:
    precision, is_threshold = precision_of(dtype), normalizer.family == "threshold"
    functions = tile_functions(normalizer) if is_threshold else {}  # type: ignore[arg-type]
    weigh = kernels.weigh_threshold if is_threshold else kernels.weigh_softmax
    tiles = {**functions, "lanes": 8 if precision == "float64" else 16, "weigh": weigh}
    forwards = kernels.forward_threshold if is_threshold else kernels.forward_softmax
    return kernel(forwards if direction == "forward" else kernels.backward, tiles, precision)
