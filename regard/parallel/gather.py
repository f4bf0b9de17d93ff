"""The gather: every rank receives all keys and computes the whole rows of its queries by the ordinary kernels.

For threshold maps, whose τ belongs to the whole row, and for what the engines of parts do not take. As much is sent as
by the ring:

    forward    (W − 1) · n · (D + E) · G · B · itemsize, to every rank
    backward   the sums of dk and dv, in the accumulator's dtype, to the rank that holds the keys

The gathered keys take N · (D + E) · G · B numbers on each rank, with two times as many for their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from regard._call.problem import Forward, Gradients, Problem, Upstream
from regard.parallel.group import pack, unpack
from regard.parallel.layout import count_positions, locate_spans
from regard.parallel.merge import RowGradients, slice_upstream
from regard.parallel.plan import ShardPlan


def forward(plan: ShardPlan) -> Forward:
    """Return the output, row state and statistics of this rank's queries."""
    problem, rows = plan.problem, plan.problem.q.shape[:3]
    like = dict(dtype=problem.accumulator, device=problem.q.device)
    o = torch.empty((*rows, problem.v.shape[-1]), **like)
    state, stats = torch.zeros((2, *rows), **like), torch.zeros((len(problem.stats), *rows), **like)
    found = Forward(o, state[0], state[1], stats)
    for here, chunk in _chunks(plan, *_gather_keys(plan)):
        own = plan.kernels.forward(chunk)
        found.o[:, :, here], found.shift[:, :, here], found.z[:, :, here] = own.o, own.shift, own.z
        found.stats[..., here] = own.stats
    return found


def backward(plan: ShardPlan, saved: Forward, upstream: Upstream, shared: bool) -> Gradients:
    """Return the gradients of this rank's shards; `shared`: every rank has the same queries."""
    problem, keys = plan.problem, _gather_keys(plan)
    sums = RowGradients(problem, upstream)
    dk, dv = (torch.zeros(x.shape, dtype=problem.accumulator, device=x.device) for x in keys)
    dsink = torch.zeros(problem.q.shape[:3], dtype=dk.dtype, device=dk.device) if upstream.sink else None
    for here, chunk in _chunks(plan, *keys):
        known = saved.o[:, :, here], saved.shift[:, :, here], saved.z[:, :, here], saved.stats[..., here]
        own = Forward(*(x.contiguous() for x in known))  # as GPU kernels take them
        grads = plan.kernels.backward(chunk, own, slice_upstream(upstream, here))
        sums.add(grads, here, slice(None))
        dk, dv = dk + grads.k, dv + grads.v
        if dsink is not None:
            dsink[:, :, here] = grads.sink
    k, v = _own_sums(plan, dk, dv, shared)
    return Gradients(sums.q, k, v, sums.bias, sums.temperature, dsink)


def _chunks(plan: ShardPlan, k: Tensor, v: Tensor) -> Iterator[tuple[slice, Problem]]:
    """Yield each chunk of this rank's queries: its slice, and the problem of its rows over all keys."""
    whole = replace(plan.problem, k=k, v=v, queries=plan.total_queries)
    for here, chunk in plan.rows(whole, plan.queries[plan.group.rank]):
        if here.stop > here.start:
            yield here, plan.localize(chunk)


def _gather_keys(plan: ShardPlan) -> tuple[Tensor, Tensor]:
    """Return k and v of all ranks, in the order of their positions."""
    mine, group = (plan.problem.k, plan.problem.v), plan.group
    whole = tuple(x.new_empty((*x.shape[:2], plan.total_keys, x.shape[3])) for x in mine)
    for owner, own in enumerate(plan.keys):
        shapes = [(*x.shape[:2], count_positions(own), x.shape[3]) for x in mine]
        flat = pack(*mine) if owner == group.rank else mine[0].new_empty(sum(map(math.prod, shapes)))
        parts = unpack(group.broadcast(flat, owner, "gather forward", owner), shapes)
        for x, part in zip(whole, parts, strict=True):
            for (start, stop), here in locate_spans(own):
                x[:, :, start:stop] = part[:, :, here]
    return whole  # type: ignore[return-value]


def _own_sums(plan: ShardPlan, dk: Tensor, dv: Tensor, shared: bool) -> tuple[Tensor, Tensor]:
    """Return this rank's positions of dk and dv, summed over the ranks unless all of them have the same."""
    group, mine = plan.group, (dk, dv)
    for owner, own in enumerate(plan.keys):
        cut = [torch.cat([x[:, :, start:stop] for start, stop in own], 2) for x in (dk, dv)]
        if not shared:
            total = group.reduce(pack(*cut), owner, "gather backward", owner)
            cut = unpack(total, [x.shape for x in cut])
        if owner == group.rank:
            mine = cut[0], cut[1]
    return mine
