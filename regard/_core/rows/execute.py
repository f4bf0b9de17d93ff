"""Computes rows: `run` checks its arguments, applies the temperature and takes a backend or the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from regard import normalizers
from regard._call.validation import (
    check_device,
    check_dim,
    check_mask,
    check_scores,
    check_temperature,
    check_theta,
    choose_rows_backend,
    column_of,
    under_autocast,
)
from regard._core import ops
from regard._core.ops.backends import ROWS, backend_module
from regard._core.rows.temperature_limits import apply_temperature, scale_scores
from regard._facts import (
    accumulator,
    has_no_values,
    has_numba,
    is_plain_eager,
    is_transformed,
    reference_dtype,
    remember,
    widen,
)
from regard.normalizers import Choice

MAX_PLANS = 1024
plans: dict[Hashable, Callable[[Tensor], Tensor]] = {}


def run_named(scores, spec, dim, temperature, mask, backend=None, name: str = "z") -> Tensor:
    """p = normaliser(scores / temperature) along `dim`; calls of a kind that was seen go to their kernel at once."""
    key = None
    numbers = type(dim) is int and type(temperature) in (float, int)
    if mask is backend is None and numbers and type(spec) is str and _has_plan(scores):
        kind = scores.shape, scores.stride(), scores.dtype, scores.device
        key = spec, dim, temperature, normalizers.generation(), kind
        plan = plans.get(key)
        if plan is not None:
            return plan(scores)
    check_scores(scores, name)
    choice = normalizers.get(spec)
    if key is not None and _is_simple(scores, choice, dim, temperature):
        module = _row_module(scores.device.type)
        if module is not None:
            return remember(plans, key, module.plan(scores, choice, 1.0 / temperature), MAX_PLANS)(scores)
    return run(scores, choice, None, dim, temperature, mask, backend)


def _has_plan(scores: Tensor) -> bool:
    """True for a plain dense tensor without a gradient on a device with kernels, where no mode changes the call."""
    return (
        type(scores) is Tensor
        and not (scores.requires_grad and torch.is_grad_enabled())
        and scores.layout is torch.strided
        and not scores.is_nested
        and (scores.is_cpu or scores.is_cuda)
        and not torch.is_autocast_enabled("cpu" if scores.is_cpu else "cuda")
        and is_plain_eager()
    )


def run(scores, choice: Choice, theta, dim, temperature, mask, backend) -> Tensor:
    """p = normaliser(scores / temperature) along `dim`, every argument but the scores still unchecked."""
    if choice.plain is not choice:
        choice, theta = choice.plain, choice.theta
    dim = check_dim(scores, dim)
    t = check_temperature(temperature)
    backend = choose_rows_backend(scores.device, backend)
    scores = under_autocast(scores)
    if scores.ndim == 0:
        mask = None if mask is None else check_mask(mask, scores.shape).reshape(1)
        return run(scores.reshape(1), choice, theta, 0, t, mask, backend).reshape(())
    visible = None
    if mask is not None:
        visible = check_mask(mask, scores.shape).movedim(dim, -1)
        check_device(mask, "mask", scores)
    z = scores.movedim(dim, -1)
    if callable(theta) and not isinstance(theta, Tensor):
        seen = z != -math.inf if visible is None else visible & (z != -math.inf)
        theta = theta(seen.sum(-1).to(accumulator(z.dtype))).expand(z.shape[:-1]).unsqueeze(-1).movedim(-1, dim)
    if theta is not None:
        parameter = choice.normalizer.parameter
        assert parameter is not None  # a map without one takes no theta
        theta = check_theta(theta, parameter)
        check_device(theta, parameter.name, scores)
        theta = column_of(theta, parameter.name, scores.shape, dim)
    if isinstance(t, Tensor):
        t = column_of(t, "temperature", scores.shape, dim)
        check_device(t, "temperature", scores)

    def rows(s: Tensor, scale: float) -> Tensor:
        return _rows(s, choice, theta, visible, scale, backend)

    return apply_temperature(z, choice, theta, t, visible, rows).movedim(-1, dim)


def _is_simple(scores: Tensor, choice: Choice, dim, temperature) -> bool:
    """True for a call that goes to its kernel as it is: the last dimension, a plain temperature."""
    parameter = choice.normalizer.parameter
    return (
        (dim == -1 or dim == scores.ndim - 1)
        and 1e-6 < temperature < 1e6
        and scores.ndim > 0
        and scores.numel() > 0
        and choice.fused_in_attention
        and choice.plain is choice
        and not (parameter is not None and isinstance(choice.theta, float) and choice.theta < parameter.wide_below)
        and not choice.scale_free
    )


@cache
def _row_module(device: str) -> ModuleType | None:
    """The row kernels of a device type; None if it has none."""
    backend = {"cpu": "cpu" if has_numba() else None, "cuda": "triton"}.get(device)
    return None if backend is None else backend_module(ROWS, backend)


def _rows(z: Tensor, choice: Choice, theta, visible, scale: float, backend: str) -> Tensor:
    """Weights of z (…, n) by the fused kernels, or by the reference where a map has no fused form."""
    if backend == "reference" or not choice.normalizer.fused or is_transformed(z, theta):
        return _reference_rows(z, choice, choice.theta if theta is None else theta, visible, scale)
    if theta is not None:
        return _rows_by_theta(z, choice, theta, visible, scale, backend)
    choice = choice.simplest
    if not choice.fused:
        return _reference_rows(z, choice, choice.theta, visible, scale)
    return _fused_rows(widen_near_softmax(z, choice), choice, None, visible, scale, backend).to(z.dtype)


def _rows_by_theta(z: Tensor, choice: Choice, theta: Tensor, visible, scale: float, backend: str) -> Tensor:
    """Weights of rows that each have their own parameter θ."""
    parameter = choice.normalizer.parameter
    assert parameter is not None  # a map without one takes no theta
    low, high = _find_range(theta)  # one wait for a GPU
    if parameter.fused_high < parameter.high and not high <= parameter.fused_high:  # NaN too
        return _reference_rows(z, choice, theta, visible, scale)
    theta = theta.to(torch.promote_types(theta.dtype, torch.float32))  # bfloat16 rounds 1.001 to 1
    if not low < parameter.wide_below:
        return _fused_rows(z, choice, theta, visible, scale, backend)
    theta = parameter.keep_off_softmax(widen(theta))
    return _fused_rows(widen(z), choice, theta, visible, scale, backend).to(z.dtype)


def widen_near_softmax(z: Tensor, choice: Choice) -> Tensor:
    """Return the scores, in float64 for a parameter at which float32 magnifies rounding."""
    parameter = choice.normalizer.parameter
    near = parameter is not None and isinstance(choice.theta, float) and choice.theta < parameter.wide_below
    return widen(z) if near else z


def _fused_rows(z: Tensor, choice: Choice, theta, visible, scale: float, backend: str) -> Tensor:
    flat = z.reshape(math.prod(z.shape[:-1]), z.shape[-1])
    mask = None if visible is None else visible.reshape(flat.shape)
    column = None
    if theta is not None:
        column = theta.expand(*z.shape[:-1], 1).reshape(-1).to(accumulator(z.dtype))
    return ops.rows_weights(flat, mask, column, choice.spec, scale, backend).reshape(z.shape)


def _reference_rows(z: Tensor, choice: Choice, theta, visible, scale: float) -> Tensor:
    z = z if visible is None else z.masked_fill(~visible, -math.inf)  # what is hidden cannot leak, not even as NaN
    bad = (z.isnan() | (z == math.inf)).any(-1, keepdim=True)
    factor = torch.full_like(bad, scale, dtype=reference_dtype(z.device)).masked_fill(
        bad, math.nan
    )  # the gradient is NaN too
    p = choice.reference(scale_scores(widen(z), choice, factor), visible, theta).to(z.dtype)
    return p.masked_fill(bad, math.nan)


def _find_range(x: Tensor) -> tuple[float, float]:
    """The least and the largest entry; without bounds where they cannot be known (while tracing, of shapes alone)."""
    if has_no_values(x):
        return -math.inf, math.inf
    low, high = torch.stack(x.detach().aminmax()).tolist() if x.numel() else (math.inf, -math.inf)
    return low, high
