"""Fenchel–Young losses of rows: checks the arguments, takes a backend or the reference, reduces."""

from __future__ import annotations

import numbers
import operator
from typing import Any

import torch
from torch import Tensor

from regard import normalizers, reference
from regard._call.validation import check_dense, check_device, check_scores, check_theta, choose_rows_backend
from regard._core import ops
from regard._core.ops.backends import LOSSES, backend_module, default_device
from regard._core.rows.execute import widen_near_softmax
from regard._facts import accumulator, is_plain_eager, is_transformed, readable
from regard.normalizers import Choice

REDUCTIONS = ("none", "mean", "elementwise_mean", "sum")
INDICES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def fenchel_young(
    logits: Tensor,
    target: Tensor,
    normalizer: str | Choice,
    ignore_index: int,
    reduction: str,
    backend: str | None = None,
) -> Tensor:
    """The reduced loss Ω*(z) − z_y of logits (…, n) and class indices (…), every argument still unchecked."""
    check_logits(logits)
    check_reduction(reduction)
    ignore_index = check_ignore_index(ignore_index)
    target = check_target(target, logits, ignore_index)
    losses = _evaluate(logits, target, normalizer, ignore_index, backend)
    return reduce_losses(losses, target != ignore_index, reduction)


def potential(logits: Tensor, normalizer: str = "softmax") -> Tensor:
    """Ω*(z) of logits (…, n), log Σ exp(z) for softmax; its gradient is p, written in one pass."""
    check_logits(logits)
    return _evaluate(logits, None, normalizer, -100, None)


def _evaluate(logits: Tensor, target: Tensor | None, normalizer, ignore_index: int, backend) -> Tensor:
    choice = check_choice(normalizer).simplest
    choice, theta = choice.plain, choice.theta if isinstance(choice.theta, Tensor) else None
    backend = choose_rows_backend(logits.device, backend)
    kind = accumulator(logits.dtype)
    if theta is not None:
        theta = _check_column(theta, choice, logits)
    elif choice.fused and backend != "reference" and not is_transformed(logits):
        indices = None if target is None else target.reshape(-1).contiguous()
        flat = widen_near_softmax(logits, choice).reshape(-1, logits.shape[-1]).contiguous()
        if is_plain_eager():
            losses = RowLoss.apply(flat, indices, choice, ignore_index, backend)
        else:
            losses, _ = ops.row_loss(flat, indices, choice.spec, ignore_index, backend)
        return losses.reshape(logits.shape[:-1]).to(kind)
    return reference.fenchel_young_loss(logits, target, choice, ignore_index=ignore_index, theta=theta).to(kind)


class RowLoss(torch.autograd.Function):
    """`ops.row_loss` where nothing records or rewrites calls: the op takes longer to reach its kernel."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, target: Tensor | None, choice: Choice, ignore_index: int, backend: str) -> Tensor:
        with default_device(backend):
            loss, state = backend_module(LOSSES, backend).forward(s, target, choice, ignore_index)
        ctx.choice, ctx.ignore_index, ctx.backend = choice, ignore_index, backend
        ctx.save_for_backward(s, target, state)
        return loss

    @staticmethod
    def backward(ctx: Any, dl: Tensor) -> tuple:  # type: ignore[override]
        s, target, state = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain_eager():  # the gradient has a gradient, or is mapped over
            ds = ops.row_loss_backward(dl, s, target, state, ctx.choice.spec, ctx.ignore_index, ctx.backend)
        else:
            with default_device(ctx.backend):
                module = backend_module(LOSSES, ctx.backend)
                ds = module.backward(dl.contiguous(), s, target, state, ctx.choice, ctx.ignore_index)
        return ds, None, None, None, None


def reduce_losses(losses: Tensor, counts: Tensor, reduction: str) -> Tensor:
    """The losses, their sum, or their mean over the rows that count; NaN if none does."""
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


def check_logits(logits: Tensor) -> None:
    check_scores(logits, "logits")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have classes in their last dimension, got shape {tuple(logits.shape)}")


def check_reduction(reduction: str) -> str:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    return reduction


def check_ignore_index(ignore_index: int) -> int:
    try:
        return operator.index(ignore_index)
    except TypeError:
        raise TypeError(f"ignore_index must be an int, got {type(ignore_index).__name__}") from None


def check_coefficient(coefficient: float) -> float:
    if isinstance(coefficient, bool) or not isinstance(coefficient, numbers.Real):
        raise TypeError(f"coefficient must be a number, got {type(coefficient).__name__}")
    return float(coefficient)


def check_choice(normalizer: Any) -> Choice:
    """The choice of a name, if its map is the gradient of a potential that a loss can be made of."""
    choice = normalizers.get(normalizer)
    if not choice.has_potential:
        raise ValueError(
            f"normalizer {choice.name!r} has no Fenchel–Young loss; use softmax, sparsemax, entmax15 or entmax"
        )
    return choice


def check_target(target: Tensor, logits: Tensor, ignore_index: int) -> Tensor:
    """Class indices as int64; their values are checked where that costs no device sync."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a torch.Tensor of class indices, got {type(target).__name__}")
    check_dense(target, "target")
    if target.dtype not in INDICES:
        raise TypeError(f"target must hold class indices (int64), got {target.dtype}; convert with .long()")
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"target must have the logits' shape without the classes, {tuple(logits.shape[:-1])}, "
            f"got {tuple(target.shape)}"
        )
    if target.device != logits.device:
        raise ValueError(
            f"target must be on the logits' device {logits.device}, got {target.device}; move it with .to()"
        )
    target, classes = target.long(), logits.shape[-1]
    if readable(target):
        wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
        if wrong.numel():
            raise ValueError(
                f"target must lie in [0, {classes - 1}] or be ignore_index={ignore_index}, got {wrong[0].item()}"
            )
    return target


def _check_column(theta: Tensor, choice: Choice, logits: Tensor) -> Tensor:
    parameter = choice.normalizer.parameter
    assert parameter is not None  # a map without one takes no theta
    theta = check_theta(theta, parameter)
    check_device(theta, parameter.name, logits)
    try:
        return theta.expand(*logits.shape[:-1], 1)
    except RuntimeError:
        shape = (*logits.shape[:-1], 1)
        raise ValueError(f"{parameter.name} must broadcast to {shape}, got {tuple(theta.shape)}") from None
