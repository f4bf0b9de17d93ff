"""Checked rows, computed: limits of the temperature, the fused op, or the reference where a map has no fused form."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._core import ops
from regard._core.dtypes import accumulator
from regard._core.readable import has_no_values, is_mapped
from regard._core.rows.temperature_limits import scaled, tempered
from regard._core.rows.validation import (
    check_device,
    check_dim,
    check_mask,
    check_temperature,
    check_theta,
    choose_rows_backend,
    column_of,
    under_autocast,
)
from regard.normalizers import Choice


def run(scores, choice: Choice, theta, dim, temperature, mask, backend) -> Tensor:
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
    if theta is not None:
        parameter = choice.normalizer.parameter
        theta = check_theta(theta, parameter)
        check_device(theta, parameter.name, scores)
        theta = column_of(theta, parameter.name, scores.shape, dim)
    z = scores.movedim(dim, -1)
    if isinstance(t, Tensor):
        t = column_of(t, "temperature", scores.shape, dim)
        check_device(t, "temperature", scores)

    def rows(s: Tensor, scale: float) -> Tensor:
        return _rows(s, choice, theta, visible, scale, backend)

    return tempered(z, choice, theta, t, visible, rows).movedim(-1, dim)


def _rows(z: Tensor, choice: Choice, theta, visible, scale: float, backend: str) -> Tensor:
    """z (…, n) → p (…, n): through the fused op, or the reference where a map has no fused form; θ may be a tensor."""
    if backend == "reference" or not choice.normalizer.fused or is_transformed(z, theta):
        return _reference_rows(z, choice, choice.theta if theta is None else theta, visible, scale)
    if theta is not None:
        return _rows_by_theta(z, choice, theta, visible, scale, backend)
    choice = choice.simplest
    if not choice.fused:
        return _reference_rows(z, choice, choice.theta, visible, scale)
    wide, backend = careful(z, choice, backend)
    return _fused_rows(wide, choice, None, visible, scale, backend).to(z.dtype)


def _rows_by_theta(z: Tensor, choice: Choice, theta: Tensor, visible, scale: float, backend: str) -> Tensor:
    """The same with a parameter per row: each as its own value would have it."""
    parameter = choice.normalizer.parameter
    theta = theta.to(torch.promote_types(theta.dtype, torch.float32))  # bfloat16 rounds 1.001 to 1
    soft, beyond = theta < parameter.series_below, theta > parameter.fused_high
    wide = z.double() if _may(theta < parameter.wide_below) else z
    inner = theta.where(~(soft | beyond), parameter.default)
    p = _fused_rows(wide, choice, inner, visible, scale, backend).to(z.dtype)
    if choice.series is not None and _may(soft):
        q = _fused_rows(z.double(), choice, theta.where(soft, parameter.low), visible, scale, "series").to(z.dtype)
        p = torch.where(soft, q, p)
    if _may(beyond):
        far = theta.where(beyond, parameter.default)
        p = torch.where(beyond, _reference_rows(z, choice, far, visible, scale), p)
    return p


def careful(z: Tensor, choice: Choice, backend: str) -> tuple[Tensor, str]:
    """The scores and the row backend as the parameter needs them where rounding is magnified; else as they are."""
    if choice.theta is None or choice.theta >= choice.normalizer.parameter.wide_below:
        return z, backend
    return z.double(), "series" if choice.theta < choice.normalizer.parameter.series_below else backend


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
    factor = torch.full_like(bad, scale, dtype=torch.float64).masked_fill(bad, math.nan)  # the gradient is NaN too
    p = choice.reference(scaled(z.double(), choice, factor), visible, theta).to(z.dtype)
    return p.masked_fill(bad, math.nan)


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether a tangent rides on one of these, or torch.func asks for its gradient: what the ops cannot carry."""
    if torch.compiler.is_compiling():
        return _is_within_transform()
    given = [x for x in tensors if x is not None]
    forward = torch.autograd.forward_ad
    if forward._current_level >= 0 and any(forward.unpack_dual(x).tangent is not None for x in given):
        return True
    return any(is_mapped(x) or x.requires_grad for x in given) and _is_within_transform()


@torch.compiler.assume_constant_result  # torch guards a graph by the transforms that it was made in
def _is_within_transform() -> bool:
    kinds = [str(level.key()) for level in torch._C._functorch.get_interpreter_stack() or ()]
    return any("Jvp" in kind or "Grad" in kind for kind in kinds)


def _may(condition: Tensor) -> bool:
    """Whether a per-row case occurs; where that cannot be known, while tracing or of shapes alone, it may."""
    return has_no_values(condition) or bool(condition.detach().any())
