"""Losses of rows on the CPU: Ω*(s) − s_y of every row of s [R, N], and ds = (p − e_y)·dl.

The row state is (max, τ, rest) for threshold normalisers, p = value(max(gain·(s − max) − τ − rest, 0)), and
(max, 1/Z, 0) for softmax. With t the argument of `value` and α = 1 + gain,

    Ω*(s) − max = (Σ value(t)·t − 1)/α + (1 + τ + rest)/gain        log Z for softmax

>>> import torch
>>> from regard import normalizers
>>> from regard._backends.cpu import losses
>>> s, target = torch.tensor([[0.0, 0.5, -2.0]]), torch.tensor([0])
>>> loss, state = losses.forward(s, target, normalizers.get("sparsemax"))
>>> loss
tensor([0.5625])
>>> losses.backward(torch.ones(1), s, target, state, normalizers.get("sparsemax"))
tensor([[-0.7500,  0.7500,  0.0000]])
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from regard._backends.cpu.jit.compile import cache_by_normalizer, kernel, precision_of, prim, real, tile
from regard._backends.cpu.rows.launch import HALF, MIN_WIDTH, PADDING, as_array
from regard._backends.cpu.rows.row_io import CHUNK, INF, NAN, fill, load, read
from regard._backends.cpu.rows.threshold import tile_functions
from regard._backends.cpu.tasks import run_row_ranges
from regard._backends.cpu.threshold_solver import pack_above, solve_row
from regard._facts import accumulator
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
    weigh = weigh_threshold if is_threshold else weigh_softmax
    tiles = {**functions, "lanes": 8 if precision == "float64" else 16, "weigh": weigh}
    forwards = forward_threshold if is_threshold else forward_softmax
    return kernel(forwards if direction == "forward" else backward_rows, tiles, precision)


# templates for `jit.compile.kernel`


def loss_of_target(potential, top, s, y, ignore, has_target):
    """Ω* − s_y from Ω* − max; 0 where y is `ignore`, NaN where it is no column. Without a target Ω*."""
    value = potential + np.float64(top)
    if has_target:
        value = np.float64(NAN)
        if y == ignore:
            value = np.float64(0)
        elif 0 <= y < s.size:
            value = potential + (np.float64(top) - np.float64(s[y]))
    return value


def forward_threshold(s, target, loss, state, parameter, ignore, has_target, mask, scratch, first, last):
    n = s.shape[1]
    x, y = scratch[0, :n], scratch[1]
    gain = tile.gain(parameter)
    for i in range(first, last):
        top = load(s[i], x, mask, False)
        tau, rest, potential = real(NAN), real(NAN), np.float64(NAN)
        if prim.abs(top) < INF:
            tau, rest, _, _ = solve_row(x, top, gain, y, parameter, gain)
            size = pack_above(x, top, tau / gain, y)
            excess = np.float64(0)
            for start in range(0, size, CHUNK):
                part, chunk = 0.0, y[start : min(start + CHUNK, size)]
                for j in range(chunk.size):
                    t = prim.maximum(chunk[j] * gain - tau - rest, 0.0)
                    part = prim.accumulate(part, prim.where(t > 0.0, tile.value(t, parameter) * t, 0.0))
                excess += part
            shift = np.float64(1) + np.float64(tau) + np.float64(rest)
            potential = (excess - np.float64(1)) / (np.float64(1) + np.float64(gain)) + shift / np.float64(gain)
        else:
            top = real(NAN)
        state[0, i] = top
        state[1, i] = tau
        state[2, i] = rest
        loss[i] = loss_of_target(potential, top, s[i], target[i] if has_target else 0, ignore, has_target)


def forward_softmax(s, target, loss, state, parameter, ignore, has_target, mask, scratch, first, last):
    n = s.shape[1]
    for i in range(first, last):
        x, top = read(s[i], scratch[0, :n], mask, False)
        total = np.float64(NAN)
        if prim.abs(top) < INF:
            total = np.float64(0)
            for start in range(0, n, CHUNK):
                part, chunk = 0.0, x[start : min(start + CHUNK, n)]
                for j in range(chunk.size):
                    part = prim.accumulate(part, prim.decay(chunk[j] - top))
                total += part
        else:
            top = real(NAN)
        state[0, i] = top
        state[1, i] = real(np.float64(1) / total)
        state[2, i] = 0.0
        loss[i] = loss_of_target(math.log(total), top, s[i], target[i] if has_target else 0, ignore, has_target)


def weigh_threshold(x, top, second, third, gain, parameter):
    """p from the row state of a threshold normaliser."""
    t = prim.maximum((x - top) * gain - second - third, 0.0)
    return prim.where(t > 0.0, tile.value(t, parameter), 0.0)


def weigh_softmax(x, top, second, third, gain, parameter):
    """p from softmax's row state."""
    return prim.decay(x - top) * second


def backward_rows(dl, s, target, state, ds, parameter, gain, ignore, has_target, first, last):
    n = s.shape[1]
    for i in range(first, last):
        top, second, third, upstream, y = state[0, i], state[1, i], state[2, i], dl[i], -1
        row, x = ds[i], s[i]
        if has_target:
            y = target[i]
            if y == ignore:
                fill(row, 0.0)
                continue
            if y < 0 or y >= n:
                top = real(NAN)
        if top != top:
            fill(row, NAN)
            continue
        for j in range(n):
            row[j] = tile.weigh(x[j], top, second, third, gain, parameter) * upstream
        if has_target:
            p = tile.weigh(x[y], top, second, third, gain, parameter)
            row[y] = (p - 1.0) * upstream
