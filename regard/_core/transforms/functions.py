"""Fused attention as functions that torch.func and forward mode can transform, to any order.

    Attention   x ↦ (o, row state)          kernels
    Tangent     (x, x′) ↦ o′                kernels for tangents of q, k and v; blocks of the reference for the others
    Gradient    (do, x) ↦ dx                kernels

The tangent of Attention is Tangent and its backward is Gradient; the derivatives of these two, which forward over
reverse and second derivatives need, come from the reference, block by block. x are the tensors in the order of
`problem.TENSORS`, options not expanded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard._core.autograd import LEARNED, fit_gradient, make_upstream
from regard._core.ops.backends import ATTENTION, backend_module, default_device
from regard._core.problem import TENSORS, Along, Forward, Problem
from regard._core.transforms.blocked import Derivatives

COUNT = len(TENSORS)
Maybe = Tensor | None


class Attention(torch.autograd.Function):
    """(o, shift, z) of a problem."""

    @staticmethod
    def forward(options: Problem, backend: str, *tensors: Maybe) -> tuple[Tensor, Tensor, Tensor]:
        with default_device(backend):
            result = backend_module(ATTENTION, backend).forward(options.with_tensors(tensors))
        return result.o, result.shift, result.z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.options, ctx.backend, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Maybe, *_: Maybe) -> tuple:  # type: ignore[override]
        found: list[Maybe] = [None] * COUNT
        if do is not None:
            kept = ctx.saved_tensors  # once: checkpointing recomputes at each look
            wants = ",".join(name for name, place in LEARNED.items() if ctx.needs_input_grad[2 + place])
            grads = Gradient.apply(ctx.options, ctx.backend, wants, do, *kept[COUNT:], *kept[:COUNT])
            for at, gradient in zip(places_of(wants), grads, strict=True):
                found[at] = gradient
        return None, None, *found

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple:
        kept = ctx.saved_tensors
        if all(x is None for x in tangents[2:]):
            return None, None, None
        return Tangent.apply(ctx.options, ctx.backend, *kept[COUNT:], *kept[:COUNT], *tangents[2:]), None, None


def places_of(wants: str) -> tuple[int, ...]:
    """Where q, k, v and the inputs of these names, joined by commas, stand in `TENSORS`."""
    return 0, 1, 2, *(place for name, place in LEARNED.items() if name in wants.split(","))


class Tangent(torch.autograd.Function):
    """o′ of a problem whose tensors have tangents; its row state is the forward's."""

    @staticmethod
    def forward(options: Problem, backend: str, o: Tensor, shift: Tensor, z: Tensor, *given: Maybe) -> Tensor:
        tensors, tangents = given[:COUNT], given[COUNT:]
        if options.dropout_p or any(x is not None for x in tangents[3:]):
            return Derivatives(options, tensors).tangent(tangents).to(o.dtype)
        saved = Forward(o, shift, z, o.new_empty(0))
        with default_device(backend):
            return backend_module(ATTENTION, backend).tangent(
                options.with_tensors(tensors), saved, Along(*tangents[:3])
            )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.options, _, _, _, _, *given = inputs
        ctx.save_for_backward(*given)
        ctx.save_for_forward(*given)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, upstream: Maybe) -> tuple:  # type: ignore[override]
        if upstream is None:
            return (None,) * (5 + 2 * COUNT)
        kept = ctx.saved_tensors
        tensors, tangents = kept[:COUNT], kept[COUNT:]
        found, moved = Derivatives(ctx.options, tensors).tangent_vjp(tangents, upstream)
        moved = [None if t is None else x for x, t in zip(moved, tangents, strict=True)]
        return None, None, None, None, None, *found, *moved

    @staticmethod
    def jvp(ctx: Any, *moved: Any) -> Tensor:
        kept = ctx.saved_tensors
        found = Derivatives(ctx.options, kept[:COUNT])
        o = found.tangent_jvp(kept[COUNT:], moved[5 : 5 + COUNT], moved[5 + COUNT :])
        return o.to(kept[0].dtype)


class Gradient(torch.autograd.Function):
    """(dq, dk, dv, and those of `wants`, joined by commas) of a problem; o, shift and z are its forward's."""

    @staticmethod
    def forward(
        options: Problem, backend: str, wants: str, do: Tensor, o: Tensor, shift: Tensor, z: Tensor,
        *tensors: Maybe,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        problem, saved = options.with_tensors(tensors), Forward(o, shift, z, o.new_empty(0))
        with default_device(backend):
            upstream = make_upstream(problem, do, None, wants.split(","))
            grads = backend_module(ATTENTION, backend).backward(problem, saved, upstream)
        extra = (fit_gradient(grads, TENSORS[at], tensors[at]) for at in places_of(wants)[3:])
        return grads.q, grads.k, grads.v, *extra

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.options, _, ctx.wants, do, _, _, _, *tensors = inputs
        ctx.save_for_backward(do, *tensors)
        ctx.save_for_forward(do, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *upstream: Maybe) -> tuple:  # type: ignore[override]
        do, *tensors = ctx.saved_tensors
        given: list[Maybe] = [None] * COUNT
        for at, x in zip(places_of(ctx.wants), upstream, strict=True):
            given[at] = x
        d_do, found = Derivatives(ctx.options, tensors).gradient_vjp(do, given)
        return None, None, None, d_do, None, None, None, *found

    @staticmethod
    def jvp(ctx: Any, *moved: Any) -> tuple[Maybe, ...]:
        do, *tensors = ctx.saved_tensors
        found = Derivatives(ctx.options, tensors).gradient_jvp(do, moved[3], moved[7:])
        return tuple(found[at] for at in places_of(ctx.wants))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *given: Any) -> tuple:
        """One call per entry: torch.func.jacrev maps over `do` alone, and kernels cannot be mapped."""

        def take(i: int) -> list:
            return [x if dim is None else x.select(dim, i) for x, dim in zip(given, in_dims, strict=True)]

        grads = [Gradient.apply(*take(i)) for i in range(info.batch_size)]
        found = tuple(torch.stack(x) for x in zip(*grads, strict=True))
        return found, (0,) * len(found)
