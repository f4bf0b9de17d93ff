"""Splits an attention problem into blocks of queries; s = (cap(scale·q kᵀ) + bias) / temperature of a block.

A task is a run of query blocks of some key heads. Tasks depend on the problem's shape alone, never on the number of
threads, and each writes to memory of its own: equal inputs give equal bits under any load. Each thread runs whole
tasks with a single-threaded BLAS. A small problem is one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard._backends.cpu.attention.intervals import RowIntervals, cut_queries, recognize_intervals
from regard._backends.cpu.attention.score_rows import score_kernel
from regard._backends.cpu.jit.compile import precision_of
from regard._backends.cpu.tasks import run_here, run_tasks
from regard._call.problem import Problem
from regard._facts import remember

SCORES = 1 << 19  # scores in a block, about: they stay in the cache, and Python's share is small
ROWS, MIN_ROWS = 128, 8  # rows of a block: ROWS even at four times the scores, never fewer than MIN_ROWS
TASKS = 16  # aimed at, for an even load on the threads
PARTIAL_BYTES = 64 << 20  # what backward may spend on partial sums of dk and dv
SMALL = 1 << 16  # scores of the problem up to which it is one block on the calling thread
FAR = 1 << 62  # no limit to the left or right
NO_PARAMS = torch.zeros(0, 0)
MADE = 256  # combinations of sizes whose blocks are kept
_made: dict[Hashable, Blocks] = {}


class Task(NamedTuple):
    """Queries i0 … i1 − 1 of the key heads g0 … g1 − 1 of the batch entries b0 … b1 − 1."""

    b0: int
    b1: int
    g0: int
    g1: int
    i0: int
    i1: int
    part: int  # which partial sum of dk and dv


class Keys(NamedTuple):
    """k and v of a task's heads, [g, N, D] and [g, N, E], in the accumulator's dtype."""

    k: Tensor
    v: Tensor
    are_finite: bool = True  # those that a query sees, as far as a product with a hidden key would show it


class Block:
    """The queries of a task from i0 to i1 − 1, and the keys j0 … j1 − 1 that any of them can see."""

    def __init__(self, blocks: Blocks, task: Task, i0: int, i1: int, j0: int, j1: int):
        share, entries, groups = blocks.share, task.b1 - task.b0, task.g1 - task.g0
        self.first_row = task.b0, task.g0 * share, i0
        self.size = entries, groups * share, i1 - i0  # batch entries, heads, queries
        self.count = entries * groups * share * (i1 - i0)
        self.shape = entries * groups, share * (i1 - i0), j1 - j0  # of the scores, for BLAS
        self.keys = slice(j0, j1)
        heads = slice(task.g0 * share, task.g1 * share)
        self.rows = slice(task.b0, task.b1), heads, slice(i0, i1)  # its place in [B, H, M]
        self.is_whole = self.size == blocks.rows_shape
        self.has_all_keys = j1 - j0 == blocks.n
        query, key = blocks.start
        limits = [limit + key for limit in blocks.limits[task.b0 : task.b1]]
        geometry = [i0 + query, i1 - i0, j0 + key, blocks.left, blocks.right, self.size[1] * (i1 - i0), 0, 0, *limits]
        self.geometry = np.array(geometry)  # see `forward_rows.visible_columns`
        if blocks.intervals is not None:
            self.geometry[6:8] = len(geometry), blocks.intervals.varies_by_head
            self.geometry = np.concatenate([self.geometry, blocks.intervals.rows_of(self.rows)])

    def take(self, x: Tensor) -> Tensor:
        """The block's rows of x [B, H, M, …]."""
        return x if self.is_whole else x[self.rows]

    def take_keys(self, x: Tensor) -> Tensor:
        """The block's keys of x [g, N, C]."""
        return x if self.has_all_keys else x[:, self.keys]

    def relative_columns(self, queries: int) -> slice:
        """The block's columns of a relative bias [H, queries + keys − 1]."""
        first = self.keys.start - self.rows[2].stop + queries  # where the last query's row begins
        return slice(first, first + self.shape[2] + self.size[2] - 1)

    def row_array(self, x: Tensor) -> np.ndarray:
        """The block's rows of x [..., B, H, M] as a contiguous array [..., rows], a copy where it must be.

        Kernels are compiled for each layout of their arguments.
        """
        return (x if self.is_whole else x[(..., *self.rows)]).flatten(-3).contiguous().numpy()

    def row_output(self, x: Tensor) -> np.ndarray:
        """An array [..., rows] for results of the block's rows: x [..., B, H, M] itself, or one for `store_rows`."""
        own = x.numpy()
        shape = *x.shape[:-3], self.count
        return own.reshape(shape) if self.is_whole else np.empty(shape, own.dtype)

    def store_rows(self, x: Tensor, array: np.ndarray) -> None:
        """Copies what `row_output` returned to x, unless it is x."""
        if not self.is_whole:
            x[(..., *self.rows)] = torch.from_numpy(array).view(*x.shape[:-3], *self.size)

    def as_matrix(self, x: Tensor) -> np.ndarray:
        """A view of x [g, rows, n] as the rows of one matrix."""
        return x.numpy().reshape(self.count, x.shape[-1])


class Scratch:
    """Named buffers that one thread reuses from block to block."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < math.prod(shape):
            buffer = self.buffers[name] = torch.empty(shape, dtype=self.dtype)
            return buffer
        return buffer.view(-1)[: math.prod(shape)].view(shape)


def make_blocks(problem: Problem, owned: Sequence[bool] = (True, True, True)) -> Blocks:
    """The blocks of a problem; those that follow from sizes alone are made once for each combination of sizes."""
    if not problem.key_lengths is problem.interval is problem.mask is None:
        return Blocks(problem, owned)
    positions = problem.first_query, problem.first_key, problem.reach
    key = problem.q.shape, problem.v.shape, problem.accumulator, positions, tuple(owned)
    found = _made.get(key)
    if found is None:
        found = remember(_made, key, Blocks(problem, owned), MADE)
        if found.is_small and found.tasks:
            (found.whole,) = found.blocks_of(found.tasks[0][0])
        found.problem = problem.without_tensors()  # nothing of the user's is kept alive
    own = object.__new__(Blocks)
    own.__dict__.update(found.__dict__, problem=problem)
    return own


class Blocks:
    """The tasks and blocks of a problem.

    owned: whether every batch entry, head and part of the queries writes to memory of its own. Tasks that share
    memory go into one list, which one thread runs in order.

    >>> import torch
    >>> from regard import normalizers
    >>> from regard._backends.cpu.attention import blocks
    >>> from regard._call.problem import Problem
    >>> x = torch.zeros(1, 1, 300, 4)
    >>> split = blocks.Blocks(Problem(x, x, x, normalizers.get("softmax"), 1.0, causal=True), scores=1 << 14)
    >>> [(block.first_row[2], block.keys.stop) for task in split.tasks for block in split.blocks_of(task[0])]
    [(256, 300), (128, 256), (0, 128)]
    """

    def __init__(self, problem: Problem, owned: Sequence[bool] = (True, True, True), scores: int = SCORES):
        is_small = math.prod(problem.q.shape[:3]) * problem.k.shape[2] <= min(SMALL, scores)
        problem = problem if is_small else recognize_intervals(problem)
        self.problem, self.dtype, self.owned, self.is_small = problem, problem.accumulator, owned, is_small
        self.batch, self.heads, self.queries, self.dim = problem.q.shape
        self.groups, self.n, self.value_dim = problem.v.shape[1:]
        self.rows_shape = self.batch, self.heads, self.queries
        self.share = self.heads // self.groups if self.groups else 0  # query heads per key head
        left, right = problem.reach
        self.left = FAR if left is None else left
        self.right = FAR if right is None else right
        self.start = problem.first_query, problem.first_key
        self.offset = problem.first_query - problem.first_key  # query i is at the position of key i + offset
        self.limits = [self.n] * self.batch
        if problem.key_lengths is not None:
            ends = [int(length) - problem.first_key for length in problem.key_lengths.tolist()]
            self.limits = [min(max(end, 0), self.n) for end in ends]
        self.intervals = None
        width = max(1, min(self.n, self.left + self.right + 1))  # keys that one query sees, at most
        if problem.interval is not None:
            self.intervals = RowIntervals(problem, self.left, self.right, self.limits)
            width = max(1, min(width, self.intervals.width))
        total = self.batch * self.heads * self.queries
        self.parts, self.tasks = 1, []
        self.whole: Block | None = None  # the only block, where it has been made
        if self.is_small:
            self.step = self.most = self.queries
            if total:
                self.tasks = [[Task(0, self.batch, 0, self.groups, 0, self.queries, 0)]]
            return
        rows = max(scores // width, min(ROWS, 4 * scores // width), MIN_ROWS)
        fit = rows
        if width < self.n:  # a window's block sees width + step keys: few queries, of several heads
            rows = min(rows, max(64, width // 8) * max(self.share, 1))
        self.step = max(1, min(self.queries, rows // max(self.share, 1)))
        fit //= max(1, self.share * self.step)  # key heads at once, where whole heads or windows are small
        alike = self.intervals is None or not self.intervals.varies_by_head
        is_narrow = self.queries <= self.step or width < self.n
        self.together = max(1, min(self.groups, fit)) if is_narrow and alike else 1
        self.most = self.step * max(1, fit // self.together)  # queries of a block whose rows see the same keys
        if total:
            self.tasks = self._make_tasks()

    def _cut_parts(self) -> list[int]:
        """Return where each part of the queries begins, and their end; sets `parts`, the partial sums of dk and dv."""
        owners = self.batch if self.owned[0] else 1
        owners *= math.ceil(self.groups / self.together) if self.owned[1] else 1
        steps = math.ceil(self.queries / self.step)
        wanted = min(math.ceil(TASKS / max(1, owners)), steps)
        if self.intervals is not None and wanted > 1:
            cuts = self.intervals.cut_between_documents(wanted)
            if cuts is not None:  # no key belongs to two parts: one sum is enough
                return cuts
        size = max(1, self.batch * self.groups * self.n * (self.dim + self.value_dim))
        self.parts = max(1, min(wanted, PARTIAL_BYTES // (size * self.dtype.itemsize)))
        return [*(self.step * (steps * part // self.parts) for part in range(self.parts)), self.queries]

    def _make_tasks(self) -> list[list[Task]]:
        cuts = self._cut_parts()
        lists: dict[tuple, list[Task]] = {}
        for part in reversed(range(len(cuts) - 1)):  # the longest rows of a causal problem first
            for b in range(self.batch):
                for g in range(0, self.groups, self.together):
                    owner = tuple(place for place, own in zip((b, g, part), self.owned, strict=True) if own)
                    end = min(g + self.together, self.groups)
                    task = Task(b, b + 1, g, end, cuts[part], cuts[part + 1], min(part, self.parts - 1))
                    lists.setdefault(owner, []).append(task)
        return list(lists.values())

    def blocks_of(self, task: Task, are_finite: bool = True) -> Iterator[Block]:
        """The blocks of a task, the last queries first; documents share no block if not all keys `are_finite`."""
        if self.whole is not None:
            yield self.whole
            return
        if self.intervals is not None:
            for i0, i1, j0, j1 in reversed(self._cut(task, apart=not are_finite)):
                yield Block(self, task, task.i0 + i0, task.i0 + i1, j0, max(j0, j1))
            return
        limit = max(self.limits[task.b0 : task.b1])
        for i0 in reversed(range(task.i0, task.i1, self.step)):
            i1 = min(i0 + self.step, task.i1)
            j0 = min(max(0, i0 + self.offset - self.left), self.n)
            j1 = max(j0, min(limit, i1 + self.offset + self.right))
            yield Block(self, task, i0, i1, j0, j1)

    def _bounds_of(self, task: Task) -> tuple[np.ndarray, np.ndarray]:
        """(smallest lo, largest hi) over the task's entries and heads, per query."""
        assert self.intervals is not None
        heads = slice(task.g0 * self.share, task.g1 * self.share)
        lo, hi = self.intervals.bounds(slice(task.b0, task.b1), heads)
        return lo[task.i0 : task.i1], hi[task.i0 : task.i1]

    def _cut(self, task: Task, apart: bool) -> list[tuple[int, int, int, int]]:
        """The blocks of a task whose rows have intervals, as `cut_queries` returns them."""
        if self.is_small and not apart:
            return [(0, task.i1 - task.i0, *self._key_range(task))]
        return cut_queries(*self._bounds_of(task), self.step, self.most, (task.g1 - task.g0) * self.share, apart)

    def run(self, work: Callable[[Task, Scratch], None]) -> None:
        """Calls work(task, scratch) for every task, on as many threads as torch uses."""

        def run_list(tasks: list[Task], own: dict) -> None:
            scratch = own.setdefault("scratch", Scratch(self.dtype))
            for task in tasks:
                work(task, scratch)

        (run_here if self.is_small else run_tasks)(self.tasks, run_list)

    def rows_of(self, x: Tensor, block: Block) -> Tensor:
        """The block's queries of x [B, H, M, C] as [g, rows, C] in the accumulator's dtype."""
        x = block.take(x)
        x = x if x.dtype == self.dtype else x.to(self.dtype)  # `to` takes a microsecond for nothing
        return x.reshape(*block.shape[:2], x.shape[-1])

    def keys_of(self, task: Task) -> Keys:
        """The keys of a task.

        Keys that no query sees count as zeros, because 0 · NaN in a product would be NaN. Blocks leave out keys
        beyond causal order, window and length; those behind a mask or a bias, or beyond one length of several, are
        looked for if they are not finite.
        """
        problem = self.problem
        k, v = self.heads_of(problem.k, task), self.heads_of(problem.v, task)
        by_entry = problem.mask is problem.bias is problem.interval is None
        if by_entry and (problem.key_lengths is None or not self.is_small):
            return Keys(k, v)
        start, stop = self._key_range(task)
        if math.isfinite(k[:, start:stop].sum() + v[:, start:stop].sum()):  # one number, at a third of the cost
            return Keys(k, v)
        bad = ~torch.isfinite(k[:, start:stop].sum(-1) + v[:, start:stop].sum(-1))  # [g, keys]
        if not bad.any():
            return Keys(k, v)
        columns = bad.any(0).nonzero().squeeze(-1) + start
        hidden = torch.zeros(k.shape[:2], dtype=torch.bool)
        visible = self._is_visible(task, columns)
        hidden[:, columns] = ~visible
        are_finite = not bool((bad[:, columns - start] & visible).any())
        return Keys(k.masked_fill(hidden[..., None], 0.0), v.masked_fill(hidden[..., None], 0.0), are_finite)

    def _key_range(self, task: Task) -> tuple[int, int]:
        """The keys that the task's blocks multiply, from the first to the last."""
        if self.intervals is None:
            return 0, self.n
        lo, hi = self._bounds_of(task)
        return min(int(lo.min(initial=self.n)), self.n), int(hi.max(initial=0))

    def heads_of(self, x: Tensor, task: Task) -> Tensor:
        """The task's heads of x [B, G, N, C] as [g, N, C], with contiguous rows as BLAS wants them."""
        if not self.is_small:
            x = x[task.b0 : task.b1, task.g0 : task.g1]
        x = (x if x.dtype == self.dtype else x.to(self.dtype)).flatten(0, 1)
        _, stride, step = x.stride()
        return x if step == 1 and stride >= x.shape[-1] else x.contiguous()

    def _is_visible(self, task: Task, columns: Tensor) -> Tensor:
        """Whether each of the keys `columns` is visible to any query of its heads, [g, len(columns)]."""
        problem, entries, groups = self.problem, task.b1 - task.b0, task.g1 - task.g0
        step = max(1, 4 * SCORES // max(1, entries * groups * self.share * len(columns)))
        limits = torch.tensor(self.limits[task.b0 : task.b1])[:, None, None, None]
        visible = torch.zeros(entries, groups, len(columns), dtype=torch.bool)
        heads = slice(task.b0, task.b1), slice(task.g0 * self.share, task.g1 * self.share)
        for i0 in range(0, self.queries, step):
            i = self.offset + torch.arange(i0, min(i0 + step, self.queries))[:, None]
            reached = (columns >= i - self.left) & (columns <= i + self.right) & (columns < limits)
            here = *heads, slice(i0, i0 + step)
            if problem.interval is not None:
                lo, hi, _ = problem.interval[(slice(None), *here, None)] - problem.first_key
                reached = reached & (columns >= lo) & (columns < hi)
            if problem.mask is not None:
                reached = reached & problem.mask[here][..., columns]
            if problem.bias is not None:
                reached = reached & (problem.bias[here][..., columns] != -math.inf)
            reached = reached.expand(entries, groups * self.share, len(i), len(columns))
            visible |= reached.reshape(entries, groups, -1, len(columns)).any(2)
        return visible.flatten(0, 1)

    def compute_logits(self, block: Block, q: Tensor, k: Tensor, out: Tensor, kept: Tensor | None = None) -> None:
        """out [g, rows, n] ← the block's logits, −inf where a key is hidden; kept ← see `multiply_slopes`."""
        problem = self.problem
        torch.baddbmm(out, q, block.take_keys(k).mT, beta=0, alpha=problem.scale, out=out)
        if problem.softcap is not None:
            out.div_(problem.softcap).tanh_().mul_(problem.softcap)
            if kept is not None:
                kept.copy_(out)
        if problem.score is not None:
            if kept is not None:
                kept.copy_(out)
            self._run_score(block, False, out)
        if problem.bias is problem.mask is problem.temperature is problem.row_bias is problem.relative is None:
            return
        s = out.view(*block.size, out.shape[-1])
        if problem.bias is not None:
            bias = block.take(problem.bias)[..., block.keys]
            s.add_(bias).masked_fill_(bias == -math.inf, -math.inf)
        if problem.relative is not None:
            table = problem.relative[block.rows[1], block.relative_columns(self.queries)]
            s.add_(table.unfold(1, out.shape[-1], 1).flip(1))
        if problem.row_bias is not None:
            s.add_(block.take(problem.row_bias)[..., None])
        if problem.mask is not None:
            s.masked_fill_(~block.take(problem.mask)[..., block.keys], -math.inf)
        if problem.temperature is not None:
            s.div_(block.take(problem.temperature)[..., None])

    def multiply_slopes(self, block: Block, kept: Tensor, ds: Tensor) -> None:
        """ds ← ds · ∂/∂x of the soft cap or score function; kept: cap(x), or x of a score function. Overwrites kept."""
        if self.problem.softcap is not None:
            slope = kept.div_(self.problem.softcap).square_().neg_().add_(1.0)
            ds.mul_(slope.masked_fill_(ds == 0.0, 0.0))  # a hidden key's score may be NaN
        else:
            self._run_score(block, True, ds, kept)

    def _run_score(self, block: Block, is_slope: bool, *scores: Tensor) -> None:
        problem = self.problem
        assert problem.score is not None
        params = NO_PARAMS if problem.score_params is None else problem.score_params
        run = score_kernel(problem.score, precision_of(self.dtype), is_slope)
        run(*map(block.as_matrix, scores), block.geometry, block.first_row[1], params.to(self.dtype).numpy())
