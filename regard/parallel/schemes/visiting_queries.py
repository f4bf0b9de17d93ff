"""The visits, for threshold maps with sharded queries: each rank's queries are sent to all keys in turn.

In round c rank c's rows are broadcast (while the next rank's are being sent), every rank computes with its own keys,
and the parts are merged at rank c. Each rank sends its q once and a part of o per round, however many steps τ takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard._core.problem import Gradients, Problem, Upstream, Whole
from regard.parallel.gradients import KeyGradients
from regard.parallel.group import RankGroup, Transfer
from regard.parallel.layout import count_positions
from regard.parallel.merge import Total
from regard.parallel.plan import Plan
from regard.parallel.schemes import stationary, tree


def forward(plan: Plan) -> tuple[list[Total], Tensor, Tensor]:
    """Return (a total per chunk of this rank's queries, high and c of its rows)."""
    mine: Any = None
    for root, rows in _visiting_rows(plan, "visit forward"):
        totals, high, c = stationary.compute_parts(plan, rows, plan.queries[root])
        merged = [tree.merge_at(plan.group, total, root, "visit home") for total in totals]
        if root == plan.group.rank:
            mine = merged, high, c
    return mine


def backward(plan: Plan, whole: Whole, upstream: Upstream) -> Gradients:
    """Return the gradients of this rank's shards."""
    group, problem = plan.group, plan.problem
    keys, mine = KeyGradients(problem), (None, None)
    known = torch.stack([x for x in (whole.m, whole.c, whole.z, whole.delta) if x is not None])
    for root, rows in _visiting_rows(plan, "visit backward"):
        state = _broadcast_rows(group, known, -1, root, rows, "visit backward")
        do = _broadcast_rows(group, upstream.o, 2, root, rows, "visit backward")
        m, c, z, delta = state
        theirs = Whole(m, z, delta, c), Upstream(do, temperature=upstream.temperature)
        dq, dtemperature = stationary.backward(plan, rows, plan.queries[root], *theirs, keys)
        dq = group.reduce(dq, root, "visit home")
        dtemperature = None if dtemperature is None else group.reduce(dtemperature, root, "visit home")
        if root == group.rank:
            mine = dq, dtemperature
    dq, dtemperature = mine
    return Gradients(dq, keys.k, keys.v, temperature=dtemperature)


def _visiting_rows(plan: Plan, step: str) -> Iterator[tuple[int, Problem]]:
    """Yield (rank, its rows) in turn; bias and mask have the columns of this rank's keys."""
    group, problem = plan.group, plan.problem

    def start(root: int) -> Transfer:
        q = problem.q if root == group.rank else _empty_like(problem.q, 2, count_positions(plan.queries[root]))
        return group.start_broadcast(q.contiguous(), root, step, root)

    transfer = start(0)
    for root in range(group.world):
        q = transfer.wait()
        if root + 1 < group.world:
            transfer = start(root + 1)
        rows = replace(problem, q=q, sink=None, interval=plan.interval_of(root))
        for name in ("bias", "mask"):
            setattr(rows, name, _own_columns(plan, name, root, step))
        if problem.temperature is not None:
            rows.temperature = _broadcast_rows(group, problem.temperature, -1, root, rows, step)
        yield root, rows


def _broadcast_rows(group: RankGroup, x: Tensor, dim: int, root: int, rows: Problem, step: str) -> Tensor:
    """Return the root's x on every rank; its rows lie along `dim`."""
    mine = x.contiguous() if root == group.rank else _empty_like(x, dim, rows.q.shape[2])
    return group.broadcast(mine, root, step, root)


def _own_columns(plan: Plan, name: str, root: int, step: str) -> Tensor | None:
    """Return the bias or mask of the root's rows, with the columns of this rank's keys."""
    group, whole = plan.group, getattr(plan, name)
    if whole is None:
        return None
    batch, heads = plan.problem.q.shape[:2]
    full = (batch, heads, count_positions(plan.queries[root]), count_positions(plan.keys[group.rank]))
    if not plan.is_dense_per_row:
        return plan.columns(whole, group.rank).expand(full)
    if root != group.rank:
        columns = 1 if plan.has_one_column(whole) else full[3]
        room = whole.new_empty((*whole.shape[:2], full[2], columns))
        got = group.send_receive(None, _bytes(room), root, root, step, root).wait()
        return got.view(room.dtype).view(room.shape).expand(full) if room.numel() else room.expand(full)
    for other in range(group.world):
        if other != root:
            group.send_receive(_bytes(plan.columns(whole, other).contiguous()), None, other, other, step, root).wait()
    return plan.columns(whole, root).expand(full)


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def _empty_like(x: Tensor, dim: int, length: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = length
    return x.new_empty(shape)
