"""Small tables that a call's kernels read, filled on the device before them: no wait for the host.

    pack_bits      of a dense mask: its bits, each row's first and last key, and whether some row has a hole
    map_tiles      of a dense mask: the full and the partial tiles of each block, each row's first key and their number
    index_keys     of a bias per key: which keys it leaves visible
    find_queries   of ragged rows, for dk and dv: the range of queries that see a block of keys

A table is made for one call and dropped with it. Heads that share their masks share their table.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from regard._backends.gpu.attention import scores, tiles, visibility
from regard._backends.gpu.attention.config import view
from regard._backends.gpu.attention.tiles import NO_TABLE, Config, KeyIndex, MaskBits, Options, Table, TileMap
from regard._backends.gpu.attention.visibility import NOWHERE
from regard._backends.gpu.launcher import launch
from regard._core.problem import Problem

COLUMNS = 64  # of a mask that are mapped at once
PACKED = 512  # columns that are packed at once
PADDED = 128  # what rows in bits are padded to: the widest tile
FEW_SCORES = 2**22  # of a mask, below which three more launches cost more than intervals save
KEYS = 1024  # of a key bias
QUERIES = 1024


class PackedMask(NamedTuple):
    """A call's mask as kernels read it; `holes` as in `Options`."""

    bits: MaskBits
    holes: torch.Tensor | None


@triton.jit
def pack_bits(
    words, interval, holes, mask, heads, queries, keys, width,
    ROWS: tl.constexpr, SIZE: tl.constexpr, SHARED: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Pack ROWS rows of a mask, or the one that all queries share; store lo, hi and position where they are asked for.

    `width` are the words of a row. The interval of a row with holes reaches from its first visible key to its last.
    """
    count = 1 if SHARED else queries
    blocks = tl.cdiv(count, ROWS)
    head = tl.program_id(0) // blocks
    i = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    inside = (i < count)[:, None]
    row = words + (tiles.wide(head) * count + i)[:, None] * width
    first = tl.full([ROWS], NOWHERE, tl.int32)
    last = tl.zeros([ROWS], tl.int32)
    seen = tl.zeros([ROWS], tl.int32)
    for start in tl.range(0, 32 * width, SIZE):
        j = (start + tl.arange(0, SIZE))[None, :]
        where = scores.dense_ptr(mask, head // heads, head % heads, i[:, None], j)
        shown = tl.load(where, mask=inside & (j < keys), other=0).to(tl.int32)
        shown = tl.where(shown != 0, 1, 0)
        first = tl.minimum(first, tl.min(tl.where(shown != 0, j, NOWHERE), 1))
        last = tl.maximum(last, tl.max(tl.where(shown != 0, j + 1, 0), 1))
        seen += tl.sum(shown, 1)
        bits = tl.sum(tl.reshape(shown, [ROWS, SIZE // 32, 32]) << tl.arange(0, 32)[None, None, :], 2)
        at = (start // 32 + tl.arange(0, SIZE // 32))[None, :]
        tl.store(row + at, bits, mask=inside & (at < width))
    if interval is not None:
        first = tl.where(seen > 0, first, 0)
        if tl.max(tl.where(last - first == seen, 0, 1), 0) > 0:
            tl.store(holes, 1)
        to = interval + tiles.wide(head) * queries
        plane = tl.num_programs(0) // blocks * tiles.wide(queries)
        if SHARED:
            for start in tl.range(0, queries, MANY):
                store_interval(to, plane, start + tl.arange(0, MANY), tl.max(first, 0), tl.max(last, 0), queries)
        else:
            store_interval(to, plane, i, first, last, queries)


@triton.jit
def store_interval(to, plane, i, first, last, queries):
    """Store lo, hi and position of queries i."""
    tl.store(to + i, first + i * 0, mask=i < queries)
    tl.store(to + plane + i, last + i * 0, mask=i < queries)
    tl.store(to + 2 * plane + i, i, mask=i < queries)


@triton.jit
def map_tiles(
    lists, counts, rows, opt, heads, columns,
    BLOCK: tl.constexpr, TILE: tl.constexpr, MANY: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """List the tiles of one block of queries, or of keys: MANY tiles of TILE columns at a time."""
    if opt.holes is not None:
        if tl.load(opt.holes) == 0:
            return
    size = opt.keys if KEYS_FIRST else opt.queries
    blocks = tl.cdiv(size, BLOCK)
    tiles_in_row = tl.cdiv(columns, TILE)
    pid = tl.program_id(0)
    head = pid // blocks
    b = head // heads  # the first of those that share the table
    h = head % heads
    r = pid % blocks * BLOCK + tl.arange(0, BLOCK)[:, None]
    n = tiles.key_count(opt, b)
    lists += tiles.wide(pid) * (tiles_in_row + 1)
    full = 0
    partial = 0
    first_key = tl.full([BLOCK], NOWHERE, tl.int32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, columns, MANY * TILE):
        c = start + tl.arange(0, MANY * TILE)[None, :]
        i = c if KEYS_FIRST else r
        j = r if KEYS_FIRST else c
        first, last = visibility.visible_range(b, h, i, opt, n)
        there = (i < opt.queries) & (j >= first) & (j < last)
        if KEYS_FIRST:
            bits = scores.load_bits(b, h, i, j, pid % blocks * BLOCK, opt, BLOCK)
        else:
            bits = scores.load_bits(b, h, i, j, start, opt, MANY * TILE)
        shown = tl.where(there, (bits >> (j & 31)) & 1, 0)
        if not KEYS_FIRST:
            first_key = tl.minimum(first_key, tl.min(tl.where(shown != 0, j, NOWHERE), 1))
            count += tl.sum(shown, 1)
        each = tl.sum(tl.sum(tl.reshape(shown, [BLOCK, MANY, TILE]), 2), 0)  # [MANY]
        if KEYS_FIRST:
            is_full = tl.where(each == BLOCK * TILE, 1, 0)
        else:  # rows beyond the last need no keys
            is_full = tl.where(each == tl.minimum(size - pid % blocks * BLOCK, BLOCK) * TILE, 1, 0)
        is_partial = tl.where(each > 0, 1 - is_full, 0)
        places = start + tl.arange(0, MANY) * TILE
        at = full + tl.cumsum(is_full, 0) - 1
        tl.store(lists + at, places, mask=is_full != 0)
        at = tiles_in_row - partial - tl.cumsum(is_partial, 0)
        tl.store(lists + at, places, mask=is_partial != 0)
        full += tl.sum(is_full, 0)
        partial += tl.sum(is_partial, 0)
    tl.store(counts + 2 * tiles.wide(pid), full)
    tl.store(counts + 2 * tiles.wide(pid) + 1, partial)
    if not KEYS_FIRST:
        i = pid % blocks * BLOCK + tl.arange(0, BLOCK)
        where = rows + 2 * (tiles.wide(head) * opt.queries + i)
        tl.store(where, first_key, mask=i < opt.queries)
        tl.store(where + 1, count, mask=i < opt.queries)


@triton.jit
def index_keys(rank, keys, opt, heads, SIZE: tl.constexpr):
    """List the keys of one head whose bias is above −inf, and how many lie before each key."""
    head = tl.program_id(0)
    b = head // heads
    h = head % heads
    rank += tiles.wide(head) * (opt.keys + 1)
    keys += tiles.wide(head) * opt.keys
    total = 0
    for start in tl.range(0, opt.keys, SIZE):
        j = start + tl.arange(0, SIZE)
        bias = tiles.load_rows(opt.key_bias, b, h, j, j < opt.keys, -float("inf"))
        shown = tl.where(bias == -float("inf"), 0, 1)
        before = total + tl.cumsum(shown, 0) - shown
        tl.store(rank + j, before, mask=j < opt.keys)
        tl.store(keys + before, j, mask=shown != 0)
        total += tl.sum(shown, 0)
    tl.store(rank + opt.keys, total)


@triton.jit
def find_queries(ranges, opt, heads, BM: tl.constexpr, BN: tl.constexpr, SIZE: tl.constexpr):
    """Store (begin, inner, outer, end) of one block of keys, as `key_loop.find_query_range` has them.

    [inner, outer) is the first run of queries that see the whole block.
    """
    blocks = tl.cdiv(opt.keys, BN)
    pid = tl.program_id(0)
    j0 = pid % blocks * BN
    b = pid // blocks // heads
    h = pid // blocks % heads
    n = tiles.key_count(opt, b)
    begin = opt.queries
    end = 0
    inner = opt.queries
    for start in tl.range(0, opt.queries, SIZE):
        i = start + tl.arange(0, SIZE)
        first, last = visibility.visible_range(b, h, i, opt, n)
        inside = i < opt.queries
        some = inside & (first < j0 + BN) & (last > j0) & (first < last)
        begin = tl.minimum(begin, tl.min(tl.where(some, i, NOWHERE), 0))
        end = tl.maximum(end, tl.max(tl.where(some, i + 1, 0), 0))
        whole = inside & (first <= j0) & (last >= j0 + BN)
        inner = tl.minimum(inner, tl.min(tl.where(whole, i, NOWHERE), 0))
    outer = opt.queries
    for start in tl.range(inner // SIZE * SIZE, opt.queries, SIZE):
        i = start + tl.arange(0, SIZE)
        first, last = visibility.visible_range(b, h, i, opt, n)
        cut = (i > inner) & (i < opt.queries) & ((first > j0) | (last < j0 + BN))
        outer = tl.minimum(outer, tl.min(tl.where(cut, i, NOWHERE), 0))
    where = ranges + 4 * tiles.wide(pid)
    tl.store(where, begin // BM * BM)
    tl.store(where + 1, tl.cdiv(inner, BM) * BM)
    tl.store(where + 2, outer // BM * BM)
    tl.store(where + 3, end)


def replace_mask(p: Problem) -> Problem | None:
    """Return a masked call as one of intervals, which `pack_mask` fills; None if it is not worthwhile or has others."""
    others = p.interval, p.bias, p.row_bias, p.relative
    if p.mask is None or any(x is not None for x in others) or p.queries is not None or p.first_query or p.first_key:
        return None
    if math.prod(p.mask.shape) < FEW_SCORES:
        return None
    _, per_entry, heads = _find_shared(p, p.mask.stride()[:2], ragged=False, lengths=False)
    shape = 3, heads // per_entry, per_entry, p.q.shape[2]
    interval = torch.empty(shape, dtype=torch.int32, device=p.q.device)
    return replace(p, mask=None, interval=interval.expand(3, *p.q.shape[:3]))


def pack_mask(p: Problem, interval: torch.Tensor | None = None) -> PackedMask:
    """Return the call's mask in bits, and fill the intervals of `replace_mask`: all empty if a row has holes."""
    assert p.mask is not None
    (queries, keys), device = p.mask.shape[2:], p.q.device
    shared, per_entry, heads = _find_shared(p, p.mask.stride()[:2], ragged=False, lengths=False)
    is_one_row = queries == 1 or p.mask.stride(2) == 0
    rows, width, size = 1 if is_one_row else queries, triton.cdiv(keys, PADDED) * PADDED // 32, 1 if is_one_row else 8
    words = torch.empty(heads, rows, width, dtype=torch.int32, device=device)
    holes = None if interval is None else torch.zeros(1, dtype=torch.bool, device=device)
    filled = None if interval is None else interval[:, : heads // per_entry, :per_entry]
    flag = None if holes is None else holes.view(torch.uint8)
    arguments = words, filled, flag, view(p.mask.view(torch.uint8)), per_entry, queries, keys, width
    constants = size, PACKED, is_one_row, QUERIES
    launch(None, pack_bits, heads * triton.cdiv(rows, size), arguments, constants, num_warps=4)
    if interval is not None and holes is not None:
        filled.masked_fill_(holes, 0)
    return PackedMask(MaskBits(Table(words, *shared), rows * width, 0 if is_one_row else width), flag)


def add_tile_map(
    p: Problem, config: Config, opt: Options, keys_first: bool = False, packed: PackedMask | None = None
) -> Options:
    """Return the options with the bits and tiles of the call's mask, if it has one, for a kernel of this config."""
    if p.mask is None:
        return opt
    bits, holes = packed or pack_mask(p)
    opt = opt._replace(bits=bits, holes=holes)
    queries, keys = p.q.shape[2], p.k.shape[2]
    (rows, block), (columns, tile) = (queries, config.BM), (keys, config.BN)
    if keys_first:
        rows, block, columns, tile = columns, tile, rows, block
    shared, per_entry, heads = _find_shared(p, p.mask.stride()[:2], config.RAGGED)
    blocks, in_row, many = triton.cdiv(rows, block), triton.cdiv(columns, tile), max(1, COLUMNS // tile)
    like = dict(dtype=torch.int32, device=p.q.device)
    lists, counts = torch.empty(heads, blocks, in_row + 1, **like), torch.empty(heads, blocks, 2, **like)
    each = None if keys_first else torch.empty(heads, queries, 2, **like)
    arguments = lists, counts, each, opt, per_entry, columns
    launch(None, map_tiles, heads * blocks, arguments, (block, tile, many, keys_first), num_warps=8)
    table = NO_TABLE if each is None else Table(each, *shared)
    return opt._replace(tiles=TileMap(Table(lists, *shared), Table(counts, *shared), 2 * blocks, 2 * in_row, table))


def add_key_index(p: Problem, opt: Options) -> Options:
    """Return the options with the index of the keys that a bias per key shows, if the call has one."""
    if opt.key_bias.ptr is None:
        return opt
    keys = p.k.shape[2]
    shared, per_entry, heads = _find_shared(p, p.bias.stride()[:2], ragged=False, lengths=False)
    like = dict(dtype=torch.int32, device=p.q.device)
    rank, shown = torch.empty(heads, keys + 1, **like), torch.empty(heads, keys, **like)
    launch(None, index_keys, heads, (rank, shown, opt, per_entry), (KEYS,), num_warps=4)
    return opt._replace(key_index=KeyIndex(Table(rank, *shared), Table(shown, *shared)))


def add_query_ranges(p: Problem, config: Config, opt: Options) -> Options:
    """Return the options with the queries of each block of keys, where a row's keys are no function of its index."""
    if not config.RAGGED or p.mask is not None:
        return opt
    strides = (0, 0) if opt.key_bias.ptr is None else p.bias.stride()[:2]
    shared, per_entry, heads = _find_shared(p, strides, ragged=True)
    blocks = triton.cdiv(p.k.shape[2], config.BN)
    ranges = torch.empty(heads, blocks, 4, dtype=torch.int32, device=p.q.device)
    arguments = ranges, opt, per_entry
    launch(None, find_queries, heads * blocks, arguments, (config.BM, config.BN, QUERIES), num_warps=4)
    return opt._replace(ranges=Table(ranges, *shared))


def _find_shared(p: Problem, strides: tuple, ragged: bool, lengths: bool = True) -> tuple[tuple[int, int], int, int]:
    """Return ((b, h) of a `Table`, its heads per batch entry, its heads) where a tensor of these strides decides."""
    steps = [strides]
    if ragged and p.interval is not None:
        steps.append(p.interval.stride()[1:3])
    if ragged and p.row_bias is not None:
        steps.append(p.row_bias.stride()[:2])
    differs_b = any(step[0] for step in steps) or (lengths and p.key_lengths is not None)
    differs_h = any(step[1] for step in steps)
    batch, heads = p.q.shape[:2]
    per_entry = heads if differs_h else 1
    return (2 * per_entry if differs_b else 0, 2 * int(differs_h)), per_entry, per_entry * (batch if differs_b else 1)
