"""Launch of the road over lists, for threshold maps on long rows: one sweep, then the few keys that count.

    forward     first_level → candidates → settle → gather_o
    backward    candidates above τ → gather_dq;  the same with rows and columns exchanged → gather_dkv

What fails is flagged for the kernels that sweep (`forward_threshold`, …). The
lists of a chunk of blocks take 1 GiB at most, whatever the length.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton

from regard._backends.gpu.attention import statistics
from regard._backends.gpu.attention.hopper.launch import described
from regard._backends.gpu.attention.limits import find_gluon_obstacle, find_layout_obstacle, find_option
from regard._backends.gpu.attention.sparse import bounds as levels
from regard._backends.gpu.attention.sparse import gather, support
from regard._backends.gpu.attention.tiles import Config, Options
from regard._backends.gpu.launcher import launch
from regard._core.problem import Problem

BLOCK = 128  # rows of a program of `candidates`
CAP = 128  # entries of one of a row's four lists; a power of two, so that no block's lists cross 4 GiB
SPARE = 32  # of them, so that a tile need not ask for room: it adds no more
CHUNK = 2048  # blocks whose lists exist at a time
SAMPLE = 64  # keys, four times, that the first level is guessed from
STRIDE = 2  # of so many key blocks one counts for it; a level from fewer fills the lists of long rows
STEP = dict(dq=4, dkv=2)  # entries at a time: with four warps the fastest on an H200
LENGTHS = {"forward": range(3072, 2**31), "backward": range(16384, 2**31)}  # keys: where lists were measured faster
# keys per tile, stages and the scores of a row that are put aside at a time, without statistics and with them, which
# take registers; the stages are more than 48 KiB, as a launch with less is not allowed what is put aside on top of it
KEYS = {64: ((128, 2, 16), (64, 4, 16)), 128: ((128, 2, 16), (64, 3, 16))}


def supports(p: Problem, direction: str) -> str | None:
    """Say why lists of candidates cannot serve a call in this direction, or None."""
    if reason := find_gluon_obstacle(p):
        return reason
    for width in (p.q.shape[-1], p.v.shape[-1]):
        if width not in KEYS:
            return f"head width {width} ({' and '.join(map(str, KEYS))} only)"
    if p.scale <= 0:
        return "a scale that is not positive"
    if reason := find_option(p, "softcap", "bias", "mask"):
        return reason
    if p.q.shape[-2] < BLOCK:
        return f"{p.q.shape[-2]} queries ({BLOCK} at least)"
    if span(p) not in LENGTHS[direction]:
        return f"{span(p)} visible keys ({LENGTHS[direction].start} at least)"
    return find_layout_obstacle(p.q, p.k)


def span(p: Problem) -> int:
    """Keys that a row may see."""
    (left, right), keys = p.reach, p.k.shape[-2]
    return keys if left is None or right is None else min(keys, left + right + 1)


class Lists:
    """The lists of one chunk, and the sweep that fills them."""

    def __init__(self, p: Problem, stats: bool, transposed: bool):
        rows, self.transposed = (p.k, True) if transposed else (p.q, False)
        columns = p.q if transposed else p.k
        self.blocks = triton.cdiv(rows.shape[-2], BLOCK) * rows.shape[0] * rows.shape[1]
        slots = min(self.blocks, CHUNK) * BLOCK
        size = BLOCK * 8 * CAP  # numbers in the lists of a block
        page = torch.empty(slots * 8 * CAP + size, dtype=torch.float32, device=p.q.device)
        self.entries = page[-page.data_ptr() % (4 * size) // 4 :]  # no block's lists cross 4 GiB
        self.counts = torch.empty(slots, 4, dtype=torch.int32, device=p.q.device)
        self.found = torch.empty(slots, dtype=torch.int32, device=p.q.device)
        self.below = torch.empty(slots, 3, 4, dtype=torch.float32, device=p.q.device) if stats else None
        self.keys, self.stages, self.aside = KEYS[p.q.shape[-1]][stats]
        self.described = described(rows, BLOCK), described(columns, self.keys)
        self.width = p.q.shape[-1]

    def fill(self, kind, level, slope, first: int, programs: int, opt: Options) -> None:
        from regard._backends.gpu.attention.sparse.candidates import Reach, candidates

        reach = Reach(opt.lengths, opt.left, opt.right, opt.heads, opt.group, opt.queries, opt.keys)
        arguments = *self.described, level, slope, self.counts, self.entries, self.below, first, reach
        constants = BLOCK, self.keys, self.width, self.stages, CAP, CAP - SPARE, self.aside, self.transposed
        launch(kind, candidates, programs, arguments, constants, num_warps=8, maxnreg=128)


def flags_of(rows: torch.Tensor, many) -> torch.Tensor:
    """A flag for every few rows."""
    shape = *rows.shape[:2], triton.cdiv(rows.shape[-2], many.value)
    return torch.empty(shape, dtype=torch.int32, device=rows.device)


def chunks(blocks: int):
    return ((first, min(CHUNK, blocks - first)) for first in range(0, blocks, CHUNK))


def forward(p: Problem, kind, views, o, shift, z, stats, opt: Options, config: Config, steps: int) -> torch.Tensor:
    """Fill o, shift, z and stats; flags of the rows that are left to the sweeps."""
    rows, level = shift.numel(), torch.empty_like(shift)
    bare = config._replace(
        NEED=statistics.needs((), p.choice, False), SLOT=statistics.slots(()), BM=BLOCK, BN=SAMPLE, BULK=False
    )
    q, k, v = views
    blocks = triton.cdiv(p.q.shape[-2], BLOCK) * p.q.shape[0] * p.q.shape[1]
    constants = bare, CAP - SPARE, STRIDE
    launch(kind, levels.first_level, blocks, (q, k, level, opt), constants, num_warps=8, num_stages=3)
    slope = None
    if config.NEED.lse or config.NEED.moments:
        slope = torch.empty_like(shift)
        launch(kind, levels.steepness, triton.cdiv(rows, 1024), (slope, rows, opt), (bare, 1024))
    lists, failed = Lists(p, slope is not None, False), flags_of(p.q, support.FLAGGED)
    for first, programs in chunks(blocks):
        lists.fill(kind, level, slope, first, programs, opt)
        told = lists.below, lists.found, failed, shift, z, stats, first, rows, opt
        arguments = lists.entries.view(torch.int64), lists.counts, level, *told
        constants = config, CAP, CAP - SPARE, BLOCK, steps, 1e-6
        launch(kind, support.settle, programs * BLOCK // support.ROWS.value, arguments, constants, num_warps=1)
        arguments, constants = (lists.entries, lists.found, v, o, first, opt), (bare, CAP, BLOCK)
        groups = programs * BLOCK // gather.ROWS.value
        launch(kind, gather.gather_o, groups, arguments, constants, num_warps=p.v.shape[-1] // 16)
    return failed


def backward(p: Problem, kind, inputs, shift, z, grads, delta, opt: Options, config: Config) -> Iterator[torch.Tensor]:
    """Fill dq, dk, dv and δ; flags of the queries and of the keys that are left to the sweeps.

    A generator in two steps, as the keys need every row's δ: yields the queries' flags, then the keys'.
    """
    q, k, v, do = inputs
    dq, dk, dv = grads
    rows, level = shift.numel(), torch.empty_like(shift)
    launch(kind, levels.last_level, triton.cdiv(rows, 1024), (shift, z, level, rows, opt), (config, 1024))
    lists, left = Lists(p, False, False), flags_of(p.q, gather.ROWS)
    for first, programs in chunks(lists.blocks):
        lists.fill(kind, level, None, first, programs, opt)
        arguments = lists.entries, lists.counts, k, v, do, dq, shift, delta, left, first, opt
        constants = config, CAP, CAP - SPARE, BLOCK, STEP["dq"]
        launch(kind, gather.gather_dq, programs * BLOCK // gather.ROWS.value, arguments, constants, num_warps=4)
    yield left
    del lists, arguments  # before the others are made
    lists, left = Lists(p, False, True), flags_of(p.k, gather.ROWS)
    for first, programs in chunks(lists.blocks):
        lists.fill(kind, level, None, first, programs, opt)
        arguments = lists.entries, lists.counts, q, v, do, dk, dv, delta, left, first, opt
        constants = config, CAP, CAP - SPARE, BLOCK, p.q.shape[1] != p.k.shape[1], STEP["dkv"]
        launch(kind, gather.gather_dkv, programs * BLOCK // gather.ROWS.value, arguments, constants, num_warps=4)
    yield left
