"""The ring, for ratio and pointwise maps: queries stay, keys are sent round.

    forward    in step t rank r attends to the keys of rank r − t while it receives those of rank r − t − 1
    backward   k and v go round once more; dk and dv follow one step behind and are complete after the last

Each transfer starts before the work that it overlaps with. Sent per rank, with n keys on each of W ranks:

    forward    (W − 1) · n · (D + E) · G · B · itemsize
    backward   that, and (W − 1) · n · (D + E) · G · B · itemsize of the accumulator
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from regard._call.problem import Gradients, Upstream, Whole
from regard.parallel.group import pack, unpack
from regard.parallel.layout import count_positions
from regard.parallel.merge import KeyGradients, RowGradients, Total, merge_pairs, slice_rows, slice_upstream
from regard.parallel.plan import ShardPlan


def forward(plan: ShardPlan) -> list[Total]:
    """Return the totals of this rank's query chunks over the keys of all ranks."""
    queries = plan.queries[plan.group.rank]
    visits = _rotate_keys(plan, "ring forward")
    pairs = (pair for owner, k, v in visits for pair in plan.pairs(plan.problem, queries, plan.keys[owner], k, v))
    return merge_pairs(plan, queries, pairs)


def backward(plan: ShardPlan, whole: Whole, upstream: Upstream) -> Gradients:
    """Return the gradients of this rank's shards."""
    problem, group = plan.problem, plan.group
    rows, keys = RowGradients(problem, upstream), KeyGradients(problem)
    pending = None  # dk and dv of the visiting keys, summed over the ranks they have been to
    for step, (owner, k, v) in enumerate(_rotate_keys(plan, "ring backward")):
        visitor = keys if step == 0 else KeyGradients(problem, k, v)
        for here, there, pair in plan.pairs(problem, plan.queries[group.rank], plan.keys[owner], k, v):
            grads = plan.engine.backward(pair, slice_rows(whole, here), slice_upstream(upstream, here))
            rows.add(grads, here, slice(pair.first_key, pair.first_key + pair.k.shape[2]))
            visitor.add(grads, there)
        if step:
            if pending is not None:
                visitor.flat += pending.wait()
            size = _packed_size(plan, (owner - 1) % group.world)  # of the next keys; in the last step this rank's own
            pending = group.exchange(visitor.flat, visitor.flat.new_empty(size), "ring backward", step)
    if pending is not None:
        keys.flat += pending.wait()
    return Gradients(rows.q, keys.k, keys.v, rows.bias, rows.temperature)


def _rotate_keys(plan: ShardPlan, step: str) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (owner, k, v) of every rank's keys, its own first; the next are received meanwhile."""
    group, problem = plan.group, plan.problem
    k, v = problem.k, problem.v
    flat = pack(k, v) if group.world > 1 else None
    for t in range(group.world):
        owner = (group.rank - t) % group.world
        pending = None
        if t + 1 < group.world:
            coming = flat.new_empty(_packed_size(plan, (owner - 1) % group.world))
            pending = group.exchange(flat, coming, step, t)
        yield owner, k, v
        if pending is not None:
            flat = pending.wait()
            n = count_positions(plan.keys[(owner - 1) % group.world])
            k, v = unpack(flat, [(*x.shape[:2], n, x.shape[3]) for x in (k, v)])


def _packed_size(plan: ShardPlan, owner: int) -> int:
    batch, groups, _, d = plan.problem.k.shape
    return batch * groups * count_positions(plan.keys[owner]) * (d + plan.problem.v.shape[3])
