"""`ShardPlan`: what this rank holds of a call on shards, which pairs of chunks meet, and what computes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from regard import normalizers
from regard._call.problem import Problem
from regard._core.dispatch import find_gpu_obstacle
from regard._core.ops.backends import ATTENTION, backend_module
from regard._facts import has_numba
from regard.normalizers._families import nothing
from regard.parallel import reference_rows
from regard.parallel.group import RankGroup
from regard.parallel.layout import Spans, locate_spans

PARTS = {"cpu": "regard._backends.cpu.attention.partial", "triton": "regard._backends.gpu.attention.partial"}


@dataclass
class ShardPlan:
    """One call on shards. `problem` has this rank's q, k and v; its bias and mask have the columns of all keys.

    Parts of the softmax family are computed as softmax: a sink enters once, at the end.
    """

    problem: Problem
    group: RankGroup
    queries: list[Spans]  # of every rank
    keys: list[Spans]
    engine: ModuleType | None  # computes parts of rows; None: keys are gathered, and rows computed whole
    kernels: ModuleType  # computes whole rows
    bias: Tensor | None = None  # unexpanded, with the columns of all keys
    mask: Tensor | None = None
    interval: Tensor | None = None  # [3, B, H, the queries of all ranks]
    causal_only: bool = False  # True if positions matter for causal order alone

    @property
    def total_queries(self) -> int:
        """The queries of all ranks."""
        return max((stop for spans in self.queries for _, stop in spans), default=0)

    @property
    def total_keys(self) -> int:
        """The keys of all ranks."""
        return max((stop for spans in self.keys for _, stop in spans), default=0)

    def pairs(
        self, rows: Problem, queries: Spans, keys: Spans, k: Tensor, v: Tensor, own_columns: bool = False
    ) -> Iterator[tuple[slice, slice, Problem]]:
        """Yield (rows in q, keys in k, the problem) of every pair of chunks with visible keys, merged where possible.

        `rows` has q and everything per query; `queries` and `keys` are positions. `own_columns`: True if bias and mask
        have the columns of k alone.
        """
        merged = self._causal_pairs(rows, queries, keys, k, v) if self.causal_only else None
        if merged is not None:
            yield from merged
            return
        for (q0, q1), here in locate_spans(queries):
            for (k0, k1), there in locate_spans(keys):
                if q1 > q0 and k1 > k0 and _is_visible(rows.reach, (q0, q1), (k0, k1)):
                    columns = there if own_columns else slice(k0, k1)
                    yield here, there, self._pair_problem(rows, here, there, columns, k, v, q0, k0)

    def _causal_pairs(self, rows: Problem, queries: Spans, keys: Spans, k: Tensor, v: Tensor):
        """Return the pairs under causal order alone, in as few calls as possible; None if merging saves none.

        A rank's own chunks, side by side, are in causal order themselves. Chunks of other ranks are visible whole or
        not at all, and a query that sees one also sees those before it.
        """
        if queries == keys:
            everything = slice(0, rows.q.shape[2]), slice(0, k.shape[2])
            return [(*everything, self._pair_problem(rows, *everything, slice(0), k, v, 0, 0))] if k.shape[2] else []
        found: list[tuple[slice, slice, Problem]] = []
        unmasked = replace(rows, causal=False, right=None)
        for (q0, q1), here in locate_spans(queries):
            visible = [(k0, k1, there) for (k0, k1), there in locate_spans(keys) if k0 < min(k1, q1) and q0 < q1]
            if any(k1 - 1 > q0 for _, k1, _ in visible):
                return None
            if not visible:
                continue
            there = slice(0, visible[-1][2].stop)
            if found and found[-1][0].stop == here.start and found[-1][1] == there:
                here = slice(found.pop()[0].start, here.stop)
            found.append((here, there, self._pair_problem(unmasked, here, there, slice(0), k, v, 0, 0)))
        return found

    def _pair_problem(self, rows: Problem, here, there, columns, k, v, first_query: int, first_key: int) -> Problem:
        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:, :, here, columns]

        return replace(
            rows,
            q=rows.q[:, :, here],
            k=k[:, :, there],
            v=v[:, :, there],
            choice=normalizers.get("softmax") if rows.choice.softmax_family else rows.choice,
            bias=cut(rows.bias),
            mask=cut(rows.mask),
            temperature=None if rows.temperature is None else rows.temperature[:, :, here],
            sink=None,
            interval=None if rows.interval is None else rows.interval[..., here],
            first_query=first_query,
            first_key=first_key,
            queries=self.total_queries,
        )

    def rows(self, rows: Problem, queries: Spans) -> Iterator[tuple[slice, Problem]]:
        """Yield each chunk of queries: its slice, and the problem of its rows."""
        for (q0, _), here in locate_spans(queries):
            yield here, replace(rows.block(here.start, here.stop), first_query=q0)

    def localize(self, rows: Problem) -> Problem:
        """Return rows over all keys as the kernels of whole rows take them."""
        if not _is_on_gpu(self.kernels):
            return rows
        from regard._backends.gpu.attention.partial import localize

        return localize(rows)

    def interval_of(self, rank: int) -> Tensor | None:
        """Return the interval of a rank's queries; None without one."""
        if self.interval is None:
            return None
        cut = torch.cat([self.interval[..., start:stop] for start, stop in self.queries[rank]], -1)
        return cut[:, :, :1].expand(cut.shape) if self.interval.stride(2) == 0 else cut

    def columns(self, x: Tensor, rank: int) -> Tensor:
        """Return the columns of a rank's keys from an unexpanded bias or mask, which has those of all keys or one."""
        if x.shape[-1] == 1 and self.total_keys != 1:
            return x
        return torch.cat([x[..., start:stop] for start, stop in self.keys[rank]], -1)


def _is_visible(reach: tuple[int | None, int | None], queries: tuple[int, int], keys: tuple[int, int]) -> bool:
    """True if causal order and window let any query of one chunk see any key of the other."""
    left, right = reach
    late = right is not None and keys[0] > queries[1] - 1 + right
    early = left is not None and keys[1] - 1 < queries[0] - left
    return not (late or early)


def _is_on_gpu(module: ModuleType) -> bool:
    return module.__name__.startswith("regard._backends.gpu.")


def choose_engine(problem: Problem, backend: str | None) -> tuple[ModuleType | None, ModuleType]:
    """Return the modules that compute parts of rows, None if nothing here can, and whole rows."""
    choice, device = problem.choice, problem.q.device.type
    if problem.theta is not None:
        name = choice.normalizer.parameter.name
        raise ValueError(f"normalizer: {name} must be a number in regard.parallel, got one per row or head")
    if backend is None:
        backend = {"cpu": "cpu", "cuda": "triton" if problem.q.dtype != torch.float64 else None}.get(device)
        if not choice.fused_in_attention or find_gpu_obstacle(problem) or (backend == "cpu" and not has_numba()):
            backend = None
    if problem.stats and not choice.merges:  # no kernel's sums give them, whatever backend was asked for
        backend = None
    if backend not in PARTS or (backend == "triton" and problem.dropout_p):  # dropout counts rows of the whole sequence
        return None, reference_rows
    parts, kernels = backend_module(PARTS, backend), backend_module(ATTENTION, backend)
    # the GPU kernels' z includes the constant that must enter once
    has_rest = choice.family == "ratio" and not choice.exponential and choice.rest is not nothing
    is_whole = problem.stats or choice.family == "threshold" or (has_rest and backend == "triton")
    return None if is_whole else parts, kernels
