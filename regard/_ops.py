"""The torch.library ops: schema, fake, autograd, vmap. The normaliser travels as a string, the backend too.

Forward and backward are ops of their own, so that torch.compile, checkpointing and opcheck see two opaque steps with
known shapes. `rows` maps a matrix of scores to weights; `attention` is the fused step on [B, H, M, D].
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor
from torch.library import custom_op

from regard import normalizers
from regard.normalizers._language import speak, torch_words
from regard.problem import Forward, Problem, Upstream

ROWS = {"cpu": "regard.cpu.rows", "triton": "regard.kernels.rows"}
ATTENTION = {"cpu": "regard.cpu.attention", "triton": "regard.kernels.attention"}


def backend_module(table: dict[str, str], backend: str) -> ModuleType:
    try:
        return importlib.import_module(table[backend])
    except ModuleNotFoundError as error:
        package = {"cpu": "numba", "triton": "triton"}[backend]
        if error.name == package:
            raise ImportError(f"backend {backend!r} needs {package}: pip install {package}") from error
        raise


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# rows: s [R, N] -> p [R, N], state [2, R] ------------------------------------------------------------------------


@custom_op("regard::rows", mutates_args=())
def rows(
    s: Tensor, mask: Tensor | None, theta: Tensor | None, normalizer: str, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    module = backend_module(ROWS, backend)
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
    module = backend_module(ROWS, backend)
    choice = normalizers.get(normalizer)
    return module.backward(dp.contiguous(), saved.contiguous(), state, choice, theta, mask, scale)


@rows_backward.register_fake
def _(dp, saved, state, mask, theta, normalizer, scale, backend):
    return torch.empty_like(saved, memory_format=torch.contiguous_format)


def _rows_setup(ctx, inputs, output):
    s, mask, theta, ctx.normalizer, ctx.scale, ctx.backend = inputs
    p, state = output
    choice = normalizers.get(ctx.normalizer)
    from_weights = choice.slope_of_weight is not None
    ctx.save_for_backward(p if from_weights else s, state, mask, theta)
    ctx.from_weights = from_weights


def _rows_backward(ctx, dp, dstate):
    saved, state, mask, theta = ctx.saved_tensors
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
    with torch.enable_grad():
        inputs = [x.detach().to(wide).requires_grad_() for x in (dp, saved, state)]
        if theta is not None:
            inputs.append(theta.detach().to(wide).requires_grad_())
        ds = differentiable_vjp(*inputs[:3], mask, inputs[3] if theta is not None else None, ctx.normalizer, ctx.scale)
        grads = torch.autograd.grad(ds, inputs, g.to(wide), allow_unused=True)
    back = [None if x is None else x.to(like.dtype) for x, like in zip(grads, (dp, saved, state, theta))]
    return back[0], back[1], back[2], None, back[3] if theta is not None else None, None, None, None


rows_backward.register_autograd(_rows_backward_backward, setup_context=_rows_backward_setup)


def _rows_vmap(op, tensors: int):
    """Fold the mapped dimension into the rows; `state` tensors hold rows in their last dimension."""

    def rule(info, in_dims, *args):
        size = info.batch_size
        folded = []
        for arg, dim, place in zip(args[:tensors], in_dims[:tensors], _ROW_DIMS[op]):
            if arg is None:
                folded.append(None)
                continue
            arg = arg.movedim(dim, 0) if dim is not None else arg.expand(size, *arg.shape)
            folded.append(arg.movedim(0, place).flatten(place, place + 1))
        out = op(*folded, *args[tensors:])
        if op is rows_backward:
            return out.unflatten(0, (size, -1)), 0
        p, state = out
        return (p.unflatten(0, (size, -1)), state.unflatten(1, (size, -1))), (0, 1)

    return rule


_ROW_DIMS = {rows: (0, 0, 0), rows_backward: (0, 0, 1, 0, 0)}
rows.register_vmap(_rows_vmap(rows, 3))
rows_backward.register_vmap(_rows_vmap(rows_backward, 5))


# attention: q [B, H, M, D], k [B, G, N, D], v [B, G, N, E] --------------------------------------------------------


def _problem(
    q, k, v, bias, mask, temperature, sink, key_lengths, seed, scale, softcap, causal, left, right, dropout_p, normalizer, stats
) -> Problem:
    rows_shape = q.shape[:3]
    full = (*rows_shape, k.shape[2])
    return Problem(
        q=q,
        k=k,
        v=v,
        choice=normalizers.get(normalizer),
        scale=scale,
        softcap=softcap or None,
        bias=None if bias is None else bias.expand(full),
        mask=None if mask is None else mask.expand(full),
        temperature=None if temperature is None else temperature.expand(rows_shape),
        sink=None if sink is None else sink.expand(rows_shape),
        key_lengths=key_lengths,
        causal=causal,
        left=None if left < 0 else left,
        right=None if right < 0 else right,
        dropout_p=dropout_p,
        seed=seed,
        stats=tuple(stats.split(",")) if stats else (),
    )


@custom_op("regard::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    temperature: Tensor | None,
    sink: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float,
    causal: bool,
    left: int,
    right: int,
    dropout_p: float,
    normalizer: str,
    stats: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o, frame, z, stats) as in `regard.problem.Forward`; softcap 0 and left or right −1 mean none."""
    problem = _problem(
        q, k, v, bias, mask, temperature, sink, key_lengths, seed, scale, softcap, causal, left, right, dropout_p, normalizer, stats
    )
    result = backend_module(ATTENTION, backend).forward(problem)
    return result.o, result.frame, result.z, result.stats


@attention.register_fake
def _(
    q, k, v, bias, mask, temperature, sink, key_lengths, seed, scale, softcap, causal, left, right, dropout_p, normalizer, stats, backend
):
    wide = accumulator(q.dtype)
    rows_shape = q.shape[:3]
    names = len(stats.split(",")) if stats else 0
    return (
        q.new_empty((*rows_shape, v.shape[3])),
        q.new_empty(rows_shape, dtype=wide),
        q.new_empty(rows_shape, dtype=wide),
        q.new_empty((names, *rows_shape), dtype=wide),
    )


@custom_op("regard::attention_backward", mutates_args=())
def attention_backward(
    do: Tensor,
    dstats: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    temperature: Tensor | None,
    sink: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    o: Tensor,
    frame: Tensor,
    z: Tensor,
    stat_values: Tensor,
    scale: float,
    softcap: float,
    causal: bool,
    left: int,
    right: int,
    dropout_p: float,
    normalizer: str,
    stats: str,
    backend: str,
    wants: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias, dtemperature, dsink); those not in `wants` are empty. dstats: [3, B, H, M] or None."""
    problem = _problem(
        q, k, v, bias, mask, temperature, sink, key_lengths, seed, scale, softcap, causal, left, right, dropout_p, normalizer, stats
    )
    wanted = wants.split(",")
    upstream = Upstream(
        o=do,
        stats={} if dstats is None else {n: g for n, g in zip(DIFFERENTIABLE, dstats) if n in wanted},
        bias="bias" in wanted,
        temperature="temperature" in wanted,
        sink="sink" in wanted,
    )
    grads = backend_module(ATTENTION, backend).backward(problem, Forward(o, frame, z, stat_values), upstream)
    empty = q.new_empty(0)

    def fit(grad, like):  # sums over what was broadcast
        return empty if grad is None else grad.sum_to_size(like.shape).to(like.dtype).clone()

    return (
        grads.q,
        grads.k,
        grads.v,
        fit(grads.bias, bias) if "bias" in wanted else empty,
        fit(grads.temperature, temperature) if "temperature" in wanted else empty.clone(),
        fit(grads.sink, sink) if "sink" in wanted else empty.clone(),
    )


DIFFERENTIABLE = ("logit_variance", "logsumexp", "entropy")


@attention_backward.register_fake
def _(
    do, dstats, q, k, v, bias, mask, temperature, sink, key_lengths, seed, o, frame, z, stat_values,
    scale, softcap, causal, left, right, dropout_p, normalizer, stats, backend, wants,
):  # fmt: skip
    wanted = wants.split(",")

    def like(x, name):
        return x.new_empty(x.shape) if name in wanted else q.new_empty(0)

    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        like(bias, "bias"),
        like(temperature, "temperature"),
        like(sink, "sink"),
    )


def _attention_setup(ctx, inputs, output):
    tensors, ctx.options = inputs[:9], inputs[9:]
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1], output[2])


def _attention_backward(ctx, do, dframe, dz, dstats):
    *tensors, o, frame, z, stat_values = ctx.saved_tensors
    needs = ctx.needs_input_grad
    *_, normalizer, stats, backend = ctx.options
    names = stats.split(",") if stats else []
    wants = [name for name, index in (("bias", 3), ("temperature", 5), ("sink", 6)) if needs[index]]
    packed = None
    if dstats is not None:
        here = [name for name in DIFFERENTIABLE if name in names]
        if here:
            wants += here
            zero = torch.zeros_like(frame)
            packed = torch.stack([dstats[names.index(n)] if n in names else zero for n in DIFFERENTIABLE])
    grads = attention_backward(do, packed, *tensors, o, frame, z, stat_values, *ctx.options, ",".join(wants))
    dq, dk, dv, dbias, dtemperature, dsink = grads
    return (
        dq,
        dk,
        dv,
        dbias if needs[3] else None,
        None,
        dtemperature if needs[5] else None,
        dsink if needs[6] else None,
        *[None] * 11,
    )


attention.register_autograd(_attention_backward, setup_context=_attention_setup)


def _attention_vmap(info, in_dims, *args):
    """Fold the mapped dimension into the batch."""
    size, batch = info.batch_size, None
    for arg, dim in zip(args[:3], in_dims[:3]):
        batch = arg.movedim(dim, 0).shape[1] if dim is not None else arg.shape[0]
    folded = []
    for arg, dim in zip(args[:9], in_dims[:9]):
        if arg is None:
            folded.append(None)
            continue
        arg = arg.movedim(dim, 0) if dim is not None else arg.expand(size, *arg.shape)
        if arg is not None and arg.ndim > 1 and arg.shape[1] == 1 != batch:
            arg = arg.expand(size, batch, *arg.shape[2:])
        folded.append(arg.flatten(0, 1))
    if folded[8] is not None:
        folded[8] = folded[8][:1]
    o, frame, z, stats = attention(*folded, *args[9:])
    shape = (size, batch)
    return (o.unflatten(0, shape), frame.unflatten(0, shape), z.unflatten(0, shape), stats.unflatten(1, shape)), (0, 0, 0, 1)


attention.register_vmap(_attention_vmap)
