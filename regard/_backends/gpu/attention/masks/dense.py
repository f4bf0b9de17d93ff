"""A dense mask as kernels read it, from small kernels that run before them: no wait for the host.

    pack_bits      its bits, each row's first and last visible key, and whether some row has a hole between them
    find_lengths   the length that all rows of a batch entry have, if they have one
    map_tiles      the full and the partial tiles of each block, each row's first key and the number of its keys

A mask without holes is one of intervals, which faster kernels take. Whether it has holes is known on the device alone,
so that both kernels are launched: `pack_mask` gives that of intervals rows without keys if there are holes, and that of
masks ends at once if there are none.
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
from regard._backends.gpu.attention.masks.tables import find_shared
from regard._backends.gpu.attention.tiles import NO_TABLE, Config, MaskBits, Options, Table, TileMap
from regard._backends.gpu.attention.visibility import NOWHERE
from regard._backends.gpu.launcher import launch
from regard._call.problem import Problem

COLUMNS = 64  # that are mapped at once
PACKED_ROWS, PACKED = 8, 512  # rows and columns that are packed at once
PADDED = 128  # what rows in bits are padded to: the widest tile
QUERIES = 1024  # whose intervals are stored or compared at once
LEAST_SCORES = 2**22  # with fewer, three more launches cost more than intervals save


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
def find_lengths(lengths, holes, interval, rows, step, plane, SIZE: tl.constexpr):
    """Store how many keys all rows of one batch entry see, from the first key on, or set `holes` if they differ."""
    interval += tl.program_id(0) * tiles.wide(step)
    length = tl.load(interval + plane)
    differs = 0
    for start in tl.range(0, rows, SIZE):
        at = start + tl.arange(0, SIZE)
        first = tl.load(interval + at, mask=at < rows, other=0)
        last = tl.load(interval + plane + at, mask=at < rows, other=length)
        differs = tl.maximum(differs, tl.max(tl.where((first != 0) | (last != length), 1, 0), 0))
    if differs > 0:
        tl.store(holes, 1)
    tl.store(lengths + tl.program_id(0), length)


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


def replace_mask(p: Problem) -> Problem | None:
    """Return a masked call as one of intervals, of threshold maps as one of key lengths, which `pack_mask` fills.

    None if the call has no mask, has few scores or has other options that the mask would have to be joined with.
    """
    others = p.interval, p.bias, p.row_bias, p.relative
    if p.mask is None or any(x is not None for x in others) or p.queries is not None or p.first_query or p.first_key:
        return None
    if math.prod(p.mask.shape) < LEAST_SCORES or (p.choice.family == "threshold" and p.key_lengths is not None):
        return None
    if p.choice.family == "threshold":  # whose lists take no intervals
        return replace(p, mask=None, key_lengths=torch.empty(p.q.shape[0], dtype=torch.int32, device=p.q.device))
    return replace(p, mask=None, interval=_make_interval(p).expand(3, *p.q.shape[:3]))


def _make_interval(p: Problem) -> torch.Tensor:
    """Return an uninitialised interval of every row of the mask that is in memory, [3, b, h, queries]."""
    assert p.mask is not None
    _, per_entry, heads = find_shared(p, p.mask.stride()[:2], ragged=False, lengths=False)
    return torch.empty(3, heads // per_entry, per_entry, p.q.shape[2], dtype=torch.int32, device=p.q.device)


def pack_mask(p: Problem, bare: Problem | None = None) -> PackedMask:
    """Return the call's mask in bits; fill the intervals or lengths of `bare`, with 0 if the mask is no such thing."""
    assert p.mask is not None
    shared, per_entry, heads = find_shared(p, p.mask.stride()[:2], ragged=False, lengths=False)
    (queries, keys), is_one_row = p.mask.shape[2:], p.mask.shape[2] == 1 or p.mask.stride(2) == 0
    rows, size = (1, 1) if is_one_row else (queries, PACKED_ROWS)
    width = triton.cdiv(keys, PADDED) * PADDED // 32
    words = torch.empty(heads, rows, width, dtype=torch.int32, device=p.q.device)
    interval = holes = flag = None
    if bare is not None:
        own = bare.interval
        interval = _make_interval(p) if own is None else own[:, : heads // per_entry, :per_entry]
        holes = torch.zeros(1, dtype=torch.bool, device=p.q.device)
        flag = holes.view(torch.uint8)
    arguments = words, interval, flag, view(p.mask.view(torch.uint8)), per_entry, queries, keys, width
    constants = size, PACKED, is_one_row, QUERIES
    launch(None, pack_bits, heads * triton.cdiv(rows, size), arguments, constants, num_warps=4)
    if bare is not None and bare.interval is None:
        step = per_entry * queries if shared[0] else 0
        arguments = bare.key_lengths, flag, interval, per_entry * queries, step, heads * queries
        launch(None, find_lengths, p.q.shape[0], arguments, (QUERIES,), num_warps=4)
        bare.key_lengths.masked_fill_(holes, 0)
    elif bare is not None:
        interval.masked_fill_(holes, 0)
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
    shared, per_entry, heads = find_shared(p, p.mask.stride()[:2], config.RAGGED)
    blocks, in_row, many = triton.cdiv(rows, block), triton.cdiv(columns, tile), max(1, COLUMNS // tile)
    like = dict(dtype=torch.int32, device=p.q.device)
    lists, counts = torch.empty(heads, blocks, in_row + 1, **like), torch.empty(heads, blocks, 2, **like)
    each = None if keys_first else torch.empty(heads, queries, 2, **like)
    arguments = lists, counts, each, opt, per_entry, columns
    launch(None, map_tiles, heads * blocks, arguments, (block, tile, many, keys_first), num_warps=8)
    table = NO_TABLE if each is None else Table(each, *shared)
    return opt._replace(tiles=TileMap(Table(lists, *shared), Table(counts, *shared), 2 * blocks, 2 * in_row, table))
