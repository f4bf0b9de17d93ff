"""One call on pieces of a sequence: what this rank holds, and which pairs of chunks see one another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch
from torch import Tensor

from regard import normalizers
from regard._core.ops.backends import backend_module
from regard._core.problem import Problem
from regard.normalizers._families import nothing
from regard.parallel import merge_statistics
from regard.parallel import partial as plain
from regard.parallel.group import Line
from regard.parallel.layout import Spans, placed

PARTS = {"cpu": "regard._backends.cpu.attention.partial", "triton": "regard._backends.gpu.attention.partial"}


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
    pulls: bool = False  # will gradients be wanted?
    known: list[bool] = field(default_factory=list)  # of each rank's rows, told by forward: is δ known without a sweep?
    ordered: bool = False  # does nothing but causal order depend on where a query or a key stands?

    @property
    def mixes(self) -> bool:
        """Does the engine finish the statistics of each part?"""
        return self.engine.__name__.startswith("regard._backends.gpu.")

    @property
    def total_queries(self) -> int:
        return max((stop for spans in self.queries for _, stop in spans), default=0)

    @property
    def total_keys(self) -> int:
        return max((stop for spans in self.keys for _, stop in spans), default=0)

    def pairs(
        self, rows: Problem, queries: Spans, keys: Spans, k: Tensor, v: Tensor, own_columns: bool = False
    ) -> Iterator[tuple[slice, slice, Problem]]:
        """(rows in q, keys in k, the problem) of every pair of chunks that sees one another, or of several as one.

        rows: q and everything per query. `own_columns`: bias and mask have the columns of k alone.
        """
        together = self._together(rows, queries, keys, k, v) if self.ordered else None
        if together is not None:
            yield from together
            return
        for (q0, q1), here in placed(queries):
            for (k0, k1), there in placed(keys):
                if q1 > q0 and k1 > k0 and _meet(rows.reach, (q0, q1), (k0, k1)):
                    columns = there if own_columns else slice(k0, k1)
                    yield here, there, self._pair(rows, here, there, columns, k, v, q0, k0)

    def _together(self, rows: Problem, queries: Spans, keys: Spans, k: Tensor, v: Tensor):
        """The same under causal order alone, in as few calls as can be; None if that is no fewer.

        A rank's own pieces, put side by side, are in causal order themselves. Chunks of others are seen whole or not at
        all, and whoever sees one sees those before it.
        """
        if queries == keys:
            everything = slice(0, rows.q.shape[2]), slice(0, k.shape[2])
            return [(*everything, self._pair(rows, *everything, slice(0), k, v, 0, 0))] if k.shape[2] else []
        found: list[tuple[slice, slice, Problem]] = []
        open_ = replace(rows, causal=False, right=None)
        for (q0, q1), here in placed(queries):
            seen = [(k0, k1, there) for (k0, k1), there in placed(keys) if k0 < min(k1, q1) and q0 < q1]
            if any(k1 - 1 > q0 for _, k1, _ in seen):
                return None
            if not seen:
                continue
            there = slice(0, seen[-1][2].stop)
            if found and found[-1][0].stop == here.start and found[-1][1] == there:
                here = slice(found.pop()[0].start, here.stop)
            found.append((here, there, self._pair(open_, here, there, slice(0), k, v, 0, 0)))
        return found

    def _pair(self, rows: Problem, here, there, columns, k, v, first_query: int, first_key: int) -> Problem:
        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:, :, here, columns]

        return replace(
            rows,
            q=rows.q[:, :, here],
            k=k[:, :, there],
            v=v[:, :, there],
            choice=part_choice(rows),
            stats=merge_statistics.needed(rows.stats) if self.mixes else rows.stats,
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
        for (q0, _), here in placed(queries):
            yield here, replace(rows.block(here.start, here.stop), first_query=q0)

    def one_column(self, x: Tensor) -> bool:
        """Does a bias or mask have one column for all keys? (With one key in all, it is that key's.)"""
        return x.shape[-1] == 1 and self.total_keys != 1

    def columns(self, x: Tensor, rank: int) -> Tensor:
        """Of an unexpanded bias or mask with the columns of all keys, those of a rank's keys."""
        if self.one_column(x):
            return x
        return torch.cat([x[..., start:stop] for start, stop in self.keys[rank]], -1)


def part_choice(problem: Problem) -> normalizers.Choice:
    choice = problem.choice
    return normalizers.get("softmax") if choice.softmax_family else choice


def _meet(reach: tuple[int | None, int | None], queries: tuple[int, int], keys: tuple[int, int]) -> bool:
    """Does any query of the one chunk see any key of the other, as far as causal order and window decide?"""
    left, right = reach
    late = right is not None and keys[0] > queries[1] - 1 + right
    early = left is not None and keys[1] - 1 < queries[0] - left
    return not (late or early)


def choose(problem: Problem, backend: str | None) -> ModuleType:
    """The engine that computes a part, by the backend asked for or by the device."""
    choice, device = problem.choice, problem.q.device.type
    if not choice.normalizer.fused:
        raise ValueError(f"normalizer {choice.spec!r} has no parts that could be merged; use regard.attention")
    parameter = choice.normalizer.parameter
    if parameter is not None:
        low, high = parameter.fused_low, max(parameter.fused_high, parameter.parts_high)
        if not low <= choice.theta <= high:
            raise ValueError(
                f"normalizer {choice.spec!r}: {parameter.name} must lie in [{low}, {high}] where rows are in parts; "
                "use regard.attention"
            )
    if problem.stats and not choice.merges:
        raise ValueError(
            f"statistics of {choice.spec!r}, whose weights fall somewhere as scores rise, cannot be merged over ranks; "
            "use regard.attention"
        )
    if backend is None and choice.fused:
        backend = {"cpu": "cpu", "cuda": "triton" if problem.q.dtype != torch.float64 else None}.get(device)
    if backend not in PARTS:
        return plain
    engine = backend_module(PARTS, backend)
    # Triton's part has in its z what joins once
    joins = choice.family == "ratio" and not choice.exponential and choice.rest is not nothing
    return engine if backend == "cpu" or (engine.takes(problem) and not joins) else plain
