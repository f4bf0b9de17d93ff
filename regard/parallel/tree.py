"""The tree, for `decode`: every rank computes its own keys' part of the same rows, and the parts are merged.

Each of ⌈log₂ W⌉ rounds exchanges with the rank whose number differs in one bit; every rank ends with the whole. The
lower rank's part always comes first, so that every rank computes the same tree, bit for bit. If W is no power of two,
the ranks beyond the last power of two send their parts first and receive the whole at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from regard._call.problem import Gradients, Part, Problem, Upstream, Whole
from regard.parallel.group import RankGroup, pack, unpack
from regard.parallel.merge import KeyGradients, RowGradients, Total, merge_pairs, slice_rows, slice_upstream
from regard.parallel.plan import ShardPlan


def forward(plan: ShardPlan) -> list[Total]:
    """Return the totals of the query chunks over the keys of all ranks, the same on every rank."""
    return [all_merge(plan.group, total) for total in merge_pairs(plan, plan.queries[0], _pairs(plan))]


def backward(plan: ShardPlan, whole: Whole, upstream: Upstream) -> Gradients:
    """Return the gradients of the queries, summed over the ranks, and of this rank's keys."""
    sums, keys = RowGradients(plan.problem, upstream), KeyGradients(plan.problem)
    for here, there, pair in _pairs(plan):
        grads = plan.engine.backward(pair, slice_rows(whole, here), slice_upstream(upstream, here))
        sums.add(grads, here, there)
        keys.add(grads, there)
    dq, dtemperature = plan.group.all_reduce(sums.q, "tree backward"), sums.temperature
    dtemperature = None if dtemperature is None else plan.group.all_reduce(dtemperature, "tree backward")
    return Gradients(dq, keys.k, keys.v, temperature=dtemperature)


def _pairs(plan: ShardPlan) -> Iterator[tuple[slice, slice, Problem]]:
    """Yield the pairs of chunks of the queries and of this rank's keys."""
    problem, rank = plan.problem, plan.group.rank
    full = (*problem.q.shape[:3], problem.k.shape[2])
    own = {
        name: None if (x := getattr(plan, name)) is None else plan.columns(x, rank).expand(full)
        for name in ("bias", "mask")
    }
    rows = replace(problem, sink=None, **own)
    return plan.pairs(rows, plan.queries[0], plan.keys[rank], problem.k, problem.v, own_columns=True)


def all_merge(group: RankGroup, total: Total) -> Total:
    """Return the merged total on every rank."""
    size = 1 << (group.world.bit_length() - 1)  # the largest power of two
    rank, extra = group.rank, group.world - size
    if rank >= size:
        _swap(group, total, rank - size, 0, receives=False)
        return _swap(group, total, rank - size, size.bit_length(), sends=False)
    if rank < extra:
        total = _merge_totals(total, _swap(group, total, rank + size, 0, sends=False))
    for round_ in range(size.bit_length() - 1):
        partner = rank ^ (1 << round_)
        other = _swap(group, total, partner, 1 + round_)
        total = _merge_totals(total, other) if rank < partner else _merge_totals(other, total)
    if rank < extra:
        _swap(group, total, rank + size, size.bit_length(), receives=False)
    return total


def _merge_totals(first: Total, second: Total) -> Total:
    total = Total(first.choice, first.o, first.m, first.z)
    total.add(Part(second.o, second.m, second.z))
    return total


def _swap(group: RankGroup, total: Total, peer: int, at: int, sends: bool = True, receives: bool = True) -> Total:
    """Send a total to another rank, receive the other's, or both; return the received one, else this rank's."""
    flat, shapes = pack(total.o, total.m, total.z), [x.shape for x in (total.o, total.m, total.z)]
    room = torch.empty_like(flat) if receives else None
    received = group.send_receive(flat if sends else None, room, peer, peer, "tree", at).wait()
    return Total(total.choice, *unpack(received, shapes)) if receives else total
