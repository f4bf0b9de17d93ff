"""One attention problem cut into query blocks, and the logits of a block: s = (cap(scale·q kᵀ) + bias) / temperature.

A task is a run of query blocks of some key heads of one batch entry. Tasks are a function of the problem's shape
alone, never of the number of cores, and each owns what it writes: the same inputs give the same bits on any machine
load. Each core works whole tasks, its BLAS on one thread, so that no product ever waits for another core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard._backends.cpu import cores
from regard._core.problem import Problem

SCORES = 1 << 19  # in one block, about; few enough for the cache, enough to make Python's share small
ROWS, FEWEST = 128, 8  # so many rows even if that makes four times the scores; so few only if it must be
TASKS = 16  # at least so many, where there is work for them: enough for the cores to share evenly
PARTIAL_BYTES = 64 << 20  # what backward may spend on partial sums of dk and dv
SMALL = 1 << 15  # scores in all, below which one core is enough
FAR = 1 << 62


@dataclass(frozen=True)
class Task:
    b: int
    g0: int
    g1: int
    i0: int
    i1: int
    part: int  # which of the parts that the queries of these heads are cut into


class Block:
    """Queries i0 … i1 − 1 of the key heads g0 … g1 − 1 of batch entry b, and the keys j0 … j1 − 1 that they see."""

    def __init__(self, task: Task, share: int, i0: int, i1: int, j0: int, j1: int):
        groups, heads = task.g1 - task.g0, (task.g1 - task.g0) * share
        self.b, self.i0, self.j0 = task.b, i0, j0
        self.h0, self.queries = task.g0 * share, i1 - i0
        self.heads = heads, i1 - i0  # how many heads and queries
        self.count = heads * (i1 - i0)  # rows in all
        self.shape = groups, share * (i1 - i0), j1 - j0  # of the scores, for BLAS: [key heads, rows of each, keys]
        self.keys = slice(j0, j1)
        self.rows = task.b, slice(self.h0, self.h0 + heads), slice(i0, i1)  # its place in [B, H, M]
        self.scores = *self.rows, self.keys  # its place in [B, H, M, N]

    def of(self, x: Tensor) -> Tensor:
        """x, an entry or a row for each of the block's rows, as [heads, queries] or [heads, queries, …]."""
        return x.view(self.heads) if x.ndim == 1 else x.view(*self.heads, x.shape[-1])

    def flat(self, x: Tensor) -> np.ndarray:
        """x [key heads, rows of each, n] as the rows of one matrix."""
        return x.view(self.count, x.shape[-1]).numpy()


class Scratch:
    """Buffers that one core uses again and again."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self.buffers[name] = torch.empty(size, dtype=self.dtype)
        return buffer[:size].view(shape)


class Blocks:
    """The cut of a problem into tasks and blocks.

    owned: does every batch entry, head, part of the queries write to a place of its own? What does not shares a task
    list, and so a core.

    >>> import torch
    >>> from regard import normalizers
    >>> from regard._backends.cpu.attention.blocks import Blocks
    >>> from regard._core.problem import Problem
    >>> x = torch.zeros(1, 1, 20, 4)
    >>> blocks = Blocks(Problem(x, x, x, normalizers.get("softmax"), 1.0, causal=True), scores=1)
    >>> [(block.i0, block.keys.stop) for tasks in blocks.tasks for task in tasks for block in blocks.of(task)]
    [(16, 20), (8, 16), (0, 8)]
    """

    def __init__(self, problem: Problem, owned: Sequence[bool] = (True, True, True), scores: int = SCORES):
        self.problem, self.dtype = problem, problem.accumulator
        self.owned = owned
        self.batch, self.heads, self.queries, self.dim = problem.q.shape
        self.groups, self.n, self.value_dim = problem.v.shape[1:]
        self.share = self.heads // self.groups if self.groups else 0  # query heads per key head
        left, right = problem.reach
        self.left = FAR if left is None else left
        self.right = FAR if right is None else right
        self.start = problem.first_query, problem.first_key
        self.shift = problem.first_query - problem.first_key  # query i stands where key i + shift stands
        ends = [self.n] * self.batch
        if problem.key_lengths is not None:
            ends = [int(length) - problem.first_key for length in problem.key_lengths.tolist()]
        self.limits = [min(max(end, 0), self.n) for end in ends]
        self.width = max(1, min(self.n, self.left + self.right + 1))  # keys that one query sees, at most
        rows = max(scores // self.width, min(ROWS, 4 * scores // self.width), FEWEST)
        if self.width < self.n:
            rows = min(rows, max(64, self.width))  # a window's block sees width + rows keys
        self.step = max(1, min(self.queries, rows // max(self.share, 1)))
        fit = rows // max(1, self.share * self.step)  # so many key heads at once, where whole heads are small
        self.together = max(1, min(self.groups, fit)) if self.queries <= self.step else 1
        self.parts = self._parts()
        self.tasks = self._tasks()

    def _parts(self) -> int:
        owners = self.batch if self.owned[0] else 1
        owners *= math.ceil(self.groups / self.together) if self.owned[1] else 1
        steps = math.ceil(self.queries / self.step) if self.step else 1
        size = max(1, self.batch * self.groups * self.n * (self.dim + self.value_dim))
        affordable = PARTIAL_BYTES // (size * self.dtype.itemsize)
        return max(1, min(math.ceil(TASKS / max(1, owners)), steps, affordable))

    def _tasks(self) -> list[list[Task]]:
        """Tasks that write to the same place stand in one list: one core does them, in order."""
        if not (self.batch and self.heads and self.queries):
            return []
        steps = math.ceil(self.queries / self.step)
        cuts = [min(self.queries, self.step * (steps * part // self.parts)) for part in range(self.parts + 1)]
        cuts[-1] = self.queries
        lists: dict[tuple, list[Task]] = {}
        for part in reversed(range(self.parts)):  # the longest rows of a causal problem first
            for b in range(self.batch):
                for g in range(0, self.groups, self.together):
                    owner = tuple(place for place, own in zip((b, g, part), self.owned, strict=True) if own)
                    task = Task(b, g, min(g + self.together, self.groups), cuts[part], cuts[part + 1], part)
                    lists.setdefault(owner, []).append(task)
        return list(lists.values())

    def of(self, task: Task) -> Iterator[Block]:
        for i0 in reversed(range(task.i0, task.i1, self.step)):
            i1 = min(i0 + self.step, task.i1)
            j0 = min(max(0, i0 + self.shift - self.left), self.n)
            j1 = max(j0, min(self.limits[task.b], i1 + self.shift + self.right))
            yield Block(task, self.share, i0, i1, j0, j1)

    def run(self, work: Callable[[Task, Scratch], None]) -> None:
        """Do every task, on as many cores as torch uses."""

        def in_order(tasks: list[Task], own: dict) -> None:
            scratch = own.setdefault("scratch", Scratch(self.dtype))
            for task in tasks:
                work(task, scratch)

        size = self.batch * self.heads * self.queries * self.width
        cores.each(self.tasks, in_order, 1 if size < SMALL else None)

    def geometry(self, block: Block) -> tuple[int, ...]:
        """What a row kernel needs to know which keys each of its rows sees, in positions of the whole sequence."""
        query, key = self.start
        return block.i0 + query, block.queries, block.j0 + key, self.left, self.right, self.limits[block.b] + key

    def wide(self, x: Tensor, block: Block) -> Tensor:
        """The block's queries of x [B, H, M, C] as [g, rows, C] in the accumulator's type."""
        return x[block.rows].to(self.dtype).reshape(*block.shape[:2], x.shape[-1])

    def keys_of(self, task: Task) -> tuple[Tensor, Tensor]:
        """k and v of the task's heads, [g, N, D] and [g, N, E], in the accumulator's type.

        Keys that nobody sees count as zeros: in a product 0 · NaN would be NaN. Intervals never reach such keys;
        behind a mask or a bias they have to be looked for, if they are not finite.
        """
        problem = self.problem
        heads = task.b, slice(task.g0, task.g1)
        k, v = (_straight(x[heads].to(self.dtype)) for x in (problem.k, problem.v))
        if problem.mask is None and problem.bias is None:
            return k, v
        odd = ~torch.isfinite(k.sum(-1) + v.sum(-1))  # [g, N]
        if not odd.any():
            return k, v
        places = odd.any(0).nonzero().squeeze(-1)
        unseen = torch.zeros_like(odd)
        unseen[:, places] = ~self._seen(task, places)
        return k.masked_fill(unseen[..., None], 0.0), v.masked_fill(unseen[..., None], 0.0)

    def _seen(self, task: Task, places: Tensor) -> Tensor:
        """Does any query of its heads see the key? [g, len(places)]"""
        problem = self.problem
        step = max(1, 4 * SCORES // max(1, self.share * len(places)))
        seen = torch.zeros(task.g1 - task.g0, len(places), dtype=torch.bool)
        heads = slice(task.g0 * self.share, task.g1 * self.share)
        for i0 in range(0, self.queries, step):
            i = self.shift + torch.arange(i0, min(i0 + step, self.queries))[:, None]
            reached = (places >= i - self.left) & (places <= i + self.right) & (places < self.limits[task.b])
            here = task.b, heads, slice(i0, i0 + step)
            if problem.mask is not None:
                reached = reached & problem.mask[here][..., places]
            if problem.bias is not None:
                reached = reached & (problem.bias[here][..., places] != -math.inf)
            seen |= reached.reshape(len(seen), -1, len(places)).any(1)
        return seen

    def scores(self, block: Block, q: Tensor, k: Tensor, out: Tensor, capped: Tensor | None = None) -> None:
        """out [g, rows, n] ← the logits of the block; what a mask or a bias hides is −inf. `capped` keeps cap(x)."""
        problem = self.problem
        torch.baddbmm(out, q, k[:, block.keys].mT, beta=0, alpha=problem.scale, out=out)
        s = block.of(out)
        if problem.softcap is not None:
            s.div_(problem.softcap).tanh_().mul_(problem.softcap)
            if capped is not None:
                capped.copy_(out)
        if problem.bias is not None:
            bias = problem.bias[block.scores]
            s.add_(bias).masked_fill_(bias == -math.inf, -math.inf)
        if problem.mask is not None:
            s.masked_fill_(~problem.mask[block.scores], -math.inf)
        if problem.temperature is not None:
            s.div_(problem.temperature[block.rows][..., None])


def _straight(x: Tensor) -> Tensor:
    """x with its last dimension laid out one after another, as BLAS wants it."""
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()
