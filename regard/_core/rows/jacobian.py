"""The derivative of a normaliser, in closed form: ∂p_i/∂z_j = (a_i·1{i=j} − c_i·b_j) / T.

ratio: a = u′/Z, b = v′/Z, c = p;    threshold: a = b = g′, c = g′/Σg′;    pointwise: a = f′, b = 0
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.library import custom_op

from regard import normalizers
from regard._call.validation import check_device, check_scores, check_temperature, choose_rows_backend
from regard._core import ops
from regard._core.rows.execute import widen_near_softmax
from regard._core.rows.temperature_limits import scale_scores, subtract_max, temperature_limit
from regard._facts import is_transformed, widen
from regard.statistics import Terms, solve_shift


def _check(z: Tensor, normalizer: str, temperature) -> tuple[normalizers.Choice, float]:
    check_scores(z, "z")
    if z.ndim == 0:
        raise ValueError("z must have at least one dimension, got a scalar; write z[None]")
    t = check_temperature(temperature)
    if isinstance(t, Tensor):
        raise TypeError("temperature must be a number here, got a tensor; divide z by it and the result too")
    choice = normalizers.get(normalizer).simplest
    if choice.plain is not choice:
        raise TypeError(f"normalizer {choice.spec!r}: its parameter must be a number here")
    return choice, 1.0 if choice.scale_free else t


def jacobian(z: Tensor, normalizer: str = "softmax", temperature: float = 1.0) -> Tensor:
    """J_ij = ∂p_i/∂z_j: (…, n) → (…, n, n). For softmax diag(p) − p pᵀ, over T. It carries no gradient itself.

    >>> import regard, torch
    >>> regard.jacobian(torch.zeros(2))
    tensor([[ 0.2500, -0.2500],
            [-0.2500,  0.2500]])

    Returns:
        J of shape (…, n, n), in z's dtype.

    Raises:
        TypeError: `z` is not a dense float tensor, or `temperature` is a tensor.
        ValueError: `z` is a scalar, the normaliser is unknown, or `temperature` lies outside its range.
    """
    choice, t = _check(z, normalizer, temperature)
    z = z.detach()
    if t == 0.0 or z.numel() == 0:  # constant almost everywhere
        return z.new_zeros((*z.shape, z.shape[-1]))
    if t == math.inf:
        return _dense(z, lambda row: temperature_limit(row, choice, None, None, cold=False))
    if not choice.fused:
        return _dense(z, lambda row: choice.reference(row / t, None, choice.theta))
    return (_jacobian_op if torch.compiler.is_compiling() else _closed_form)(z, choice.spec, t)


def _closed_form(z: Tensor, normalizer: str, t: float) -> Tensor:
    choice, wide = normalizers.get(normalizer), widen(z)
    s = (subtract_max(wide)[0] if choice.is_shift_invariant else wide) / t  # a quotient rounds by the score
    seen = s != -math.inf
    terms, y = Terms(choice), s.masked_fill(~seen, 0.0)
    if choice.family == "ratio":
        m = solve_shift(wide, seen, choice).clamp_min(0.0 if choice.shift == "max0" else -math.inf)
        e, low = torch.exp((wide - m) / t), torch.exp(-m / t).expand(s.shape)  # the shift goes before the quotient
        u, v, a, _ = (x.masked_fill(~seen, 0.0) for x in terms.ratio(e, y, low))
        norm = v.sum(-1, keepdim=True) + terms.rest(m / t)
        inverse = torch.where(norm > 0, 1.0 / norm, 0.0)
        b = terms.tile["denominator_slope"](e, y, low).masked_fill(~seen, 0.0) * inverse
        a, c = a * inverse, u * inverse
    else:
        a = terms(y, solve_shift(s, seen, choice))[2].masked_fill(~seen, 0.0)
        if choice.family == "pointwise":
            poisoned = (s.isnan() | (s == math.inf)).any(-1, keepdim=True)
            return torch.diag_embed(a / t).masked_fill(poisoned[..., None], math.nan).to(z.dtype)
        b, c = a, a / a.sum(-1, keepdim=True).clamp_min(1e-300)
    poisoned = (s.isnan() | (s == math.inf)).any(-1, keepdim=True)[..., None]
    full = -c[..., :, None] * b[..., None, :]
    if choice.is_shift_invariant:  # columns sum to 0: the diagonal of a nearly one-hot row need not cancel
        full = full.masked_fill(torch.eye(z.shape[-1], dtype=torch.bool, device=z.device), 0.0)
        a = -full.sum(-2)
    return ((full + torch.diag_embed(a)) / t).masked_fill(poisoned, math.nan).to(z.dtype)


# for a compiled graph, in which tile functions cannot be translated to torch
_jacobian_op = custom_op("regard::jacobian", mutates_args=())(_closed_form)


@_jacobian_op.register_fake
def _(z, normalizer, t):
    return z.new_empty((*z.shape, z.shape[-1]))


@_jacobian_op.register_vmap
def _(info, in_dims, z, normalizer, t):
    return _jacobian_op(z.movedim(in_dims[0], 0), normalizer, t), 0


def _dense(z: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """The Jacobian of each row by autograd, in float64."""
    rows = torch.func.vmap(torch.func.jacrev(function))(widen(z).reshape(-1, z.shape[-1]))
    return rows.reshape(*z.shape, z.shape[-1]).to(z.dtype)


def vjp(
    z: Tensor, grad: Tensor, normalizer: str = "softmax", temperature: float = 1.0, *, backend: str | None = None
) -> Tensor:
    """Jᵀ·grad over the last dimension, with no Jacobian built: (a·grad − b·Σ c·grad) / T.

    >>> import regard, torch
    >>> regard.vjp(torch.zeros(2), torch.tensor([1.0, 0.0]))
    tensor([ 0.2500, -0.2500])

    Returns:
        Jᵀ·grad, in the shape and dtype of `z`.

    Raises:
        TypeError: `z` or `grad` is not a dense float tensor, or `temperature` is a tensor.
        ValueError: `grad` has not z's shape or device; or as `regard.jacobian` raises it.
    """
    choice, t = _check(z, normalizer, temperature)
    check_scores(grad, "grad")
    if grad.shape != z.shape:
        raise ValueError(f"grad must be a tensor of z's shape {tuple(z.shape)}, got {tuple(grad.shape)}")
    check_device(grad, "grad", z)
    if t == 0.0 or z.numel() == 0:
        return torch.zeros_like(z)
    wide = torch.promote_types(z.dtype, grad.dtype)
    if wide != z.dtype:  # a gradient that z's dtype may not hold
        return vjp(z.to(wide), grad.to(wide), normalizer, t, backend=backend).to(z.dtype)
    if t == math.inf:
        return torch.func.vjp(lambda x: temperature_limit(x, choice, None, None, cold=False), z)[1](grad.to(z.dtype))[0]
    backend = choose_rows_backend(z.device, backend)
    if not choice.fused or backend == "reference" or is_transformed(z, grad):
        rows = partial(scale_scores, choice=choice, scale=1.0 / t)
        ds = torch.func.vjp(lambda x: choice.reference(rows(x), None, choice.theta), widen(z))[1](widen(grad))[0]
        bad = (z.isnan() | (z == math.inf)).any(-1, keepdim=True)
        return ds.masked_fill(bad, math.nan).to(z.dtype)
    scores = widen_near_softmax(z, choice)
    dp = (grad if scores is z else widen(grad)).reshape(-1, z.shape[-1])
    flat = scores.reshape(-1, z.shape[-1])
    p, state = ops.rows(flat, None, None, choice.spec, 1.0 / t, backend)
    saved = p if choice.slope_of_weight is not None else flat
    return ops.rows_backward(dp, saved, state, None, None, choice.spec, 1.0 / t, backend).reshape(z.shape).to(z.dtype)
