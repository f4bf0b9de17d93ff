"""Attention over a part of the keys on the CPU: what `regard.parallel` computes on each rank before parts are merged.

Blocks, products and row kernels are those of `launch.py`; `regard.parallel.torch_engine` has these functions in torch;
`regard._core.problem` says what `Part` and `Whole` hold.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard._backends.cpu.attention import kernels, partial_rows
from regard._backends.cpu.attention.blocks import Block, Blocks, Scratch, Task
from regard._backends.cpu.attention.dropout import apply_dropout
from regard._backends.cpu.attention.forward_rows import FIELDS
from regard._backends.cpu.attention.launch import compute_forward, compute_gradients, detach_problem, packing_room
from regard._backends.cpu.jit.compile import cache_by_normalizer, precision_of
from regard._backends.cpu.tasks import run_tasks
from regard._core.problem import Gradients, Part, Problem, Upstream, Whole
from regard.normalizers import Normalizer
from regard.normalizers._families import nothing
from regard.normalizers._language import speak, torch_words

ROWS = 1024  # rows of a head in one task of `gathered`


class Kept(NamedTuple):
    """The keys above a part's own threshold: their number [B, H, M], gain·s − high and index [B, H, M, room]."""

    counts: Tensor
    support: Tensor
    places: Tensor


def forward(problem: Problem) -> Part:
    """The part of a ratio or pointwise normaliser, before rest and sink."""
    problem = detach_problem(problem)
    o, m, z, sums = compute_forward(problem, problem.accumulator, keep_sums=True)
    rest = getattr(problem.choice.normalizer, "rest", nothing)
    if rest is not nothing:  # it joins once, when all parts are there
        own = z - speak(rest, torch_words)(torch.exp(-m))
        o, z = o * torch.where(own > 0, z / own, 0.0)[..., None], own
    return Part(o, m, z, sums=sums if problem.stats else None)


def solve(problem: Problem, room: int) -> tuple[Tensor, Tensor, Kept]:
    """(high, c) of the part's keys alone, and up to `room` keys per row that are above that threshold."""
    problem, shape, theta = detach_problem(problem), problem.q.shape[:3], problem.choice.theta or 0.0
    high, c = torch.empty((2, *shape), dtype=problem.accumulator)
    support, places = high.new_empty((*shape, room)), torch.empty((*shape, room), dtype=torch.int32)
    counts = torch.empty(shape, dtype=torch.int64)
    run = _part_kernel(partial_rows.solve_part, problem)

    def work(block: Block, s: Tensor, v: Tensor, scratch: Scratch) -> None:
        above = np.empty((block.count, room), s.numpy().dtype)
        where = np.empty((block.count, room), np.int32)
        arrays = [block.row_output(x) for x in (high, c, counts)]
        found = *arrays, above, where, packing_room(scratch, block)
        run(block.as_matrix(s), block.geometry, theta, block.keys.start, *found)
        used = min(room, int(arrays[2].max(initial=0)))
        for whole, own in ((support, above), (places, where)):
            block.take(whole)[..., :used] = block.unflatten(torch.from_numpy(own))[..., :used]
        for x, array in zip((high, c, counts), arrays, strict=True):
            block.store_rows(x, array)

    _run_on_logits(Blocks(problem), work)
    return high, c, Kept(counts, support, places)


def summed(problem: Problem, kept: Kept, shift: Tensor, c: Tensor) -> Tensor:
    """(Σp, Σg′) [2, B, H, M] at τ of the keys that `solve` kept; shift is the part's own high − the row's."""
    sums = torch.empty((2, c.numel()), dtype=torch.float64)
    rows = (kept.support.flatten(0, 2), kept.counts.flatten(), shift.flatten(), c.flatten())
    run = _part_kernel(partial_rows.sum_support, problem)
    run(*(x.numpy() for x in rows), problem.choice.theta or 0.0, *sums.numpy())
    return sums.view(2, *c.shape)


def gathered(problem: Problem, kept: Kept, shift: Tensor, high: Tensor, c: Tensor, rises: bool) -> Part:
    """`weigh` without statistics, from the keys that `solve` kept; with Σg′·v if `rises`."""
    problem, wide, shape = detach_problem(problem), problem.accumulator, problem.q.shape[:3]
    o = torch.empty((*shape, problem.v.shape[-1]), dtype=wide)
    w = torch.empty((*shape, o.shape[-1] if rises else 0), dtype=wide)
    totals = torch.empty((2, *shape), dtype=torch.float64)
    run = _part_kernel(partial_rows.gather_support, problem)
    share = shape[1] // max(1, problem.v.shape[1])

    def work(item: tuple[int, int, int], own: dict) -> None:
        b, h, i = item
        here = b, h, slice(i, i + ROWS)
        v = problem.v[b, h // share].to(wide).contiguous()
        given = (x[here].numpy() for x in (kept.support, kept.places, kept.counts, shift, c))
        found = (x.numpy() for x in (v, o[here], w[here], *totals[(slice(None), *here)]))
        run(*given, problem.choice.theta or 0.0, *found)

    starts = range(0, shape[2], ROWS)
    run_tasks([(b, h, i) for b in range(shape[0]) for h in range(shape[1]) for i in starts], work)
    value, slope = totals.to(wide)
    return Part(o, high.to(wide), value, slope, rises=w if rises else None)


def measure(problem: Problem, high: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """(Σp, Σg′) of the part's keys at τ, each [B, H, M] in float64."""
    problem, theta = detach_problem(problem), problem.choice.theta or 0.0
    sums = torch.empty((2, *problem.q.shape[:3]), dtype=torch.float64)
    run = _part_kernel(partial_rows.measure_part, problem)

    def work(block: Block, s: Tensor, v: Tensor, scratch: Scratch) -> None:
        found = block.row_output(sums)
        run(block.as_matrix(s), block.geometry, theta, block.row_array(high), block.row_array(c), *found)
        block.store_rows(sums, found)

    _run_on_logits(Blocks(problem), work)
    return sums[0], sums[1]


def weigh(problem: Problem, high: Tensor, c: Tensor) -> Part:
    """The part of a threshold normaliser at τ, with the sums of its statistics."""
    problem, wide, shape = detach_problem(problem), problem.accumulator, problem.q.shape[:3]
    theta = problem.choice.theta or 0.0
    o = torch.empty((*shape, problem.v.shape[-1]), dtype=wide)
    totals = torch.empty((2, *shape), dtype=torch.float64)
    sums = torch.empty((FIELDS if problem.stats else 0, *shape), dtype=torch.float64)
    run = _part_kernel(partial_rows.weigh_part, problem, *kernels.statistics_flags(problem.stats).items())
    blocks = Blocks(problem)

    def work(block: Block, s: Tensor, v: Tensor, scratch: Scratch) -> None:
        total, found = block.row_output(totals), block.row_output(sums)
        run(block.as_matrix(s), block.geometry, theta, block.row_array(high), block.row_array(c), *total, found)
        apply_dropout(blocks, block, s)
        block.take(o).copy_(torch.bmm(s, block.take_keys(v)).view(*block.size, v.shape[-1]))
        block.store_rows(totals, total)
        block.store_rows(sums, found)

    _run_on_logits(blocks, work)
    value, slope = totals.to(wide)
    return Part(o, high.clone(), value, slope, sums if problem.stats else None)


def slopes(problem: Problem, do: Tensor, high: Tensor, c: Tensor) -> Tensor:
    """Σ g′·dp of the part's keys at τ, [B, H, M]."""
    problem, theta = detach_problem(problem), problem.choice.theta or 0.0
    total = torch.empty(problem.q.shape[:3], dtype=problem.accumulator)
    run = _part_kernel(partial_rows.slopes_part, problem)
    blocks = Blocks(problem)

    def work(block: Block, s: Tensor, v: Tensor, scratch: Scratch) -> None:
        dp = scratch("dp", *block.shape)
        torch.bmm(blocks.rows_of(do, block), block.take_keys(v).mT, out=dp)
        apply_dropout(blocks, block, dp)
        found = block.row_output(total)
        rows = block.row_array(high), block.row_array(c), found
        run(block.as_matrix(s), block.as_matrix(dp), block.geometry, theta, *rows)
        block.store_rows(total, found)

    _run_on_logits(blocks, work)
    return total


def backward(problem: Problem, whole: Whole, upstream: Upstream) -> Gradients:
    """The gradients of a part, from what is known of its whole rows."""
    problem = detach_problem(problem)
    rows = _BackwardRows(problem, whole)
    gradients = compute_gradients(problem, upstream, rows, problem.accumulator)
    if upstream.temperature:
        gradients.temperature = -rows.ds_dot_s / problem.temperature
    return gradients


class _BackwardRows:
    """s ← p, dp ← ds of a block, from what is known of whole rows."""

    def __init__(self, problem: Problem, whole: Whole):
        wide = problem.accumulator
        c = torch.exp(-whole.m) if whole.c is None else whole.c
        self.state = [x.to(wide) for x in (whole.m, c, whole.z, whole.delta)]
        self.tilt = self.state[0][None] if whole.tilt is None else whole.tilt.to(wide)
        self.ds_dot_s = torch.zeros(problem.q.shape[:3], dtype=wide)
        self.theta = problem.choice.theta or 0.0
        self.kernel = _part_kernel(partial_rows.backward_part, problem, ("stat_gradients", whole.tilt is not None))

    def __call__(self, block: Block, s: Tensor, dp: Tensor) -> None:
        found = block.row_output(self.ds_dot_s)
        rows = *(block.row_array(x) for x in self.state), block.row_array(self.tilt), found
        self.kernel(block.as_matrix(s), block.as_matrix(dp), block.geometry, self.theta, *rows)
        block.store_rows(self.ds_dot_s, found)


def _run_on_logits(blocks: Blocks, work: Callable[[Block, Tensor, Tensor, Scratch], None]) -> None:
    """Calls work(block, s, v, scratch) for the logits s of every block, and v of its task."""

    def run_task(task: Task, scratch: Scratch) -> None:
        k, v, are_finite = blocks.keys_of(task)
        for block in blocks.blocks_of(task, are_finite):
            s = scratch("s", *block.shape)
            blocks.compute_logits(block, blocks.rows_of(blocks.problem.q, block), k, s)
            work(block, s, v, scratch)

    blocks.run(run_task)


def _part_kernel(template: FunctionType, problem: Problem, *flags: tuple[str, bool]) -> Callable:
    return _compile_part(problem.choice.normalizer, precision_of(problem.accumulator), template, *flags)


@cache_by_normalizer
def _compile_part(normalizer: Normalizer, precision: str, template: FunctionType, *flags: tuple[str, bool]) -> Callable:
    return kernels.template_kernel(normalizer, precision, template, is_part=True, **dict(flags))
