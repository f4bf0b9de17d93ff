"""Gradients of fused attention: the autograd function of eager calls, and what it shares with the custom op.

    forward    backend.forward(problem)                     → o, row state, statistics
    backward   backend.backward(problem, forward, upstream) → dq, dk, dv, and those of `LEARNED`

With `create_graph=True` the gradients come from the float64 reference instead, block by block, and have gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard._call.problem import OPTIONAL, TENSORS, Forward, Problem, Upstream
from regard.statistics import DIFFERENTIABLE

FUSED = "ScaledDotProduct"  # how torch calls the backward nodes of its fused kernels
BATCHED = torch._C._dispatch_key_parse("Batched")  # the key of tensors that torch's older vmap maps over
LEARNED = {name: TENSORS.index(name) for name in OPTIONAL}  # their places in TENSORS


def places_of(wants: Sequence[str]) -> tuple[int, ...]:
    """Where q, k, v and the inputs of these names stand in `TENSORS`."""
    return 0, 1, 2, *(place for name, place in LEARNED.items() if name in wants)


def spread(found: Iterable[Any], places: Iterable[int]) -> list[Any]:
    """One entry for each of `TENSORS`: what was found at its place, None elsewhere."""
    at_place = dict(zip(places, found, strict=True))
    return [at_place.get(at) for at in range(len(TENSORS))]


class FusedAttention(torch.autograd.Function):
    """(o, statistics [S, B, H, M]) of a problem; the tensors in the order of `TENSORS`, options not expanded."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, backend: ModuleType, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        result = backend.forward(problem)
        ctx.save_for_backward(*tensors, result.o, result.shift, result.z, result.stats)
        ctx.options, ctx.backend = problem.without_tensors(), backend
        ctx.set_materialize_grads(False)
        if not problem.choice.softmax_family:
            ctx.mark_non_differentiable(result.stats)
        return result.o, result.stats

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dstats: Tensor | None) -> tuple:  # type: ignore[override]
        kept = ctx.saved_tensors  # once: checkpointing recomputes at each look
        tensors, saved = kept[: len(TENSORS)], Forward(*kept[len(TENSORS) :])
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() or is_batched(do) or is_batched(dstats):  # create_graph=True, or mapped over
            with torch.enable_grad():
                return None, None, *differentiable_gradients(ctx.options, tensors, needs, do, dstats)
        problem = ctx.options.with_tensors(tensors)
        wants = [name for name, place in LEARNED.items() if needs[place]]
        do = torch.zeros_like(saved.o) if do is None else do
        grads = compute_gradients(ctx.backend, problem, saved, do, dstats, tensors, wants)
        return None, None, *spread(grads, places_of(wants))


def is_batched(x: Tensor | None) -> bool:
    """True for a gradient that `torch.autograd.grad(is_grads_batched=True)` maps over."""
    return x is not None and torch._C._dispatch_keys(x).has(BATCHED)


class FusedFormula(torch.autograd.Function):
    """A formula of a few tensors by kernels: forward(*tensors, *numbers) and backward(dy, *tensors, *numbers).

    With `create_graph=True`, or mapped over, its gradients are those of `formula`, the same in torch's operations.
    """

    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, formula: Callable, numbers: tuple, *tensors: Tensor) -> Tensor:
        ctx.kernels, ctx.formula, ctx.numbers = kernels, formula, numbers
        ctx.save_for_backward(*tensors)
        return kernels.forward(*tensors, *numbers)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:  # type: ignore[override]
        tensors = ctx.saved_tensors
        if not (torch.is_grad_enabled() or is_batched(dy)):
            found = ctx.kernels.backward(dy, *tensors, *ctx.numbers)
            return None, None, None, *(found if isinstance(found, tuple) else (found,))
        with torch.enable_grad():
            own = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in tensors]
            y = ctx.formula(*own, *ctx.numbers)
        return None, None, None, *torch.autograd.grad(y, own, dy, create_graph=torch.is_grad_enabled())


def compute_gradients(
    backend: ModuleType, problem: Problem, saved: Forward, do: Tensor, dstats: Tensor | None, tensors: Any, wants: Any
) -> list[Tensor]:
    """(dq, dk, dv, and those of the names `wants`, summed over what was broadcast) by a backend."""
    given = {}
    if dstats is not None:
        given = {name: dstats[problem.stats.index(name)] for name in DIFFERENTIABLE if name in problem.stats}
    grads = backend.backward(problem, saved, Upstream(do, given, **{name: name in wants for name in LEARNED}))
    own = [(getattr(grads, TENSORS[at]), tensors[at]) for at in places_of(wants)[3:]]
    return [grads.q, grads.k, grads.v, *(dx.sum_to_size(x.shape).to(x.dtype).clone() for dx, x in own)]


def differentiable_gradients(
    options: Problem, tensors: Sequence[Tensor | None], needs: Sequence[bool], do: Tensor | None, dstats: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of the tensors as a graph that has gradients itself, by the float64 reference."""
    from regard import reference

    own = [None if x is None else x.view_as(x) for x in tensors]  # one may be made of another: each counts for itself
    problem = options.with_tensors(own)
    out, stats = reference.of_problem(problem)
    pairs = [(out, do)]
    if dstats is not None:
        pairs += [(stats[at], dstats[at]) for at, name in enumerate(problem.stats) if name in DIFFERENTIABLE]
    pairs = [(x, upstream.to(x.dtype)) for x, upstream in pairs if upstream is not None and x.requires_grad]
    if not pairs:
        return tuple(
            torch.zeros_like(x) if needed and x is not None else None for x, needed in zip(own, needs, strict=True)
        )
    outputs, upstreams = zip(*pairs, strict=True)
    asked = [x for x, needed in zip(own, needs, strict=True) if needed and x is not None]
    found = iter(torch.autograd.grad(outputs, asked, upstreams, create_graph=True, allow_unused=True))
    return tuple(next(found) if needed else None for needed in needs)


def differentiable_twice(out: Tensor, inputs: tuple[Tensor, ...], attend: Callable[..., Tensor]) -> Tensor:
    """out = attend(*inputs) by torch's fused attention, whose gradients have gradients now; inputs are q, k and v.

    With create_graph=True its gradients are made anew by torch's plain products, N × N. The inputs are remembered until
    the first backward, which frees what torch has saved too; not at all where somebody else decides what is saved
    (checkpointing, offloading).
    """
    node = out.grad_fn
    if node is None or is_saved_elsewhere() or not node.name().startswith(FUSED):
        return out
    kept = list(inputs)

    def again(found: tuple[Tensor | None, ...], upstream: tuple[Tensor | None, ...]):
        if not torch.is_grad_enabled():
            kept.clear()
            return None
        wanted = [at for at, gradient in enumerate(found) if gradient is not None]
        shapes = {at: x.shape for at, x in enumerate(kept)}
        if upstream[0] is None or any(shapes.get(at) != found[at].shape for at in wanted):  # type: ignore[union-attr]
            return None
        own = [x.view_as(x) for x in kept]  # one may hang on another: each counts for itself
        with sdpa_kernel(SDPBackend.MATH):
            o = attend(*own)
        made = iter(torch.autograd.grad(o, [own[at] for at in wanted], upstream[0], create_graph=True))
        return tuple(next(made) if at in wanted else None for at in range(len(found)))

    node.register_hook(again)
    return out


def is_saved_elsewhere() -> bool:
    """True if saved-tensor hooks (checkpointing, offloading) decide what this forward saves for backward."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
