"""The keys that each query sees, first ≤ j < last, as rows in memory, with their bounds over every 64 queries.

Intervals, windows on both sides, causal order and key lengths become one form here, before the Hopper kernels run. A
kernel visits the key tiles from the smallest `first` to the largest `last` of a block, and masks only tiles that some
row sees in part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.config import view
from regard._backends.gpu.attention.tiles import Options
from regard._backends.gpu.launcher import launch
from regard._call.problem import Problem

GROUP = 64  # queries
FIELDS = tl.constexpr(
    8
)  # numbers of a group: least and largest first, last, position; rows that see nothing; one spare
FAR = tl.constexpr(2**30)  # beyond every key


class Spans(NamedTuple):
    """Where kernels read the rows and their bounds; entries are batch entries, or heads where heads differ."""

    rows: Any  # [3, entries, 64·count] int32: first, last, position; (0, 0, 0) beyond the last query
    groups: Any  # [entries, count, 8] int32, over the rows that see a key; none: first FAR … 0, last FAR … 0
    entries: Any
    count: Any  # groups of an entry
    heads: Any  # entries of a batch entry: 1 or its heads
    each: Any  # 1 if every head has an entry, else 0


def needs_spans(p: Problem) -> bool:
    """True if the keys of a query are no causal prefix, causal window or length."""
    left, right = p.reach
    return p.interval is not None or right not in (None, 0) or (left is not None and (right is None or left < 0))


def find_spans(p: Problem, options: Options) -> Spans:
    """Computes the spans of a call from its interval, window, causal order and key lengths."""
    batch, heads, queries, _ = p.q.shape
    own = p.interval is not None and heads > 1 and p.interval.stride(2) != 0
    entries, count = batch * heads if own else batch, 2 * triton.cdiv(queries, 2 * GROUP)
    number = dict(dtype=torch.int32, device=p.q.device)
    rows = torch.empty(3, entries, count * GROUP, **number)
    groups = torch.empty(entries, count, FIELDS.value, **number)
    spans = Spans(rows, groups, entries, count, heads if own else 1, int(own))
    launch(None, store_spans, entries * count, (view(p.interval), spans, options), (GROUP,), num_warps=1)
    return spans


@triton.jit
def store_spans(interval, spans, opt, SIZE: tl.constexpr):
    """Stores first, last and position of one group of queries, and their bounds."""
    entry, group = tl.program_id(0) // spans.count, tl.program_id(0) % spans.count
    b, h = entry // spans.heads, entry % spans.heads
    i = group * SIZE + tl.arange(0, SIZE)
    inside = i < opt.queries
    n = tiles.key_count(opt, b)
    first = i * 0
    last = i * 0 + n
    position = i
    if opt.left is not None:
        first = tl.maximum(i - opt.left, 0)
    if opt.right is not None:
        last = tl.minimum(i + opt.right + 1, n)
    if interval.ptr is not None:
        at = interval.ptr + tiles.wide(b) * interval.stride[1] + tiles.wide(h) * interval.stride[2]
        at += tiles.wide(i) * interval.stride[3]
        first = tl.maximum(first, tl.load(at, mask=inside, other=0))
        last = tl.minimum(last, tl.load(at + interval.stride[0], mask=inside, other=0))
        position = tl.load(at + 2 * interval.stride[0], mask=inside, other=0)
    alive = inside & (first < last)
    first = tl.where(alive, first, 0)
    last = tl.where(alive, last, 0)
    to = spans.rows + tiles.wide(tl.program_id(0)) * SIZE + tl.arange(0, SIZE)
    plane = tiles.wide(spans.entries) * spans.count * SIZE
    tl.store(to, first)
    tl.store(to + plane, last)
    tl.store(to + 2 * plane, tl.where(inside, position, 0))
    near = tl.minimum(tl.maximum(position, 0), FAR)  # as good as the position: no key lies before 0
    to = spans.groups + tiles.wide(tl.program_id(0)) * FIELDS
    tl.store(to, tl.min(tl.where(alive, first, FAR), 0))
    tl.store(to + 1, tl.max(first, 0))
    tl.store(to + 2, tl.min(tl.where(alive, last, FAR), 0))
    tl.store(to + 3, tl.max(last, 0))
    tl.store(to + 4, tl.min(tl.where(alive, near, FAR), 0))
    tl.store(to + 5, tl.max(tl.where(alive, near, 0), 0))
    tl.store(to + 6, tl.sum(tl.where(alive, 0, 1), 0))  # those beyond the last query among them
    tl.store(to + 7, 0)


def find_query_ranges(p: Problem, spans: Spans, keys: int) -> torch.Tensor:
    """The query tiles of each block of `keys` keys: [B, G, blocks, 4] int32.

    The first tile that sees one of them; the number of tiles up to the last that does; and, counted from the first, the
    begin and end of a run of tiles whose every query sees them all, which may be empty.
    """
    batch, heads, n = p.k.shape[:3]
    blocks = triton.cdiv(n, keys)
    ranges = torch.empty(batch, heads, blocks, 4, dtype=torch.int32, device=p.k.device)
    arguments = spans, ranges, blocks, heads, p.q.shape[1] // heads
    launch(None, store_query_ranges, batch * heads * blocks, arguments, (keys, 256), num_warps=1)
    return ranges


@triton.jit
def store_query_ranges(spans, ranges, blocks, heads, group, KEYS: tl.constexpr, STEP: tl.constexpr):
    """Stores the query tiles that see one block of keys, in any head of its group, and a run that see all of it."""
    pid = tl.program_id(0)
    j0 = pid % blocks * KEYS
    g, b = pid // blocks % heads, pid // blocks // heads
    begin = tl.full([STEP], FAR, tl.int32)
    end = tl.full([STEP], 0, tl.int32)
    inner = tl.full([STEP], FAR, tl.int32)
    for start in range(0, spans.count, STEP):
        tile = start + tl.arange(0, STEP)
        sees, whole = find_views(tile, b, g, j0, spans, group, KEYS)
        begin = tl.minimum(begin, tl.where(sees, tile, FAR))
        end = tl.maximum(end, tl.where(sees, tile + 1, 0))
        inner = tl.minimum(inner, tl.where(whole, tile, FAR))
    lowest, highest, middle = tl.min(begin, 0), tl.max(end, 0), tl.min(inner, 0)
    outer = tl.zeros([STEP], tl.int32) + highest
    for start in range(middle // STEP * STEP, tl.where(middle == FAR, 0, highest), STEP):
        tile = start + tl.arange(0, STEP)
        _, whole = find_views(tile, b, g, j0, spans, group, KEYS)
        outer = tl.minimum(outer, tl.where(whole | (tile < middle), FAR, tile))
    lowest = tl.where(lowest == FAR, 0, lowest)
    middle = tl.where(middle == FAR, highest, middle)
    to = ranges + 4 * tiles.wide(pid)
    tl.store(to, lowest)
    tl.store(to + 1, highest - lowest)
    tl.store(to + 2, middle - lowest)
    tl.store(to + 3, tl.maximum(tl.min(outer, 0), middle) - lowest)


@triton.jit
def find_views(tile, b, g, j0, spans, group, KEYS: tl.constexpr):
    """(does a query of a tile see one of the block's keys?, do all of them see all keys?) for the heads of a group."""
    sees = tile < 0
    whole = tile < spans.count
    for h in range(g * group, g * group + tl.where(spans.each == 1, group, 1)):
        at = find_group(spans, b, h, 0) + tile * FIELDS
        inside = tile < spans.count
        first, latest = tl.load(at, mask=inside, other=FAR), tl.load(at + 1, mask=inside, other=FAR)
        soonest, last = tl.load(at + 2, mask=inside, other=0), tl.load(at + 3, mask=inside, other=0)
        blind = tl.load(at + 6, mask=inside, other=1)
        sees = sees | ((first < j0 + KEYS) & (last > j0))
        whole = whole & (latest <= j0) & (soonest >= j0 + KEYS) & (last > j0) & (blind == 0)
    return sees, whole


@triton.jit
def load_spans(spans, b, h, i0, M: tl.constexpr):
    """(first, last) of queries i0 … i0 + M, and their bounds: smallest and largest first, smallest and largest last."""
    row = find_row(spans, b, h, i0 + tl.arange(0, M))
    group = find_group(spans, b, h, i0) + tl.arange(0, M // 64) * FIELDS
    bounds = (
        tl.min(tl.load(group), 0),
        tl.max(tl.load(group + 1), 0),
        tl.min(tl.load(group + 2), 0),
        tl.max(tl.load(group + 3), 0),
    )
    return tl.load(row), tl.load(row + find_plane(spans)), bounds[0], bounds[1], bounds[2], bounds[3]


@triton.jit
def find_row(spans, b, h, i):
    """Pointers to `first` of queries i; `last` and `position` follow at a distance of `find_plane`."""
    entry = b * spans.heads + h * spans.each
    return spans.rows + tiles.wide(entry) * (spans.count * 64) + i


@triton.jit
def find_plane(spans):
    """Numbers between `first`, `last` and `position` of a row."""
    return tiles.wide(spans.entries) * spans.count * 64


@triton.jit
def find_group(spans, b, h, i0):
    """Pointer to the bounds of the queries from i0 on, i0 a multiple of 64."""
    entry = b * spans.heads + h * spans.each
    return spans.groups + (tiles.wide(entry) * spans.count + i0 // 64) * FIELDS
