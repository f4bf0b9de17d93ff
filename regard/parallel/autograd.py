"""`ParallelAttention`: the autograd function of a call on shards, and the two ways to carry it out."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard._core.problem import Gradients, Problem, Upstream, Whole
from regard.parallel.gradients import KeyGradients
from regard.parallel.layout import Spans
from regard.parallel.merge import Total
from regard.parallel.plan import Plan
from regard.parallel.schemes import ring, stationary, tree, visiting_queries
from regard.statistics import DIFFERENTIABLE


class ShardedQueries:
    """Each rank has its own queries: keys go round a ring; for threshold maps queries visit the keys."""

    @staticmethod
    def query_spans(plan: Plan) -> Spans:
        return plan.queries[plan.group.rank]

    @staticmethod
    def forward(plan: Plan) -> tuple[list[Total], Tensor | None]:
        if plan.problem.choice.family != "threshold":
            return ring.forward(plan), None
        totals, _, c = visiting_queries.forward(plan)
        return totals, c

    @staticmethod
    def backward(plan: Plan, whole: Whole, upstream: Upstream) -> Gradients:
        scheme = visiting_queries if plan.problem.choice.family == "threshold" else ring
        return scheme.backward(plan, whole, upstream)


class ReplicatedQueries:
    """Every rank has all queries: the parts of all ranks' keys are merged by a tree."""

    @staticmethod
    def query_spans(plan: Plan) -> Spans:
        return plan.queries[0]

    @staticmethod
    def forward(plan: Plan) -> tuple[list[Total], Tensor | None]:
        totals, _, c = stationary.compute_parts(plan, ReplicatedQueries._rows(plan), plan.queries[0])
        return [tree.all_merge(plan.group, total) for total in totals], c

    @staticmethod
    def backward(plan: Plan, whole: Whole, upstream: Upstream) -> Gradients:
        rows, keys = ReplicatedQueries._rows(plan), KeyGradients(plan.problem)
        dq, dtemperature = stationary.backward(plan, rows, plan.queries[0], whole, upstream, keys)
        dq = plan.group.all_reduce(dq, "tree backward")
        dtemperature = None if dtemperature is None else plan.group.all_reduce(dtemperature, "tree backward")
        return Gradients(dq, keys.k, keys.v, temperature=dtemperature)

    @staticmethod
    def _rows(plan: Plan) -> Problem:
        full = (*plan.problem.q.shape[:3], plan.problem.k.shape[2])
        dense = {
            name: None if (x := getattr(plan, name)) is None else plan.columns(x, plan.group.rank).expand(full)
            for name in ("bias", "mask")
        }
        return replace(plan.problem, sink=None, **dense)


class ParallelAttention(torch.autograd.Function):
    """(o, statistics [S, B, H, M]) and their gradients."""

    @staticmethod
    def forward(ctx, plan: Plan, scheme, q, k, v, bias, temperature, sink):
        plan = _detach(plan)
        problem = plan.problem
        totals, c = scheme.forward(plan)
        chunks = list(plan.rows(problem, scheme.query_spans(plan)))
        finished = [total.finish(rows) for total, (_, rows) in zip(totals, chunks, strict=True)]
        o, m, z = (torch.cat(parts, 2) for parts in zip(*finished, strict=True))
        values = m.new_empty((len(problem.stats), *m.shape))
        for total, (here, rows) in zip(totals, chunks, strict=True):
            if problem.stats:
                found = total.statistics(rows, *(None if x is None else x[:, :, here] for x in (m, z, c)))
                for name, row in zip(problem.stats, values, strict=True):
                    row[:, :, here] = found[name]
        ctx.plan, ctx.scheme = plan, scheme
        out = o.to(problem.q.dtype)
        exact = o if ctx.needs_input_grad[6] else out  # a temperature's gradient needs o before rounding to 16 bits
        ctx.save_for_backward(out, exact, m, z, c, values, bias, temperature, sink)
        ctx.set_materialize_grads(False)
        return out, values

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dvalues):
        with ctx.plan.group.drain_on_error():
            return _differentiate(ctx, do, dvalues)


def _differentiate(ctx, do, dvalues):
    """Return the gradients of every argument of `ParallelAttention.forward`."""
    plan, problem = ctx.plan, ctx.plan.problem
    o, exact, m, z, c, values, bias, temperature, sink = ctx.saved_tensors
    needs = ctx.needs_input_grad
    do = torch.zeros_like(o) if do is None else do
    delta = (do.to(m.dtype) * exact.to(m.dtype)).sum(-1)
    whole = Whole(m, z, delta, c, _statistic_terms(problem, m, z, values, dvalues), o)
    whole.values = dict(zip(problem.stats, values, strict=True))
    upstream = Upstream(do, _statistic_gradients(problem, dvalues), bias=needs[5], temperature=needs[6])
    grads = ctx.scheme.backward(plan, whole, upstream)
    dsink = None
    if needs[7]:
        weight = torch.where(z == 0, 0.0, torch.exp(problem.sink.to(m.dtype) - m) / z)
        dlogsumexp = 0.0
        if dvalues is not None and "logsumexp" in problem.stats:
            dlogsumexp = dvalues[problem.stats.index("logsumexp")]
        dsink = (weight * (dlogsumexp - delta)).sum_to_size(sink.shape).to(sink.dtype)
    extras = [
        grads.bias.sum_to_size(bias.shape).to(bias.dtype) if needs[5] else None,
        grads.temperature.sum_to_size(temperature.shape).to(temperature.dtype) if needs[6] else None,
    ]
    main = (getattr(grads, name).to(getattr(problem, name).dtype) for name in ("q", "k", "v"))
    return (None, None, *main, *extras, dsink)


def _statistic_gradients(problem: Problem, dvalues: Tensor | None) -> dict[str, Tensor]:
    """Return the upstream gradients of the differentiable statistics."""
    if dvalues is None or not problem.choice.softmax_family:
        return {}
    return {name: x for name, x in zip(problem.stats, dvalues, strict=True) if name in DIFFERENTIABLE}


def _statistic_terms(problem: Problem, m: Tensor, z: Tensor, values: Tensor, dvalues: Tensor | None) -> Tensor | None:
    """Return what the statistics' gradients add to ds: (lift, β, γ, mean) of `Whole.tilt`."""
    if dvalues is None or not problem.choice.softmax_family:
        return None
    zero = torch.zeros_like(m)
    stats, upstream = (dict(zip(problem.stats, x, strict=True)) for x in (values, dvalues))
    lift = upstream.get("logsumexp", zero)
    beta, gamma, mean = zero, zero, zero
    if "entropy" in upstream:
        mass = stats["mass"]
        has_weight = (mass > 0) & (z > 0)
        beta = torch.where(has_weight, upstream["entropy"] / mass.where(has_weight, 1.0), 0.0)
        lift = lift - beta * (stats["entropy"] - torch.log((z * mass).where(has_weight, 1.0)))
    if "logit_variance" in upstream:
        n, mean = stats["visible_keys"], stats["mean_logit"]
        gamma = 2.0 * upstream["logit_variance"] / n.clamp_min(1.0)
    return torch.stack([lift, beta, gamma, mean])


def _detach(plan: Plan) -> Plan:
    """Return the plan with every tensor detached."""
    names = ("q", "k", "v", "bias", "mask", "temperature", "sink")
    problem = plan.problem
    given = {name: getattr(problem, name) for name in names}
    problem = replace(problem, **{name: x.detach() for name, x in given.items() if x is not None})
    bias = None if plan.bias is None else plan.bias.detach()
    return replace(plan, problem=problem, bias=bias)
