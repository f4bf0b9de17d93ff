"""The queries of one rank after another visit everybody's keys: `stationary` for a sequence whose queries are sharded.

Round c: rank c's rows are broadcast (the next rank's are already on their way), every rank does its keys, and what it
found is merged at rank c. Each rank sends its q once and its part of o once a round, however many steps τ takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard._core.problem import Gradients, Problem, Upstream, Whole
from regard.parallel.gradients import KeyGradients, unexpanded
from regard.parallel.group import Line
from regard.parallel.layout import size
from regard.parallel.merge import Total
from regard.parallel.plan import Plan
from regard.parallel.schemes import stationary, tree


def forward(plan: Plan) -> tuple[list[Total], Tensor, Tensor]:
    """(a total per chunk of this rank's queries, high and c of its rows)."""
    mine: Any = None
    for root, rows in _visitors(plan, "visit forward"):
        totals, high, c = stationary.parts(plan, rows, plan.queries[root])
        plan.known.append(totals[0].rises is not None)
        merged = [tree.merge_at(plan.line, total, root, "visit home") for total in totals]
        if root == plan.line.rank:
            mine = merged, high, c
    return mine


def backward(plan: Plan, whole: Whole, upstream: Upstream) -> Gradients:
    line, problem = plan.line, plan.problem
    keys, mine = KeyGradients(problem), (None, None, None)
    columns = _ColumnsGradient(plan) if upstream.bias and not plan.bias_per_row else None
    known = torch.stack([x for x in (whole.m, whole.c, whole.z, whole.delta) if x is not None])
    for root, rows in _visitors(plan, "visit backward"):
        state = _shared(line, known, -1, root, rows, "visit backward")
        do = _shared(line, upstream.o, 2, root, rows, "visit backward")
        m, c, z, delta = state
        asked = Upstream(do, {}, upstream.bias, upstream.temperature)
        theirs = Whole(m, z, delta, c)
        found = stationary.backward(plan, rows, plan.queries[root], theirs, asked, keys, plan.known[root])
        dq, heat, bias = found
        dq = line.reduce(dq, root, "visit home")
        heat = None if heat is None else line.reduce(heat, root, "visit home")
        if upstream.bias:
            bias = _bias_home(plan, bias, root) if plan.bias_per_row else columns.add(bias)
        if root == line.rank:
            mine = dq, heat, bias
    dq, heat, bias = mine
    return Gradients(dq, keys.k, keys.v, bias if columns is None else columns.total, heat)


def _visitors(plan: Plan, step: str) -> Iterator[tuple[int, Problem]]:
    """(rank, its rows) in turn; bias and mask with the columns of this rank's keys."""
    line, problem = plan.line, plan.problem

    def begin(root: int):
        q = problem.q if root == line.rank else _like(problem.q, 2, size(plan.queries[root]))
        return line.begin_broadcast(q.contiguous(), root, step, root)

    coming = begin(0)
    for root in range(line.world):
        q = coming.wait()
        if root + 1 < line.world:
            coming = begin(root + 1)
        rows = replace(problem, q=q, sink=None)
        for name in ("bias", "mask"):
            setattr(rows, name, _dense(plan, name, root, step))
        if problem.temperature is not None:
            rows.temperature = _shared(line, problem.temperature, -1, root, rows, step)
        yield root, rows


def _shared(line: Line, x: Tensor, dim: int, root: int, rows: Problem, step: str) -> Tensor:
    """Rank root's x on every rank; its rows lie along `dim`."""
    mine = x.contiguous() if root == line.rank else _like(x, dim, rows.q.shape[2])
    return line.broadcast(mine, root, step, root)


def _dense(plan: Plan, name: str, root: int, step: str) -> Tensor | None:
    """The bias or mask of rank root's rows, its columns those of this rank's keys."""
    line, whole = plan.line, getattr(plan, name)
    if whole is None:
        return None
    batch, heads = plan.problem.q.shape[:2]
    full = (batch, heads, size(plan.queries[root]), size(plan.keys[line.rank]))
    if not getattr(plan, f"{name}_per_row"):
        return plan.columns(whole, line.rank).expand(full)
    if root != line.rank:
        columns = 1 if plan.one_column(whole) else full[3]
        room = whole.new_empty((*whole.shape[:2], full[2], columns))
        got = line.swap(None, _bytes(room), root, root, step, root).wait()
        return got.view(room.dtype).view(room.shape).expand(full) if room.numel() else room.expand(full)
    for other in range(line.world):
        if other != root:
            line.swap(_bytes(plan.columns(whole, other).contiguous()), None, other, other, step, root).wait()
    return plan.columns(whole, root).expand(full)


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def _like(x: Tensor, dim: int, length: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = length
    return x.new_empty(shape)


def _bias_home(plan: Plan, own: Tensor, root: int) -> Tensor | None:
    """At the root: the gradient of its bias, every rank's columns in place."""
    line = plan.line
    if root != line.rank:
        line.swap(own.contiguous(), None, root, root, "visit home", root).wait()
        return None
    total = torch.zeros(unexpanded(plan.problem.bias), dtype=own.dtype, device=own.device)
    for other in range(line.world):
        if other != root:
            columns = 1 if plan.one_column(total) else size(plan.keys[other])
            room = own.new_empty((*own.shape[:3], columns))
            place(plan, total, line.swap(None, room, other, other, "visit home", root).wait(), other)
        else:
            place(plan, total, own, root)
    return total


def place(plan: Plan, total: Tensor, part: Tensor, rank: int) -> None:
    if plan.one_column(total):
        total += part
        return
    at = 0
    for start, stop in plan.keys[rank]:
        total[..., start:stop] += part[..., at : at + stop - start]
        at += stop - start


class _ColumnsGradient:
    """The gradient of a bias that is the same for all queries: each rank has its own columns' share."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.total = torch.zeros(plan.bias.shape, dtype=plan.problem.accumulator, device=plan.bias.device)

    def add(self, part: Tensor) -> None:
        place(self.plan, self.total, part.sum_to_size((*self.total.shape[:3], part.shape[3])), self.plan.line.rank)
