"""The autograd function of a call on pieces, and the two schemes that carry it out."""

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


class Sharded:
    """Every rank has its own queries: a ring, or visits for threshold maps."""

    @staticmethod
    def spans(plan: Plan) -> Spans:
        return plan.queries[plan.line.rank]

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


class Shared:
    """Every rank has all queries: its keys' parts, merged by a tree."""

    @staticmethod
    def spans(plan: Plan) -> Spans:
        return plan.queries[0]

    @staticmethod
    def forward(plan: Plan) -> tuple[list[Total], Tensor | None]:
        totals, _, c = stationary.parts(plan, Shared._rows(plan), plan.queries[0])
        plan.known.append(totals[0].rises is not None)
        return [tree.all_merge(plan.line, total) for total in totals], c

    @staticmethod
    def backward(plan: Plan, whole: Whole, upstream: Upstream) -> Gradients:
        rows, keys = Shared._rows(plan), KeyGradients(plan.problem)
        known = plan.known[0]
        dq, heat, columns = stationary.backward(plan, rows, plan.queries[0], whole, upstream, keys, known)
        dq = plan.line.all_reduce(dq, "tree backward")
        heat = None if heat is None else plan.line.all_reduce(heat, "tree backward")
        bias = None
        if columns is not None:
            bias = torch.zeros((*columns.shape[:3], plan.bias.shape[3]), dtype=dq.dtype, device=dq.device)
            visiting_queries.place(plan, bias, columns, plan.line.rank)
            bias = plan.line.all_reduce(bias, "tree backward")
        return Gradients(dq, keys.k, keys.v, bias, heat)

    @staticmethod
    def _rows(plan: Plan):
        full = (*plan.problem.q.shape[:3], plan.problem.k.shape[2])
        dense = {
            name: None if (x := getattr(plan, name)) is None else plan.columns(x, plan.line.rank).expand(full)
            for name in ("bias", "mask")
        }
        return replace(plan.problem, sink=None, **dense)


class Apply(torch.autograd.Function):
    """(o, statistics [S, B, H, M]) and their gradients."""

    @staticmethod
    def forward(ctx, plan: Plan, scheme, q, k, v, bias, temperature, sink):
        plan = replace(_detached(plan), known=[])
        problem = plan.problem
        totals, c = scheme.forward(plan)
        chunks = list(plan.rows(problem, scheme.spans(plan)))
        done = [total.finish(rows) for total, (_, rows) in zip(totals, chunks, strict=True)]
        o, m, z = (torch.cat(parts, 2) for parts in zip(*done, strict=True))
        values = m.new_empty((len(problem.stats), *m.shape))
        for total, (here, rows) in zip(totals, chunks, strict=True):
            if problem.stats:
                found = total.statistics(rows, *(None if x is None else x[:, :, here] for x in (m, z, c)))
                for name, row in zip(problem.stats, values, strict=True):
                    row[:, :, here] = found[name]
        rises = None if totals[0].rises is None else torch.cat([total.rises for total in totals], 2)
        ctx.plan, ctx.scheme = plan, scheme
        out = o.to(problem.q.dtype)
        exact = o if ctx.needs_input_grad[6] else out  # rounded to 16 bits δ would show in a temperature's gradient
        ctx.save_for_backward(out, exact, m, z, c, rises, values, bias, temperature, sink)
        ctx.set_materialize_grads(False)
        return out, values

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dvalues):
        with ctx.plan.line.telling():
            return _pulled(ctx, do, dvalues)


def _pulled(ctx, do, dvalues):
    """The gradients of everything that `Apply` was given."""
    plan, problem = ctx.plan, ctx.plan.problem
    o, exact, m, z, c, rises, values, bias, temperature, sink = ctx.saved_tensors
    needs = ctx.needs_input_grad
    do = torch.zeros_like(o) if do is None else do
    delta = (do.to(m.dtype) * (exact if rises is None else rises).to(m.dtype)).sum(-1)
    if rises is not None:
        delta = torch.where(z == 0, 0.0, delta / z)
    whole = Whole(m, z, delta, c, _tilt(problem, m, z, values, dvalues), o)
    whole.values = dict(zip(problem.stats, values, strict=True))
    upstream = Upstream(do, _pulls(problem, dvalues), bias=needs[5], temperature=needs[6])
    grads = ctx.scheme.backward(plan, whole, upstream)
    dsink = None
    if needs[7]:
        share = torch.where(z == 0, 0.0, torch.exp(problem.sink.to(m.dtype) - m) / z)
        pull = 0.0
        if dvalues is not None and "logsumexp" in problem.stats:
            pull = dvalues[problem.stats.index("logsumexp")]
        dsink = (share * (pull - delta)).sum_to_size(sink.shape).to(sink.dtype)
    extras = [
        grads.bias.sum_to_size(bias.shape).to(bias.dtype) if needs[5] else None,
        grads.temperature.sum_to_size(temperature.shape).to(temperature.dtype) if needs[6] else None,
    ]
    main = (getattr(grads, name).to(getattr(problem, name).dtype) for name in ("q", "k", "v"))
    return (None, None, *main, *extras, dsink)


def _pulls(problem: Problem, dvalues: Tensor | None) -> dict[str, Tensor]:
    """The gradients of the statistics that have one."""
    if dvalues is None or not problem.choice.softmax_family:
        return {}
    return {name: x for name, x in zip(problem.stats, dvalues, strict=True) if name in DIFFERENTIABLE}


def _tilt(problem, m, z, values, dvalues) -> Tensor | None:
    """What the statistics' gradients add to ds: (lift, β, γ, mean) of `Whole`."""
    if dvalues is None or not problem.choice.softmax_family:
        return None
    zero = torch.zeros_like(m)
    stats, pulls = (dict(zip(problem.stats, x, strict=True)) for x in (values, dvalues))
    lift = pulls.get("logsumexp", zero)
    beta, gamma, mean = zero, zero, zero
    if "entropy" in pulls:
        mass = stats["mass"]
        alive = (mass > 0) & (z > 0)
        beta = torch.where(alive, pulls["entropy"] / mass.where(alive, 1.0), 0.0)
        lift = lift - beta * (stats["entropy"] - torch.log((z * mass).where(alive, 1.0)))
    if "logit_variance" in pulls:
        n, mean = stats["visible_keys"], stats["mean_logit"]
        gamma = 2.0 * pulls["logit_variance"] / n.clamp_min(1.0)
    return torch.stack([lift, beta, gamma, mean])


def _detached(plan: Plan) -> Plan:
    names = ("q", "k", "v", "bias", "mask", "temperature", "sink")
    problem = plan.problem
    given = {name: getattr(problem, name) for name in names}
    problem = replace(problem, **{name: x.detach() for name, x in given.items() if x is not None})
    bias = None if plan.bias is None else plan.bias.detach()
    return replace(plan, problem=problem, bias=bias)
