"""Keys travel, queries stay: the ring, for ratio and pointwise maps.

    forward    step t: rank r attends to the keys of rank r − t, while those of rank r − t − 1 are on their way
    backward   the same round for k and v; dk and dv follow one step behind and arrive home after the last

Each transfer is posted before the work that it runs beside. Sent per rank, with n keys on each and W ranks:

    forward    (W − 1) · n · (D + E) · G · B · itemsize
    backward   that, and (W − 1) · n · (D + E) · G · B · itemsize of the accumulator
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard._core.problem import Gradients, Upstream, Whole
from regard.parallel.gradients import KeyGradients, RowGradients, rows_of, upstream_of
from regard.parallel.layout import size
from regard.parallel.merge import Total, join, nothing
from regard.parallel.plan import Plan


def forward(plan: Plan) -> list[Total]:
    """The totals of this rank's query chunks, every key of every rank in them."""
    problem, line = plan.problem, plan.line
    totals = [Total(problem.choice) for _ in plan.queries[line.rank]]
    for owner, k, v in _visitors(plan, "ring forward"):
        for here, _, pair in plan.pairs(problem, plan.queries[line.rank], plan.keys[owner], k, v):
            join(totals, plan.queries[line.rank], here, plan.engine.forward(pair))
    for total, (_, rows) in zip(totals, plan.rows(problem, plan.queries[line.rank]), strict=True):
        if total.o is None:
            total.add(nothing(rows, plan.mixes))
    return totals


def backward(plan: Plan, whole: Whole, upstream: Upstream) -> Gradients:
    problem, line = plan.problem, plan.line
    rows, keys = RowGradients(problem, upstream), KeyGradients(problem)
    pending = None  # dk and dv of the visitor, from the ranks it has been to
    for step, (owner, k, v) in enumerate(_visitors(plan, "ring backward")):
        visitor = keys if step == 0 else KeyGradients(problem, k, v)
        for here, there, pair in plan.pairs(problem, plan.queries[line.rank], plan.keys[owner], k, v):
            grads = plan.engine.backward(pair, rows_of(whole, here), upstream_of(upstream, here))
            rows.add(grads, here, slice(pair.first_key, pair.first_key + pair.k.shape[2]))
            visitor.add(grads, there)
        if step:
            if pending is not None:
                visitor.flat += pending.wait()
            following = visitor.flat.new_empty(_size(plan, (owner - 1) % line.world))  # the next; at last, its own
            pending = line.exchange(visitor.flat, following, "ring backward", step)
    if pending is not None:
        keys.flat += pending.wait()
    return Gradients(rows.q, keys.k, keys.v, rows.bias, rows.heat)


def _visitors(plan: Plan, step: str):
    """(owner, k, v) of every rank's keys, its own first; the next are on their way while one is worked on."""
    line, problem = plan.line, plan.problem
    k, v = problem.k, problem.v
    flat = _packed(k, v) if line.world > 1 else None
    for t in range(line.world):
        owner = (line.rank - t) % line.world
        pending = None
        if t + 1 < line.world:
            coming = flat.new_empty(_size(plan, (owner - 1) % line.world))
            pending = line.exchange(flat, coming, step, t)
        yield owner, k, v
        if pending is not None:
            flat = pending.wait()
            n = size(plan.keys[(owner - 1) % line.world])
            k, v = _unpacked(flat, (*problem.k.shape[:2], n, k.shape[3]), (*problem.v.shape[:2], n, v.shape[3]))


def _size(plan: Plan, owner: int) -> int:
    batch, groups, _, d = plan.problem.k.shape
    return batch * groups * size(plan.keys[owner]) * (d + plan.problem.v.shape[3])


def _packed(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpacked(flat: Tensor, k_shape, v_shape) -> tuple[Tensor, Tensor]:
    split = torch.Size(k_shape).numel()
    return flat[:split].view(k_shape), flat[split:].view(v_shape)
