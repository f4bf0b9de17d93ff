"""A part of the keys on the CPU, fused: what `regard.parallel` computes on each rank before parts are merged.

Blocks, products and row kernels are those of `launch.py`; see `regard.parallel.torch_engine` for each function,
and `regard._core.problem` for `Part` and `Whole`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard._backends.cpu import cores
from regard._backends.cpu.attention import kernels
from regard._backends.cpu.attention import partial_rows as templates
from regard._backends.cpu.attention.blocks import Block, Blocks, Scratch, Task
from regard._backends.cpu.attention.launch import FIELDS, detached, drop, pulled, weighed
from regard._backends.cpu.jit.compile import kernel
from regard._core.problem import Gradients, Part, Problem, Upstream, Whole
from regard.normalizers import Normalizer
from regard.normalizers._families import nothing
from regard.normalizers._language import speak, torch_words

ROWS = 1024  # of a head, gathered together


class Kept(NamedTuple):
    """The keys above a part's own threshold: their number [B, H, M], and gain·s − high and place [B, H, M, room]."""

    counts: Tensor
    support: Tensor
    places: Tensor


def forward(problem: Problem) -> Part:
    problem = detached(problem)
    o, (m, z), sums = weighed(problem, problem.accumulator)
    rest = getattr(problem.choice.normalizer, "rest", nothing)
    if rest is not nothing:  # it joins once, when all parts are there
        own = z - speak(rest, torch_words)(torch.exp(-m))
        o, z = o * torch.where(own > 0, z / own, 0.0)[..., None], own
    return Part(o, m, z, sums=sums if problem.stats else None)


def solve(problem: Problem, room: int) -> tuple[Tensor, Tensor, Kept]:
    problem, shape = detached(problem), problem.q.shape[:3]
    high, c = torch.empty((2, *shape), dtype=problem.accumulator)
    support, places = high.new_empty((*shape, room)), torch.empty((*shape, room), dtype=torch.int32)
    counts = torch.empty(shape, dtype=torch.int64)
    compiled = _kernel(templates.solve_part, problem)

    def work(blocks: Blocks, block: Block, s: Tensor, scratch: Scratch) -> None:
        rows, above = scratch("rows", 2, block.count), scratch("support", block.count, room)
        many, where = torch.empty(block.count, dtype=torch.int64), torch.empty(above.shape, dtype=torch.int32)
        place = *blocks.geometry(block), problem.choice.theta or 0.0, block.keys.start
        compiled(block.flat(s), *place, *rows.numpy(), many.numpy(), above.numpy(), where.numpy())
        high[block.rows], c[block.rows], counts[block.rows] = block.of(rows[0]), block.of(rows[1]), block.of(many)
        used = min(room, int(many.max()))
        for whole, own in ((support, above), (places, where)):
            whole[block.rows][..., :used] = block.of(own)[..., :used]

    _sweep(problem, work)
    return high, c, Kept(counts, support, places)


def summed(problem: Problem, kept: Kept, shift: Tensor, c: Tensor) -> Tensor:
    """(Σp, Σg′) [2, B, H, M] at τ of the keys that `solve` kept; shift is the part's own high − the row's."""
    sums = torch.empty((2, c.numel()), dtype=torch.float64)
    rows = (kept.support.flatten(0, 2), kept.counts.flatten(), shift.flatten(), c.flatten())
    compiled = _kernel(templates.sum_support, problem)
    compiled(*(x.numpy() for x in rows), problem.choice.theta or 0.0, *sums.numpy())
    return sums.view(2, *c.shape)


def gathered(problem: Problem, kept: Kept, shift: Tensor, high: Tensor, c: Tensor, rises: bool) -> Part:
    """`weigh` without statistics, from the keys that `solve` kept; with Σg′·v if `rises`."""
    problem, wide, shape = detached(problem), problem.accumulator, problem.q.shape[:3]
    o = torch.empty((*shape, problem.v.shape[-1]), dtype=wide)
    w = torch.empty((*shape, o.shape[-1] if rises else 0), dtype=wide)
    totals = torch.empty((2, *shape), dtype=torch.float64)
    compiled = _kernel(templates.gather_support, problem)
    share = shape[1] // max(1, problem.v.shape[1])
    cuts = range(0, shape[2], ROWS)

    def work(item: tuple[int, int, int], own: dict) -> None:
        b, h, i = item
        here = b, h, slice(i, i + ROWS)
        v = problem.v[b, h // share].to(wide).contiguous()
        known = (x[here].numpy() for x in (kept.support, kept.places, kept.counts, shift, c))
        found = (x.numpy() for x in (v, o[here], w[here], *totals[:, *here]))
        compiled(*known, problem.choice.theta or 0.0, *found)

    cores.each([(b, h, i) for b in range(shape[0]) for h in range(shape[1]) for i in cuts], work)
    value, slope = totals.to(wide)
    return Part(o, high.to(wide), value, slope, rises=w if rises else None)


def measure(problem: Problem, high: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    problem = detached(problem)
    sums = torch.empty((2, *problem.q.shape[:3]), dtype=torch.float64)
    compiled = _kernel(templates.measure_part, problem)

    def work(blocks: Blocks, block: Block, s: Tensor, scratch: Scratch) -> None:
        found = torch.empty((2, block.count), dtype=torch.float64)
        rows = _rows(block, scratch, high, c)
        compiled(block.flat(s), *blocks.geometry(block), problem.choice.theta or 0.0, *rows, *found.numpy())
        sums[:, *block.rows] = found.view(2, *block.heads)

    _sweep(problem, work)
    return sums[0], sums[1]


def weigh(problem: Problem, high: Tensor, c: Tensor) -> Part:
    problem, wide, shape = detached(problem), problem.accumulator, problem.q.shape[:3]
    o = torch.empty((*shape, problem.v.shape[-1]), dtype=wide)
    totals = torch.empty((2, *shape), dtype=torch.float64)
    sums = torch.empty((len(FIELDS), *shape) if problem.stats else (0, 0, 0, 0), dtype=torch.float64)
    flags = kernels.flags(problem.stats)
    compiled = _kernel(templates.weigh_part, problem, **flags)

    def work(blocks: Blocks, block: Block, s: Tensor, scratch: Scratch, v: Tensor) -> None:
        found, total = (torch.empty((n, block.count), dtype=torch.float64) for n in (len(sums), 2))
        rows = _rows(block, scratch, high, c)
        place = *blocks.geometry(block), problem.choice.theta or 0.0
        compiled(block.flat(s), *place, *rows, *total.numpy(), found.numpy())
        drop(blocks, block, s)
        o[block.rows] = block.of(torch.bmm(s, v[:, block.keys]).flatten(0, 1))
        totals[:, *block.rows] = total.view(2, *block.heads)
        if problem.stats:
            sums[:, *block.rows] = found.view(len(sums), *block.heads)

    _sweep(problem, work, values=True)
    value, slope = totals.to(wide)
    return Part(o, high.clone(), value, slope, sums if problem.stats else None)


def slopes(problem: Problem, do: Tensor, high: Tensor, c: Tensor) -> Tensor:
    problem = detached(problem)
    total = torch.empty(problem.q.shape[:3], dtype=problem.accumulator)
    compiled = _kernel(templates.slopes_part, problem)

    def work(blocks: Blocks, block: Block, s: Tensor, scratch: Scratch, v: Tensor) -> None:
        dp = scratch("dp", *block.shape)
        torch.bmm(blocks.wide(do, block), v[:, block.keys].mT, out=dp)
        drop(blocks, block, dp)
        rows, found = _rows(block, scratch, high, c), scratch("found", block.count)
        place = *blocks.geometry(block), problem.choice.theta or 0.0
        compiled(block.flat(s), block.flat(dp), *place, *rows, found.numpy())
        total[block.rows] = block.of(found)

    _sweep(problem, work, values=True)
    return total


def backward(problem: Problem, whole: Whole, upstream: Upstream) -> Gradients:
    problem = detached(problem)
    rows = _BackwardRows(problem, whole, upstream)
    grads = pulled(problem, upstream, rows, problem.accumulator)
    if upstream.temperature:
        grads.temperature = -rows.pull / problem.temperature
    return grads


class _BackwardRows:
    """s ← p, dp ← ds of a block, from what is known of whole rows."""

    def __init__(self, problem: Problem, whole: Whole, upstream: Upstream):
        wide = problem.accumulator
        c = torch.exp(-whole.m) if whole.c is None else whole.c
        self.known = torch.stack([x.to(wide) for x in (whole.m, c, whole.z, whole.delta)])
        self.tilt = None if whole.tilt is None else whole.tilt.to(wide)
        self.pull = torch.zeros(problem.q.shape[:3], dtype=wide)
        self.theta = problem.choice.theta or 0.0
        flags = dict(tilted=whole.tilt is not None, heated=upstream.temperature)
        self.kernel = _kernel(templates.backward_part, problem, **flags)

    def __call__(self, blocks: Blocks, block: Block, s: Tensor, dp: Tensor, scratch: Scratch) -> None:
        state = scratch("state", 9, block.count)
        state[:4].view(4, *block.heads).copy_(self.known[:, *block.rows])
        if self.tilt is not None:
            state[4:8].view(4, *block.heads).copy_(self.tilt[:, *block.rows])
        arrays = *state[:4].numpy(), state[4:8].numpy(), state[8].numpy()
        self.kernel(block.flat(s), block.flat(dp), *blocks.geometry(block), self.theta, *arrays)
        self.pull[block.rows] = block.of(state[8])


def _sweep(problem: Problem, work: Callable, values: bool = False) -> None:
    """work(blocks, block, s, scratch[, v]) for the logits s of every block."""
    blocks = Blocks(problem)

    def all_blocks(task: Task, scratch: Scratch) -> None:
        k, v = blocks.keys_of(task)
        for block in blocks.of(task):
            s = scratch("s", *block.shape)
            blocks.scores(block, blocks.wide(problem.q, block), k, s)
            work(blocks, block, s, scratch, *([v] if values else []))

    blocks.run(all_blocks)


def _rows(block: Block, scratch: Scratch, high: Tensor, c: Tensor):
    rows = scratch("rows", 2, block.count)
    block.of(rows[0]).copy_(high[block.rows])
    block.of(rows[1]).copy_(c[block.rows])
    return rows.numpy()


def _kernel(template: Callable, problem: Problem, **flags: bool) -> Callable:
    precision = "float64" if problem.accumulator == torch.float64 else "float32"
    return _compiled(template, problem.choice.normalizer, precision, **flags)


@functools.cache
def _compiled(template: Callable, normalizer: Normalizer, precision: str, **flags: bool) -> Callable:
    return kernel(template, {**kernels.tiles(normalizer, precision), **flags}, precision)
