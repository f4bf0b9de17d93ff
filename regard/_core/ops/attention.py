"""attention: q [B, H, M, D], k [B, G, N, D], v [B, G, N, E] → (o, shift, z, stats), and its backward.

Nine tensors come first (q k v bias mask temperature sink key_lengths seed), then nine options; softcap 0 and left or
right −1 mean none. bias, mask, temperature and sink arrive unexpanded, so that their gradients have their own shape.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from regard import normalizers
from regard._core.ops.backends import ATTENTION, accumulator, backend_module, in_place, refuse_tangents
from regard._core.problem import Forward, Problem, Upstream
from regard.statistics import DIFFERENTIABLE

TENSORS = 9


def problem_of(q, k, v, bias, mask, temperature, sink, key_lengths, seed, *options) -> Problem:
    scale, softcap, causal, left, right, dropout_p, normalizer, stats, _ = options
    rows = q.shape[:3]
    full = (*rows, k.shape[2])
    return Problem(
        q=q,
        k=k,
        v=v,
        choice=normalizers.get(normalizer),
        scale=scale,
        softcap=softcap or None,
        bias=None if bias is None else bias.expand(full),
        mask=None if mask is None else mask.expand(full),
        temperature=None if temperature is None else temperature.expand(rows),
        sink=None if sink is None else sink.expand(rows),
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
    refuse_tangents(q, k, v, bias, temperature, sink)
    options = (scale, softcap, causal, left, right, dropout_p, normalizer, stats, backend)
    problem = problem_of(q, k, v, bias, mask, temperature, sink, key_lengths, seed, *options)
    with in_place(backend):
        result = backend_module(ATTENTION, backend).forward(problem)
    return result.o, result.shift, result.z, result.stats


@attention.register_fake
def _(q, k, v, *rest):
    stats = rest[-2]
    rows, wide = q.shape[:3], accumulator(q.dtype)
    names = len(stats.split(",")) if stats else 0
    return (
        q.new_empty((*rows, v.shape[3])),
        q.new_empty(rows, dtype=wide),
        q.new_empty(rows, dtype=wide),
        q.new_empty((names, *rows), dtype=wide),
    )


@custom_op("regard::attention_backward", mutates_args=())
def attention_backward(
    do: Tensor,
    dstats: Tensor | None,
    o: Tensor,
    shift: Tensor,
    z: Tensor,
    stat_values: Tensor,
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
    wants: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias, dtemperature, dsink); those not in `wants` are empty. dstats [3, B, H, M] or None."""
    refuse_tangents(do, dstats, q, k, v, bias, temperature, sink)
    options = (scale, softcap, causal, left, right, dropout_p, normalizer, stats, backend)
    problem = problem_of(q, k, v, bias, mask, temperature, sink, key_lengths, seed, *options)
    wanted = wants.split(",")
    given = {} if dstats is None else dict(zip(DIFFERENTIABLE, dstats, strict=True))
    upstream = Upstream(
        o=do,
        stats={name: grad for name, grad in given.items() if name in wanted},
        bias="bias" in wanted,
        temperature="temperature" in wanted,
        sink="sink" in wanted,
    )
    with in_place(backend):
        grads = backend_module(ATTENTION, backend).backward(problem, Forward(o, shift, z, stat_values), upstream)

    def fit(name, grad, like):  # sums over what was broadcast
        return grad.sum_to_size(like.shape).to(like.dtype).clone() if name in wanted else q.new_empty(0)

    return (
        grads.q,
        grads.k,
        grads.v,
        fit("bias", grads.bias, bias),
        fit("temperature", grads.temperature, temperature),
        fit("sink", grads.sink, sink),
    )


@attention_backward.register_fake
def _(do, dstats, o, shift, z, stat_values, q, k, v, bias, mask, temperature, sink, *rest):
    wanted = rest[-1].split(",")

    def like(name, x):
        return x.new_empty(x.shape) if name in wanted else q.new_empty(0)

    extras = (("bias", bias), ("temperature", temperature), ("sink", sink))
    return (*(x.new_empty(x.shape) for x in (q, k, v)), *(like(name, x) for name, x in extras))


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:TENSORS], *output)
    ctx.options = inputs[TENSORS:]
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dframe, dz, dstats):
    *tensors, o, shift, z, stat_values = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        return _once_more(ctx, tensors, do, dstats)
    needs = ctx.needs_input_grad
    stats = ctx.options[-2]
    names = stats.split(",") if stats else []
    wants = [name for name, index in (("bias", 3), ("temperature", 5), ("sink", 6)) if needs[index]]
    do = torch.zeros_like(o) if do is None else do
    packed = None
    if dstats is not None:
        wants += [name for name in DIFFERENTIABLE if name in names]
        zero = torch.zeros_like(shift)
        packed = torch.stack([dstats[names.index(n)] if n in names else zero for n in DIFFERENTIABLE])
    grads = attention_backward(do, packed, o, shift, z, stat_values, *tensors, *ctx.options, ",".join(wants))
    dq, dk, dv, dbias, dtemperature, dsink = grads
    extras = (dbias if needs[3] else None, None, dtemperature if needs[5] else None, dsink if needs[6] else None)
    return (dq, dk, dv, *extras, *[None] * 11)


def _once_more(ctx, tensors, do, dstats):
    """The same gradients as a graph that has gradients itself: through the float64 reference, block by block."""
    from regard import reference

    own = [None if x is None else x.view_as(x) for x in tensors]  # one may hang on another: each counts for itself
    problem = problem_of(*own, *ctx.options)
    out, stats = reference.of_problem(problem)
    pairs = [(out, do)]
    if dstats is not None:
        pairs += [(stats[k], dstats[k]) for k, name in enumerate(problem.stats) if name in DIFFERENTIABLE]
    pairs = [(x, upstream.to(x.dtype)) for x, upstream in pairs if upstream is not None and x.requires_grad]
    needs = ctx.needs_input_grad[:TENSORS]
    asked = [x for x, needed in zip(own, needs, strict=True) if needed]
    if not pairs:
        return *(torch.zeros_like(x) if needed else None for x, needed in zip(own, needs, strict=True)), *[None] * 9
    outputs, upstreams = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, asked, upstreams, create_graph=True, allow_unused=True))
    return *(next(found) if needed else None for needed in needs), *[None] * 9


attention.register_autograd(_backward, setup_context=_setup)


def _fold(size: int, batch: int, arg: Tensor | None, dim: int | None, seed: bool) -> Tensor | None:
    """A mapped (or shared) argument with the mapped dimension folded into its batch."""
    if arg is None or seed:
        return arg if arg is None or dim is None else arg.movedim(dim, 0)[0]
    arg = arg.movedim(dim, 0) if dim is not None else arg.expand(size, *arg.shape)
    arg = arg.expand(size, batch, *arg.shape[2:])
    return arg.flatten(0, 1)


def _vmap(info, in_dims, *args):
    q, dim = args[0], in_dims[0]
    batch = (q.movedim(dim, 0)[0] if dim is not None else q).shape[0]
    tensors = [
        _fold(info.batch_size, batch, arg, d, seed=index == TENSORS - 1)
        for index, (arg, d) in enumerate(zip(args[:TENSORS], in_dims[:TENSORS], strict=True))
    ]
    o, shift, z, stats = attention(*tensors, *args[TENSORS:])
    shape = (info.batch_size, batch)
    return (o.unflatten(0, shape), shift.unflatten(0, shape), z.unflatten(0, shape), stats.unflatten(1, shape)), (
        0,
        0,
        0,
        1,
    )


attention.register_vmap(_vmap)
