"""`ParallelAttention`: the autograd function of a call on shards."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard._call.problem import Forward, Gradients, Problem, Upstream, Whole
from regard.parallel import gather, tree
from regard.parallel.plan import ShardPlan
from regard.statistics import DIFFERENTIABLE


class ParallelAttention(torch.autograd.Function):
    """(o, statistics [S, B, H, M]) and their gradients.

    `scheme` is `ring` where each rank has its own queries and `tree` where every rank has all of them; without an
    engine of parts both gather the keys.
    """

    @staticmethod
    def forward(ctx: Any, plan: ShardPlan, scheme: ModuleType, q, k, v, bias, temperature, sink):
        plan = _detach(plan)
        found = gather.forward(plan) if plan.engine is None else _merge_parts(plan, scheme)
        ctx.plan, ctx.scheme = plan, scheme
        out = found.o.to(plan.problem.q.dtype)
        exact = found.o if ctx.needs_input_grad[6] else out  # a temperature's gradient needs o before rounding
        ctx.save_for_backward(out, exact, found.shift, found.z, found.stats, bias, temperature, sink)
        ctx.set_materialize_grads(False)
        return out, found.stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dvalues: Tensor | None) -> tuple:
        with ctx.plan.group.drain_on_error():
            return _differentiate(ctx, do, dvalues)


def _merge_parts(plan: ShardPlan, scheme: ModuleType) -> Forward:
    """Return whole rows from the parts that a scheme merges; they have no statistics."""
    chunks = plan.rows(plan.problem, plan.queries[plan.group.rank])
    finished = [total.finish(rows) for total, (_, rows) in zip(scheme.forward(plan), chunks, strict=True)]
    o, m, z = (torch.cat(parts, 2) for parts in zip(*finished, strict=True))
    return Forward(o, m, z, m.new_empty((0, *m.shape)))


def _differentiate(ctx: Any, do: Tensor | None, dvalues: Tensor | None) -> tuple:
    """Return the gradients of every argument of `ParallelAttention.forward`."""
    plan, problem = ctx.plan, ctx.plan.problem
    o, exact, m, z, values, *inputs = ctx.saved_tensors
    needs = dict(zip(("bias", "temperature", "sink"), ctx.needs_input_grad[5:], strict=True))
    do = torch.zeros_like(o) if do is None else do
    upstream = Upstream(do, _statistic_gradients(problem, dvalues), **needs)
    if plan.engine is None:
        grads = gather.backward(plan, Forward(o, m, z, values), upstream, shared=ctx.scheme is tree)
    else:
        grads = _differentiate_parts(ctx, exact, Whole(m, z, m, o), upstream)
    main = (getattr(grads, name).to(getattr(problem, name).dtype) for name in ("q", "k", "v"))
    extras = (
        getattr(grads, name).sum_to_size(x.shape).to(x.dtype) if needed else None
        for (name, needed), x in zip(needs.items(), inputs, strict=True)
    )
    return None, None, *main, *extras


def _differentiate_parts(ctx: Any, exact: Tensor, whole: Whole, upstream: Upstream) -> Gradients:
    """Return the gradients from the parts of rows; `exact` is the output before rounding."""
    m, z, sink = whole.m, whole.z, ctx.plan.problem.sink
    delta = (upstream.o.to(m.dtype) * exact.to(m.dtype)).sum(-1)
    grads = ctx.scheme.backward(ctx.plan, replace(whole, delta=delta), replace(upstream, sink=False))
    if upstream.sink:
        grads.sink = torch.where(z == 0, 0.0, torch.exp(sink.to(m.dtype) - m) / z) * -delta
    return grads


def _statistic_gradients(problem: Problem, dvalues: Tensor | None) -> dict[str, Tensor]:
    """Return the upstream gradients of the differentiable statistics."""
    if dvalues is None or not problem.choice.softmax_family:
        return {}
    return {name: x for name, x in zip(problem.stats, dvalues, strict=True) if name in DIFFERENTIABLE}


def _detach(plan: ShardPlan) -> ShardPlan:
    """Return the plan with every tensor detached."""
    names = ("q", "k", "v", "bias", "mask", "temperature", "sink")
    problem = plan.problem
    given = {name: getattr(problem, name) for name in names}
    problem = replace(problem, **{name: x.detach() for name, x in given.items() if x is not None})
    bias = None if plan.bias is None else plan.bias.detach()
    return replace(plan, problem=problem, bias=bias)
