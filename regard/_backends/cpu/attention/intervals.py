"""The keys lo ≤ j < hi that each query of a problem sees, as arrays, and cuts of the queries that follow them.

Causal order, window and key lengths are part of lo and hi here. A dense mask whose rows are intervals becomes one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from regard._call.problem import Problem

BLOCK_COST = 1 << 14  # scores that take as long as Python's share of one block, about
JUMP = 16  # keys by which an interval moves from one query to the next where a block may end


class RowIntervals:
    """Arrays lo, hi and position, [B, 1 or H, M] each; keys are indices into k, and an empty row has lo = hi = 0."""

    def __init__(self, problem: Problem, left: int, right: int, limits: list[int]):
        assert problem.interval is not None
        batch, _, queries = problem.q.shape[:3]
        whole = problem.interval
        if whole.stride(2) == 0:
            whole = whole[:, :, :1]
        lo, hi, self.position = whole.numpy().astype(np.int64)
        i = np.arange(queries) + (problem.first_query - problem.first_key)
        lo = np.maximum(np.maximum(lo - problem.first_key, 0), i - left)
        hi = np.minimum(np.minimum(hi - problem.first_key, i + right + 1), np.array(limits).reshape(batch, 1, 1))
        is_empty = hi <= lo
        self.lo, self.hi = np.where(is_empty, 0, lo), np.where(is_empty, 0, hi)
        self.rows = np.stack([self.lo + problem.first_key, self.hi + problem.first_key, self.position], -1)
        self._bounds: dict[tuple[int, int, int, int], tuple[np.ndarray, np.ndarray]] = {}

    @property
    def width(self) -> int:
        """The largest number of keys that one query sees."""
        return int((self.hi - self.lo).max(initial=0))

    @property
    def varies_by_head(self) -> bool:
        return self.lo.shape[1] > 1

    def bounds(self, entries: slice, heads: slice) -> tuple[np.ndarray, np.ndarray]:
        """(smallest lo, largest hi) over batch entries and heads, per query; lo > hi where all are empty."""
        heads = heads if self.varies_by_head else slice(0, 1)
        key = entries.start, entries.stop, heads.start, heads.stop
        if key not in self._bounds:  # the tasks of one head ask for the same
            lo, hi = self.lo[entries, heads], self.hi[entries, heads]
            lo = np.where(hi > lo, lo, np.iinfo(np.int64).max)
            self._bounds[key] = lo.min((0, 1)), hi.max((0, 1))
        return self._bounds[key]

    def cut_between_documents(self, parts: int) -> list[int] | None:
        """The ends of about `parts` equal runs of queries that have no key in common; None where there are none."""
        lo, hi = self.bounds(slice(0, self.lo.shape[0]), slice(0, self.lo.shape[1]))
        last, first = np.maximum.accumulate(hi), np.minimum.accumulate(lo[::-1])[::-1]
        ends = np.flatnonzero(last[:-1] <= first[1:]) + 1
        wanted = np.arange(1, parts) * len(lo) // parts
        if not len(ends):
            return None
        nearest = ends[np.abs(ends - wanted[:, None]).argmin(1)]
        if (np.abs(nearest - wanted) > len(lo) // (2 * parts)).any():
            return None
        return [0, *np.unique(nearest).tolist(), len(lo)]

    def rows_of(self, rows: tuple[slice, slice, slice]) -> np.ndarray:
        """(lo, hi, position) of each row of a block, of one head if all are alike, as positions of keys."""
        entries, heads, queries = rows
        return self.rows[entries, heads if self.varies_by_head else slice(None), queries].reshape(-1)


def cut_queries(
    lo: np.ndarray, hi: np.ndarray, step: int, most: int, heads: int, apart: bool = False
) -> list[tuple[int, int, int, int]]:
    """(i0, i1, j0, j1) of blocks of queries, and the keys from their smallest lo to their largest hi.

    A block ends after `step` queries and where the interval jumps (the next document), unless two blocks would cost
    more than the keys that one of up to `most` queries multiplies in vain. With `apart` a block ends wherever two
    queries have no key in common, so that no document shares a product with another.

    >>> import numpy as np
    >>> cut_queries(np.repeat([0, 400], 400), np.repeat([400, 800], 400), 64, 512, 1)
    [(0, 400, 0, 400), (400, 800, 400, 800)]
    """
    if apart:
        jumps = np.flatnonzero((lo[1:] >= hi[:-1]) | (hi[1:] <= lo[:-1])) + 1
    else:
        jumps = np.flatnonzero((np.abs(np.diff(lo)) > JUMP) | (np.abs(np.diff(hi)) > JUMP)) + 1
    edges = np.unique(np.concatenate([np.arange(0, len(lo), step), jumps, [len(lo)]]))
    starts = edges[:-1]
    firsts, lasts = np.minimum.reduceat(lo, starts).tolist(), np.maximum.reduceat(hi, starts).tolist()
    found: list[tuple[int, int, int, int]] = []
    for i0, i1, j0, j1 in zip(starts.tolist(), edges[1:].tolist(), firsts, lasts, strict=True):
        own = i0, i1, j0, j1
        if found and not apart and i1 - found[-1][0] <= most:
            joined = found[-1][0], i1, min(found[-1][2], j0), max(found[-1][3], j1)
            if heads * (_area(joined) - _area(found[-1]) - _area(own)) <= BLOCK_COST:
                found[-1] = joined
                continue
        found.append(own)
    return [(i0, i1, j0, j1) if j0 < j1 else (i0, i1, 0, 0) for i0, i1, j0, j1 in found]


def _area(block: tuple[int, int, int, int]) -> int:
    i0, i1, j0, j1 = block
    return (i1 - i0) * max(0, j1 - j0)


def recognize_intervals(problem: Problem) -> Problem:
    """The problem with an interval in the place of its mask, if every row of the mask is one; else as it is."""
    if problem.mask is None or problem.interval is not None:
        return problem
    mask, (batch, heads, queries) = problem.mask, problem.q.shape[:3]
    for dim in range(3):
        mask = mask.narrow(dim, 0, 1) if mask.stride(dim) == 0 and mask.shape[dim] > 1 else mask
    found = find_intervals(mask)
    if found is None:
        return problem
    lo, hi = (x + problem.first_key for x in found)
    position = torch.arange(queries, dtype=torch.int32) + problem.first_query
    rows = [x.expand(batch, heads, queries) for x in (lo, hi, position)]
    if mask.shape[1] == 1:  # keep the stride 0 over heads, which blocks look for
        rows = [x[:, :1] for x in rows]
    interval = torch.stack(rows).expand(3, batch, heads, queries)
    return replace(problem, mask=None, interval=interval)


def find_intervals(mask: Tensor) -> tuple[Tensor, Tensor] | None:
    """(lo, hi) of a bool mask (…, N), (…) each, if the visible keys of every row lie side by side; else None.

    >>> find_intervals(torch.tensor([[False, True, True], [True, False, False]]))
    (tensor([1, 0], dtype=torch.int32), tensor([3, 1], dtype=torch.int32))
    >>> find_intervals(torch.tensor([[True, False, True]])) is None
    True
    """
    if not mask.shape[-1]:
        return None
    x = mask.contiguous().view(torch.uint8).numpy()
    rises = np.count_nonzero(x[..., 1:] > x[..., :-1], -1) + x[..., 0]  # starts of runs
    if (rises > 1).any():
        return None
    lo = x.argmax(-1).astype(np.int32)
    return torch.from_numpy(lo), torch.from_numpy(lo + np.count_nonzero(x, -1).astype(np.int32))
