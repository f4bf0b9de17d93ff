"""rows: s [R, N] → p [R, N] and the row state [2, R] (shift, z); its backward is an op too, itself differentiable."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from regard import normalizers
from regard._core.ops.backends import ROWS, backend_module, default_device, refuse_tangents
from regard._facts import accumulator, is_plain_eager
from regard.normalizers._language import speak, torch_words


@custom_op("regard::rows", mutates_args=())
def rows(
    s: Tensor, mask: Tensor | None, theta: Tensor | None, normalizer: str, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    refuse_tangents(s, theta)
    module = backend_module(ROWS, backend)
    with default_device(backend):
        return module.forward(s.contiguous(), normalizers.get(normalizer), theta, mask, scale)


@rows.register_fake
def _(s, mask, theta, normalizer, scale, backend):
    return torch.empty_like(s, memory_format=torch.contiguous_format), s.new_empty(
        (2, s.shape[0]), dtype=accumulator(s.dtype)
    )


@custom_op("regard::rows_backward", mutates_args=())
def rows_backward(
    dp: Tensor,
    saved: Tensor,
    state: Tensor,
    mask: Tensor | None,
    theta: Tensor | None,
    normalizer: str,
    scale: float,
    backend: str,
) -> Tensor:
    refuse_tangents(dp, saved, state, theta)
    module = backend_module(ROWS, backend)
    choice = normalizers.get(normalizer)
    with default_device(backend):
        return module.backward(dp.contiguous(), saved.contiguous(), state, choice, theta, mask, scale)


@rows_backward.register_fake
def _(dp, saved, state, mask, theta, normalizer, scale, backend):
    return torch.empty_like(saved, memory_format=torch.contiguous_format)


def _rows_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # the state's gradient exists in double backward only
    s, mask, theta, ctx.normalizer, ctx.scale, ctx.backend = inputs
    p, state = output
    choice = normalizers.get(ctx.normalizer)
    from_weights = choice.slope_of_weight is not None
    ctx.save_for_backward(p if from_weights else s, state, mask, theta)
    ctx.from_weights = from_weights


def _rows_backward(ctx, dp, dstate):
    saved, state, mask, theta = ctx.saved_tensors
    dp = torch.zeros_like(saved) if dp is None else dp
    ds = rows_backward(dp, saved, state, mask, theta, ctx.normalizer, ctx.scale, ctx.backend)
    choice = normalizers.get(ctx.normalizer)
    if dstate is not None and choice.family == "ratio" and ctx.from_weights:
        z = state[1, :, None]  # reached by double backward only: dZ/ds = v′ = Z·slope
        slope = speak(choice.slope_of_weight, torch_words)(saved, torch.where(z > 0, 1.0 / z, 0.0))
        ds = ds + (ctx.scale * dstate[1, :, None] * z * slope).to(ds.dtype)
    dtheta = None
    if theta is not None and ctx.needs_input_grad[2]:
        p = saved if ctx.from_weights else rows(saved, mask, theta, ctx.normalizer, ctx.scale, ctx.backend)[0]
        dtheta = choice.parameter_vjp(p.to(state.dtype), dp.to(state.dtype), theta[:, None]).to(theta.dtype)
    return ds, None, dtheta, None, None, None


rows.register_autograd(_rows_backward, setup_context=_rows_setup)


def rows_weights(s: Tensor, mask, theta, normalizer: str, scale: float, backend: str) -> Tensor:
    """The weights of `regard::rows`, without the dispatcher where nothing records the call: short rows cost less."""
    recorded = torch.is_grad_enabled() and (s.requires_grad or (theta is not None and theta.requires_grad))
    is_tensor = type(s) is Tensor and s.device.type in ("cpu", "cuda")
    if recorded or not is_tensor or not is_plain_eager():
        return rows(s, mask, theta, normalizer, scale, backend)[0]
    return backend_module(ROWS, backend).forward(s.contiguous(), normalizers.get(normalizer), theta, mask, scale)[0]


def differentiable_vjp(dp, saved, state, mask, theta, normalizer: str, scale: float) -> Tensor:
    """scale·(a·dp − b·δ) in plain torch, for the gradient of the gradient."""
    choice = normalizers.get(normalizer)
    theta = choice.theta if theta is None else theta[:, None]
    if choice.slope_of_weight is None:
        s = saved if saved.requires_grad else saved.detach().requires_grad_()
        p = choice.reference(s * scale, mask, theta)
        return torch.autograd.grad(p, s, dp, create_graph=True)[0]
    theta = 0.0 if theta is None else theta
    positive = saved > 0
    p = saved.where(positive, 1.0)  # the slopes' own derivatives need not exist at p = 0
    slope = speak(choice.slope_of_weight, torch_words)
    if choice.family == "pointwise":
        return scale * slope(saved, theta) * dp
    if choice.family == "ratio":
        z = state[1, :, None]
        a = slope(p, torch.where(z > 0, 1.0 / z.where(z > 0, 1.0), 0.0)).where(positive, 0.0)
        return scale * a * (dp - (saved * dp).sum(-1, keepdim=True))
    a = slope(p, theta) * torch.ones_like(p)
    a = a.where(positive, 0.0)
    total = a.sum(-1, keepdim=True)
    return scale * a * (dp - (a * dp).sum(-1, keepdim=True) / total.where(total > 0, 1.0))


def _rows_backward_setup(ctx, inputs, output):
    dp, saved, state, mask, theta, ctx.normalizer, ctx.scale, _ = inputs
    ctx.save_for_backward(dp, saved, state, mask, theta)


def _rows_backward_backward(ctx, g):
    dp, saved, state, mask, theta = ctx.saved_tensors
    wide = state.dtype
    onward = torch.is_grad_enabled()  # someone differentiates this once more: keep the graph
    with torch.enable_grad():
        inputs = [_own(x, wide, onward) for x in (dp, saved, state, theta) if x is not None]
        ds = differentiable_vjp(*inputs[:3], mask, inputs[3] if theta is not None else None, ctx.normalizer, ctx.scale)
        grads = torch.autograd.grad(ds, inputs, g.to(wide), allow_unused=True, create_graph=onward)
    back = [None if x is None else x.to(like.dtype) for x, like in zip(grads, (dp, saved, state, theta), strict=False)]
    return back[0], back[1], back[2], None, back[3] if theta is not None else None, None, None, None


def _own(x: Tensor, dtype: torch.dtype, onward: bool) -> Tensor:
    """x to take partial derivatives by: a leaf, or with `onward` a node of its own in x's graph."""
    if onward and x.requires_grad:
        return x.to(dtype).view_as(x)
    return x.detach().to(dtype).requires_grad_()


rows_backward.register_autograd(_rows_backward_backward, setup_context=_rows_backward_setup)


def register_row_vmap(op, places: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    """Make vmap of an op fold the mapped dimension into its rows.

    places: which dimension of each tensor argument the rows are, and likewise outputs.
    """

    def fold(x: Tensor | None, dim: int | None, size: int, place: int) -> Tensor | None:
        if x is None:
            return None
        x = x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape)
        return x.movedim(0, place).flatten(place, place + 1)

    def rule(info, in_dims, *args):
        size, count = info.batch_size, len(places)
        given = zip(args[:count], in_dims[:count], places, strict=True)
        found = op(*(fold(x, dim, size, place) for x, dim, place in given), *args[count:])
        if len(outputs) == 1:
            return found.unflatten(outputs[0], (size, -1)), outputs[0]
        return tuple(x.unflatten(place, (size, -1)) for x, place in zip(found, outputs, strict=True)), outputs

    op.register_vmap(rule)


register_row_vmap(rows, places=(0, 0, 0), outputs=(0, 1))
register_row_vmap(rows_backward, places=(0, 0, 1, 0, 0), outputs=(0,))
