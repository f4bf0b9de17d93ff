"""The tree, for `decode`: every rank computes its own keys' part of the same rows, and the parts are merged.

Each of ⌈log₂ W⌉ rounds exchanges with the rank whose number differs in one bit; every rank ends with the whole. The
lower rank's part always comes first, so that every rank computes the same tree, bit for bit. If W is no power of two,
the ranks beyond the last power of two send their parts first and receive the whole at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from regard._core.problem import Gradients, Part, Problem, Upstream, Whole
from regard.parallel.gradients import KeyGradients, RowGradients, slice_rows, slice_upstream
from regard.parallel.group import RankGroup
from regard.parallel.merge import Total, add_part, empty_part
from regard.parallel.plan import Plan


def forward(plan: Plan) -> list[Total]:
    """Return the totals of the query chunks over the keys of all ranks, the same on every rank."""
    queries, totals = plan.queries[0], [Total(plan.problem.choice) for _ in plan.queries[0]]
    for here, _, pair in _pairs(plan):
        add_part(totals, queries, here, plan.engine.forward(pair))
    for total, (_, chunk) in zip(totals, plan.rows(plan.problem, queries), strict=True):
        if total.o is None:
            total.add(empty_part(chunk))
    return [all_merge(plan.group, total) for total in totals]


def backward(plan: Plan, whole: Whole, upstream: Upstream) -> Gradients:
    """Return the gradients of the queries, summed over the ranks, and of this rank's keys."""
    sums, keys = RowGradients(plan.problem, upstream), KeyGradients(plan.problem)
    for here, there, pair in _pairs(plan):
        grads = plan.engine.backward(pair, slice_rows(whole, here), slice_upstream(upstream, here))
        sums.add(grads, here, there)
        keys.add(grads, there)
    dq, dtemperature = plan.group.all_reduce(sums.q, "tree backward"), sums.temperature
    dtemperature = None if dtemperature is None else plan.group.all_reduce(dtemperature, "tree backward")
    return Gradients(dq, keys.k, keys.v, temperature=dtemperature)


def _pairs(plan: Plan) -> Iterator[tuple[slice, slice, Problem]]:
    """Yield the pairs of chunks of the queries and of this rank's keys."""
    problem, rank = plan.problem, plan.group.rank
    full = (*problem.q.shape[:3], problem.k.shape[2])
    own = {
        name: None if (x := getattr(plan, name)) is None else plan.columns(x, rank).expand(full)
        for name in ("bias", "mask")
    }
    rows = replace(problem, sink=None, **own)
    return plan.pairs(rows, plan.queries[0], plan.keys[rank], problem.k, problem.v, own_columns=True)


def all_merge(group: RankGroup, total: Total, step: str = "tree") -> Total:
    """Return the merged total on every rank."""
    size = 1 << (group.world.bit_length() - 1)  # the largest power of two
    rank, extra = group.rank, group.world - size
    if rank >= size:
        _send(group, total, rank - size, step, 0)
        return _receive(group, total, rank - size, step, size.bit_length())
    if rank < extra:
        total = _merge_totals(total, _receive(group, total, rank + size, step, 0))
    for round_ in range(size.bit_length() - 1):
        partner = rank ^ (1 << round_)
        other = _exchange(group, total, partner, step, 1 + round_)
        total = _merge_totals(total, other) if rank < partner else _merge_totals(other, total)
    if rank < extra:
        _send(group, total, rank + size, step, size.bit_length())
    return total


def _merge_totals(first: Total, second: Total) -> Total:
    total = Total(first.choice, first.o, first.m, first.z)
    total.add(Part(second.o, second.m, second.z))
    return total


def _exchange(group: RankGroup, total: Total, partner: int, step: str, at: int) -> Total:
    sent = _pack(total)
    received = group.send_receive(sent, torch.empty_like(sent), partner, partner, step, at).wait()
    return _unpack(received, total)


def _send(group: RankGroup, total: Total, to: int, step: str, at: int) -> None:
    group.send_receive(_pack(total), None, to, to, step, at).wait()


def _receive(group: RankGroup, like: Total, source: int, step: str, at: int) -> Total:
    received = group.send_receive(None, torch.empty_like(_pack(like)), source, source, step, at).wait()
    return _unpack(received, like)


def _pack(total: Total) -> Tensor:
    return torch.cat([x.reshape(-1) for x in (total.o, total.m, total.z)])


def _unpack(flat: Tensor, like: Total) -> Total:
    parts = flat.split([x.numel() for x in (like.o, like.m, like.z)])
    o, m, z = (part.view(x.shape) for part, x in zip(parts, (like.o, like.m, like.z), strict=True))
    return Total(like.choice, o, m, z)
