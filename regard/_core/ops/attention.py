"""The custom ops of fused attention, for torch.compile, torch.export, vmap and modes.

Eager calls skip them: `_core/execute.run_kernels` decides.

    regard::attention            q [B, H, M, D], k [B, G, N, D], v [B, G, N, E], … → (o, shift, z, statistics)
    regard::attention_backward   do, dstatistics, (o, shift, z, statistics), q, k, v, … → gradients

The tensors come first (`problem.TENSORS`), options in the order of `Problem.flatten`, and the backend last. What may
be broadcast arrives unexpanded, so that its gradient has its own shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from regard._call.problem import OPTIONS_SCHEMA, TENSORS, WIRED, Forward, unflatten
from regard._core.derivatives.autograd import (
    LEARNED,
    compute_gradients,
    differentiable_gradients,
    places_of,
    spread,
)
from regard._core.ops.backends import ATTENTION, backend_module, default_device, refuse_tangents
from regard._facts import accumulator

COUNT = len(TENSORS)
STATS = COUNT - 3 + [name for name, _ in WIRED].index("stats")  # the names among what follows q, k and v
INPUTS = ", ".join(["Tensor q, Tensor k, Tensor v", *(f"Tensor? {name}" for name in TENSORS[3:]), OPTIONS_SCHEMA])
SAVED = "Tensor o, Tensor shift, Tensor z, Tensor stat_values"  # the fields of `Forward`
DIFFERENTIABLE_INPUTS = places_of(tuple(LEARNED))  # places in TENSORS


@custom_op("regard::attention", mutates_args=(), schema=f"({INPUTS}, str backend) -> (Tensor, Tensor, Tensor, Tensor)")
def attention(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fused attention of one problem: o, the row state and the statistics [S, B, H, M]."""
    tensors, (*options, backend) = inputs[:COUNT], inputs[COUNT:]
    refuse_tangents(*(tensors[place] for place in DIFFERENTIABLE_INPUTS))
    problem = unflatten(tensors, options)
    with default_device(backend):
        result = backend_module(ATTENTION, backend).forward(problem)
    return result.o, result.shift, result.z, result.stats


@attention.register_fake
def _(q, k, v, *rest):
    stats = rest[STATS]
    rows, wide = q.shape[:3], accumulator(q.dtype)
    names = len(stats.split(",")) if stats else 0
    return (
        q.new_empty((*rows, v.shape[3])),
        q.new_empty(rows, dtype=wide),
        q.new_empty(rows, dtype=wide),
        q.new_empty((names, *rows), dtype=wide),
    )


@custom_op(
    "regard::attention_backward",
    mutates_args=(),
    schema=f"(Tensor do, Tensor? dstats, {SAVED}, {INPUTS}, str backend, str wants) -> "
    f"({', '.join(['Tensor'] * len(DIFFERENTIABLE_INPUTS))})",
)
def attention_backward(do: Tensor, dstats: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    """(dq, dk, dv, then of `LEARNED`); those not named in `wants` are empty. dstats [S, B, H, M] or None."""
    saved, tensors, (*options, backend, wants) = Forward(*inputs[:4]), inputs[4 : 4 + COUNT], inputs[4 + COUNT :]
    refuse_tangents(do, dstats, *(tensors[place] for place in DIFFERENTIABLE_INPUTS))
    problem = unflatten(tensors, options)
    wanted = wants.split(",")
    with default_device(backend):
        module = backend_module(ATTENTION, backend)
        grads = compute_gradients(module, problem, saved, do, dstats, tensors, wanted)
    found = spread(grads, places_of(wanted))
    return tuple(do.new_empty(0) if found[at] is None else found[at] for at in DIFFERENTIABLE_INPUTS)


@attention_backward.register_fake
def _(do, dstats, o, shift, z, stat_values, *rest):
    tensors, wanted = rest[:COUNT], rest[-1].split(",")
    q, k, v = tensors[:3]

    def like(name, x):
        return x.new_empty(x.shape) if name in wanted else q.new_empty(0)

    extras = (like(name, tensors[place]) for name, place in LEARNED.items())
    return (*(x.new_empty(x.shape) for x in (q, k, v)), *extras)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:COUNT], *output)
    ctx.options = inputs[COUNT:]
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dshift, dz, dstats):
    kept = ctx.saved_tensors  # once: checkpointing recomputes at each look
    tensors, saved = kept[:COUNT], kept[COUNT:]
    needs, rest = ctx.needs_input_grad, [None] * len(ctx.options)
    if torch.is_grad_enabled():  # create_graph=True
        template = unflatten(tensors, ctx.options[:-1]).without_tensors()
        return *differentiable_gradients(template, tensors, needs[:COUNT], do, dstats), *rest
    wants = [name for name, place in LEARNED.items() if needs[place]]
    do = torch.zeros_like(saved[0]) if do is None else do
    grads = attention_backward(do, dstats, *saved, *tensors, *ctx.options, ",".join(wants))
    found, wanted = spread(grads, DIFFERENTIABLE_INPUTS), places_of(wants)
    return *(x if at in wanted else None for at, x in enumerate(found)), *rest


attention.register_autograd(_backward, setup_context=_setup)


@register_flop_formula([torch.ops.regard.attention])
def _count_flops(q, k, v, *_, out_shape=None, **__) -> int:
    """Two products over all pairs, as torch counts its own attention: masks and the normaliser are left out."""
    batch, heads, queries, width = q
    return 2 * batch * heads * queries * k[2] * (width + v[3])


@register_flop_formula([torch.ops.regard.attention_backward])
def _count_backward_flops(do, dstats, o, shift, z, stat_values, q, k, v, *_, out_shape=None, **__) -> int:
    """Five products over all pairs: scores, dv, dp, dq and dk."""
    batch, heads, queries, width = q
    return 2 * batch * heads * queries * k[2] * (3 * width + 2 * v[3])


UNMAPPED = {  # inputs that have no batch
    "score_params": "params of score_mod: every entry has the same",
    "relative": "a relative bias: every entry has the same; pass a dense attn_mask",
}


def _fold_batch(size: int, batch: int, name: str, arg: Tensor | None, dim: int | None) -> Tensor | None:
    """Fold the mapped dimension of an argument (or of copies of a shared one) into its batch."""
    if arg is None:
        return None
    if name == "seed":
        return arg if dim is None else arg.movedim(dim, 0)[0]
    if name in UNMAPPED:
        if dim is not None:
            raise NotImplementedError(f"vmap over {UNMAPPED[name]}")
        return arg
    arg = arg.movedim(dim, 0) if dim is not None else arg.expand(size, *arg.shape)
    if name == "interval":  # [size, 3, B, H, M]
        return arg.expand(size, 3, batch, *arg.shape[3:]).transpose(0, 1).flatten(1, 2)
    return arg.expand(size, batch, *arg.shape[2:]).flatten(0, 1)


def _vmap(info, in_dims, *args):
    q, dim = args[0], in_dims[0]
    batch = (q.movedim(dim, 0)[0] if dim is not None else q).shape[0]
    tensors = [
        _fold_batch(info.batch_size, batch, name, arg, d)
        for name, arg, d in zip(TENSORS, args[:COUNT], in_dims[:COUNT], strict=True)
    ]
    o, shift, z, stats = attention(*tensors, *args[COUNT:])
    shape = (info.batch_size, batch)
    outputs = o.unflatten(0, shape), shift.unflatten(0, shape), z.unflatten(0, shape), stats.unflatten(1, shape)
    return outputs, (0, 0, 0, 1)


attention.register_vmap(_vmap)
