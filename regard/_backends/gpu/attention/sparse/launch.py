"""Launch of threshold maps on long rows through lists of candidate keys.

    forward     bound_from_groups → list_candidates → solve_support → gather_o
    backward    bound_from_tau → list_candidates → gather_dq;  list_candidates, transposed → gather_dkv

Rows that the lists cannot solve are flagged for the sweeping kernels (`forward_threshold`, …). The lists of a chunk of
blocks take at most 1 GiB, whatever the length.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import torch
import triton

from regard._backends.gpu.attention import statistics
from regard._backends.gpu.attention.config import has_key_bias
from regard._backends.gpu.attention.hopper.launch import choose_panels, describe_rows
from regard._backends.gpu.attention.limits import find_gluon_obstacle, find_layout_obstacle, find_option
from regard._backends.gpu.attention.sparse import bounds, gather, support
from regard._backends.gpu.attention.tiles import Config, Options
from regard._backends.gpu.launcher import call_by_address, launch
from regard._call.problem import MARKS, Problem

BLOCK = 128  # rows of a program of `list_candidates`
CAP = 128  # entries of one of a row's four lists; a power of two, so that no block's lists cross 4 GiB
SPARE = 32  # of them, as many as one tile may add, so that room is checked once per tile
CHUNK = 2048  # blocks whose lists exist at the same time
GROUPS = 64  # keys of a tile of `bound_from_groups`, and groups of keys whose maxima give the bound
# visible keys from which on half of the tiles give the bound: the lists hold twice as many keys then, and powers tᵏ are
# slow to compute
LONG = {"powers": 8192, "others": 4096}
RESIDENT = {1: 16, 2: 32}  # entries of a list in registers, by the stride of those tiles
STEP = dict(dq=4, dkv=2)  # entries per iteration: the fastest on an H200
# least number of visible keys for which lists are faster; "wide": heads of more than 128 columns
LEAST_KEYS = {
    "forward": 2048,
    "wide forward": 1024,
    "forward of powers or intervals": 1024,
    "backward": 16384,
    "wide backward": 3072,
    "top keys": 512,
}
WIDEST = 256
# (keys per tile, stages, scores staged at a time) without and with statistics or a bias, which take registers, by
# columns in shared memory. The stages exceed 48 KiB because a smaller launch is not allowed the staging buffer on top
KEYS = {
    64: ((128, 2, 16), (64, 4, 16)),
    128: ((128, 2, 16), (64, 3, 16)),
    192: ((64, 2, 16), (64, 2, 16)),
    256: ((128, 2, 16), (64, 3, 16)),
}


def supports(p: Problem, direction: str) -> str | None:
    """Say why lists of candidates cannot serve a call in this direction, or None."""
    if reason := find_gluon_obstacle(p):
        return reason
    d, e = p.q.shape[-1], p.v.shape[-1]
    if d % 8 or e % 8 or max(d, e) > WIDEST:
        return f"head widths {d} and {e} (multiples of 8 up to {WIDEST} only)"
    if p.scale <= 0:
        return "a scale that is not positive"
    if reason := find_option(p, "score", "row_bias", "relative", "mask"):
        return reason
    if reason := _find_bias_obstacle(p):
        return reason
    left_out = {"backward": ("softcap", "bias", "interval"), "top keys": ("softcap", "bias")}
    if reason := find_option(p, *left_out.get(direction, ())):
        return reason
    if p.q.shape[-2] < BLOCK:
        return f"{p.q.shape[-2]} queries ({BLOCK} at least)"
    if direction == "backward":
        least = LEAST_KEYS["wide backward" if max(d, e) > 128 else "backward"]
    elif direction == "top keys":
        least = LEAST_KEYS["top keys"]
    elif p.choice.order and p.interval is None:
        least = LEAST_KEYS["wide forward" if max(d, e) > 128 else "forward"]
    else:
        least = LEAST_KEYS["forward of powers or intervals"]
    if p.span < least:
        return f"{p.span} visible keys ({least} at least)"
    return find_layout_obstacle(p.q, p.k)


def _find_bias_obstacle(p: Problem) -> str | None:
    """Say why the lists cannot take the call's bias: they take one per key without a soft cap."""
    if p.bias is not None and (p.softcap is not None or not has_key_bias(p)):
        return MARKS["bias"].words
    return None


class CandidateLists:
    """The candidate lists of one chunk of blocks of queries or, transposed, of keys."""

    def __init__(self, p: Problem, stats: bool, transposed: bool):
        rows, self.transposed = (p.k, True) if transposed else (p.q, False)
        columns = p.q if transposed else p.k
        self.blocks = triton.cdiv(rows.shape[-2], BLOCK) * rows.shape[0] * rows.shape[1]
        slots = min(self.blocks, CHUNK) * BLOCK
        size = BLOCK * 8 * CAP  # numbers in the lists of a block
        page = torch.empty(slots * 8 * CAP + size, dtype=torch.float32, device=p.q.device)
        self.entries = call_by_address(partial(align, size=4 * size), page)  # no block's lists cross 4 GiB
        self.counts = torch.empty(slots, 4, dtype=torch.int32, device=p.q.device)
        self.supports = torch.empty(slots, dtype=torch.int32, device=p.q.device)
        self.below = torch.empty(slots, 3, 4, dtype=torch.float32, device=p.q.device) if stats else None
        self.panels = choose_panels(p.q.shape[-1], p.q.shape[-1])
        width = self.panels.PANEL * self.panels.PANELS
        self.keys, self.stages, self.staged = KEYS[width][stats or p.bias is not None]
        self.descriptors = tuple(
            describe_rows(x, size, self.panels.PANEL) for x, size in ((rows, BLOCK), (columns, self.keys))
        )

    def fill(self, kind: Hashable, bound, slope, first: int, programs: int, opt: Options) -> None:
        """Fills the lists of `programs` blocks from block `first` on."""
        from regard._backends.gpu.attention.sparse.candidates import list_candidates

        arguments = *self.descriptors, bound, slope, self.counts, self.entries, self.below, first, opt
        panels = self.panels.PANEL, self.panels.PANELS, self.panels.LAST
        constants = BLOCK, self.keys, *panels, self.stages, CAP, CAP - SPARE, self.staged, self.transposed
        launch(kind, list_candidates, programs, arguments, constants, num_warps=8, maxnreg=128)


def align(page: torch.Tensor, size: int) -> torch.Tensor:
    """The part of a page that begins at a multiple of `size` bytes."""
    return page[-page.data_ptr() % size // page.element_size() :]


def make_flags(rows: torch.Tensor, many: Any) -> torch.Tensor:
    """Uninitialised flags, one per `many` rows of each head."""
    shape = *rows.shape[:2], triton.cdiv(rows.shape[-2], many.value)
    return torch.empty(shape, dtype=torch.int32, device=rows.device)


def split_chunks(blocks: int) -> Iterator[tuple[int, int]]:
    """(first block, number of blocks) of every chunk."""
    return ((first, min(CHUNK, blocks - first)) for first in range(0, blocks, CHUNK))


def forward(p: Problem, kind, views, o, shift, z, stats, opt: Options, config: Config, steps: int) -> torch.Tensor:
    """Fills o, shift, z and stats; returns flags of the rows that are left to `forward_threshold`."""
    rows, bound = shift.numel(), torch.empty_like(shift)
    plain = config._replace(
        NEED=statistics.needs((), p.choice, False), SLOT=statistics.slots(()), BM=BLOCK, BN=GROUPS, BULK=False
    )
    q, k, v = views
    blocks = triton.cdiv(p.q.shape[-2], BLOCK) * p.q.shape[0] * p.q.shape[1]
    stride = 1 if p.span < LONG["others" if p.choice.order else "powers"] else 2
    constants = plain, CAP - SPARE, stride
    launch(kind, bounds.bound_from_groups, blocks, (q, k, bound, opt), constants, num_warps=8, num_stages=3)
    slope = None
    if config.NEED.lse or config.NEED.moments:
        slope = torch.empty_like(shift)
        launch(kind, bounds.store_slopes, triton.cdiv(rows, 1024), (slope, rows, opt), (plain, 1024))
    lists, failed = CandidateLists(p, slope is not None, False), make_flags(p.q, support.FLAG_ROWS)
    close = 1e-4 if p.q.element_size() == 2 and not p.stats else 1e-6  # Σp − 1 before the last step
    for first, programs in split_chunks(blocks):
        lists.fill(kind, bound, slope, first, programs, opt)
        results = lists.below, lists.supports, failed, shift, z, stats, first, rows, opt
        arguments = lists.entries.view(torch.int64), lists.counts, bound, *results
        constants = config, CAP, CAP - SPARE, BLOCK, steps, close, RESIDENT[stride]
        launch(kind, support.solve_support, programs * BLOCK // support.ROWS.value, arguments, constants, num_warps=1)
        arguments, constants = (lists.entries, lists.supports, v, o, first, opt), (plain, CAP, BLOCK)
        groups = programs * BLOCK // gather.ROWS.value
        launch(kind, gather.gather_o, groups, arguments, constants, num_warps=config.BE // 16)
    return failed


def backward(
    p: Problem, kind, inputs, shift, z, grads, d_theta, delta, opt: Options, config: Config
) -> Iterator[torch.Tensor]:
    """Fills dq, δ and dθ, then dk and dv; yields flags of the queries, then of the keys, that are left to the sweeps.

    A generator because dk and dv need δ of every row, also of those that the sweep over the queries finishes.
    """
    q, k, v, do = inputs
    dq, dk, dv = grads
    rows, bound = shift.numel(), torch.empty_like(shift)
    launch(kind, bounds.bound_from_tau, triton.cdiv(rows, 1024), (shift, z, bound, rows, opt), (config, 1024))
    lists, failed = CandidateLists(p, False, False), make_flags(p.q, gather.ROWS)
    for first, programs in split_chunks(lists.blocks):
        lists.fill(kind, bound, None, first, programs, opt)
        arguments = lists.entries, lists.counts, k, v, do, dq, d_theta, shift, delta, failed, first, opt
        constants = config, CAP, CAP - SPARE, BLOCK, STEP["dq"]
        launch(kind, gather.gather_dq, programs * BLOCK // gather.ROWS.value, arguments, constants, num_warps=4)
    yield failed
    del lists  # free them before the next lists are made
    arguments = ()
    lists, failed = CandidateLists(p, False, True), make_flags(p.k, gather.ROWS)
    for first, programs in split_chunks(lists.blocks):
        lists.fill(kind, bound, None, first, programs, opt)
        transposed = lists.entries, lists.counts, q, v, do, dk, dv, delta, failed, first, opt
        constants = config, CAP, CAP - SPARE, BLOCK, p.q.shape[1] != p.k.shape[1], STEP["dkv"]
        launch(kind, gather.gather_dkv, programs * BLOCK // gather.ROWS.value, transposed, constants, num_warps=4)
    yield failed
