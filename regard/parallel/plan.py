"""One call on pieces of a sequence: what this rank holds, and which pairs of chunks see one another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from regard import normalizers
from regard._ops.backends import backend_module
from regard.parallel import mixture, plain
from regard.parallel.layout import Spans
from regard.parallel.line import Line
from regard.problem import Problem

PARTS = {"cpu": "regard.cpu.parts", "triton": "regard.kernels.parts"}


@dataclass
class Plan:
    """`problem` has this rank's q, k and v; its bias and mask have the columns of all keys.

    Parts of the softmax family are computed as softmax: a silent key or a sink joins once, at the end.
    """

    problem: Problem
    line: Line
    queries: list[Spans]  # of every rank
    keys: list[Spans]
    engine: ModuleType
    bias: Tensor | None = None  # unexpanded, with the columns of all keys
    mask: Tensor | None = None
    bias_per_row: bool = False  # does each query have its own row of it? (Otherwise every rank has the same.)
    mask_per_row: bool = False

    @property
    def mixes(self) -> bool:
        """Does the engine finish the statistics of each part?"""
        return self.engine.__name__.startswith("regard.kernels.")

    @property
    def total_queries(self) -> int:
        return max((stop for spans in self.queries for _, stop in spans), default=0)

    @property
    def total_keys(self) -> int:
        return max((stop for spans in self.keys for _, stop in spans), default=0)

    def pairs(
        self, rows: Problem, queries: Spans, keys: Spans, k: Tensor, v: Tensor, own_columns: bool = False
    ) -> Iterator[tuple[int, slice, slice, Problem]]:
        """(index of the query chunk, its rows in q, its keys in k, the problem) of every pair that sees one another.

        rows: q and everything per query. `own_columns`: bias and mask have the columns of k alone.
        """
        i = 0
        for index, (q0, q1) in enumerate(queries):
            here, i = slice(i, i + q1 - q0), i + q1 - q0
            j = 0
            for k0, k1 in keys:
                there, j = slice(j, j + k1 - k0), j + k1 - k0
                if q1 > q0 and k1 > k0 and _meet(rows.reach, (q0, q1), (k0, k1)):
                    columns = there if own_columns else slice(k0, k1)
                    yield index, here, there, self._pair(rows, here, there, columns, k, v, q0, k0)

    def _pair(self, rows: Problem, here, there, columns, k, v, first_query: int, first_key: int) -> Problem:
        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:, :, here, columns]

        return replace(
            rows,
            q=rows.q[:, :, here],
            k=k[:, :, there],
            v=v[:, :, there],
            choice=part_choice(rows),
            stats=mixture.needed(rows.stats) if self.mixes else rows.stats,
            bias=cut(rows.bias),
            mask=cut(rows.mask),
            temperature=None if rows.temperature is None else rows.temperature[:, :, here],
            sink=None,
            first_query=first_query,
            first_key=first_key,
            queries=self.total_queries,
        )

    def rows(self, rows: Problem, queries: Spans) -> Iterator[tuple[slice, Problem]]:
        """Each chunk of queries, with all that belongs to its rows."""
        i = 0
        for q0, q1 in queries:
            here, i = slice(i, i + q1 - q0), i + q1 - q0
            yield here, replace(rows.block(here.start, here.stop), first_query=q0)

    def columns(self, x: Tensor, rank: int) -> Tensor:
        """Of an unexpanded bias or mask with the columns of all keys, those of a rank's keys."""
        if x.shape[-1] == 1 and self.total_keys != 1:
            return x
        return torch.cat([x[..., start:stop] for start, stop in self.keys[rank]], -1)


def part_choice(problem: Problem) -> normalizers.Choice:
    choice = problem.choice
    return normalizers.get("softmax") if choice.family == "ratio" and choice.exponential else choice


def _meet(reach: tuple[int | None, int | None], queries: tuple[int, int], keys: tuple[int, int]) -> bool:
    """Does any query of the one chunk see any key of the other, as far as causal order and window decide?"""
    left, right = reach
    late = right is not None and keys[0] > queries[1] - 1 + right
    early = left is not None and keys[1] - 1 < queries[0] - left
    return not (late or early)


def choose(problem: Problem, backend: str | None) -> ModuleType:
    """The engine that computes a part, by the backend asked for or by the device."""
    choice, device = problem.choice, problem.q.device.type
    if not choice.fused:
        raise ValueError(f"normalizer {choice.spec!r} has no parts that could be merged; use regard.attention")
    if backend is None and not (choice.name == "entmax" and choice.theta > 2.0):
        backend = {"cpu": "cpu", "cuda": "triton" if problem.q.dtype != torch.float64 else None}.get(device)
    if backend not in PARTS:
        return plain
    engine = backend_module(PARTS, backend)
    return engine if backend == "cpu" or engine.takes(problem) else plain
