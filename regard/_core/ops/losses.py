"""row_loss: s [R, N] and target [R] → Ω*(s) − s_y [R] and a row state [3, R].

Its backward is an op too, itself differentiable. The state is the backend's own: what it computes
p from, without another search for τ.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from regard import normalizers
from regard._core.ops.backends import LOSSES, backend_module, default_device, refuse_tangents
from regard._core.ops.rows import register_row_vmap, rows
from regard._facts import accumulator


@custom_op("regard::row_loss", mutates_args=())
def row_loss(
    s: Tensor, target: Tensor | None, normalizer: str, ignore_index: int, backend: str
) -> tuple[Tensor, Tensor]:
    refuse_tangents(s)
    module = backend_module(LOSSES, backend)
    with default_device(backend):
        return module.forward(s.contiguous(), target, normalizers.get(normalizer), ignore_index)


@row_loss.register_fake
def _(s, target, normalizer, ignore_index, backend):
    kind = accumulator(s.dtype)
    return s.new_empty((s.shape[0],), dtype=kind), s.new_empty((3, s.shape[0]), dtype=kind)


@custom_op("regard::row_loss_backward", mutates_args=())
def row_loss_backward(
    dl: Tensor, s: Tensor, target: Tensor | None, state: Tensor, normalizer: str, ignore_index: int, backend: str
) -> Tensor:
    refuse_tangents(dl, s)
    module = backend_module(LOSSES, backend)
    choice = normalizers.get(normalizer)
    with default_device(backend):
        return module.backward(dl.contiguous(), s.contiguous(), target, state, choice, ignore_index)


@row_loss_backward.register_fake
def _(dl, s, target, state, normalizer, ignore_index, backend):
    return torch.empty_like(s, memory_format=torch.contiguous_format)


def _loss_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # nothing reads the state
    s, target, ctx.normalizer, ctx.ignore_index, ctx.backend = inputs
    ctx.save_for_backward(s, target, output[1])


def _loss_backward(ctx, dl, dstate):
    if dl is None:
        return None, None, None, None, None
    s, target, state = ctx.saved_tensors
    ds = row_loss_backward(dl, s, target, state, ctx.normalizer, ctx.ignore_index, ctx.backend)
    return ds, None, None, None, None


row_loss.register_autograd(_loss_backward, setup_context=_loss_setup)


def _gradient_setup(ctx, inputs, output):
    dl, s, target, _state, ctx.normalizer, ctx.ignore_index, ctx.backend = inputs
    ctx.save_for_backward(dl, s, target)


def _gradient_backward(ctx, v):
    """Gradients of Σ_r dl_r·(p_r·v_r − v_r,y) in dl and s; the state is a function of s and takes no part."""
    dl, s, target = ctx.saved_tensors
    onward = torch.is_grad_enabled()
    with torch.enable_grad():
        d, x = (t.view_as(t) if onward and t.requires_grad else t.detach().requires_grad_() for t in (dl, s))
        p = rows(x, None, None, ctx.normalizer, 1.0, ctx.backend)[0].to(d.dtype)
        along = (p * v).sum(-1)
        if target is not None:
            y = target.clamp(0, s.shape[-1] - 1)[:, None]
            along = (along - v.gather(-1, y).squeeze(-1)).masked_fill(target == ctx.ignore_index, 0.0)
        gradients = torch.autograd.grad((d * along).sum(), (d, x), create_graph=onward)
    return *gradients, None, None, None, None, None


row_loss_backward.register_autograd(_gradient_backward, setup_context=_gradient_setup)


register_row_vmap(row_loss, places=(0, 0), outputs=(0, 1))
register_row_vmap(row_loss_backward, places=(0, 0, 0, 1), outputs=(0,))
