"""The loop over the key blocks of a block of queries.

Causal order, window, lengths and intervals leave a block of queries one range of key blocks; a dense mask leaves it two
lists of them. Blocks that every query sees whole carry no masking code. A kernel gives the loop a tile function,
`TILE(state, block, start, opt, C, EDGE) -> state`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard._backends.gpu.attention import scores, tiles, visibility


class QueryBlock(NamedTuple):
    """A block of queries of one head, with the keys that it sees."""

    q: Any  # [M, D]
    k: tiles.View
    v: tiles.View
    k_blocks: Any  # tensor descriptors where C.BULK
    v_blocks: Any
    b: Any
    h: Any
    head: Any  # h, or [M] where C.PACKED: the query head of each row
    i0: Any  # the first query
    i: Any  # [M]
    first: Any  # [M], the row's interval of keys
    last: Any
    lowest: Any  # the block's interval of keys
    highest: Any
    earliest: Any  # the keys that each of its rows sees
    latest: Any
    position: Any  # [M], among the keys
    bias: Any  # [M], of rows, or 0
    a: Any  # [M], s = a·y
    theta: Any  # one number, or [M]
    seed: Any


@triton.jit
def load_query_block(q, k, v, k_blocks, v_blocks, opt, C: tl.constexpr):
    """Load the query block of this program; returns (block, i0)."""
    return load_query_block_at(tl.program_id(0), q, k, v, k_blocks, v_blocks, opt, C)


@triton.jit
def load_query_block_at(index, q, k, v, k_blocks, v_blocks, opt, C: tl.constexpr):
    """Load the query block with this index, counted from each head's last; returns (block, i0)."""
    blocks = tl.cdiv(opt.queries, C.BM)
    i0 = (blocks - 1 - index % blocks) * C.BM
    h = (index // blocks) % opt.heads
    b = index // blocks // opt.heads
    i = i0 + tl.arange(0, C.BM)
    n = tiles.key_count(opt, b)
    first, last = visibility.visible_range(b, h, i, opt, n)
    lowest, earliest, latest, highest = visibility.block_range(first, last, b, h, i0, i, opt, n, C)
    rows = tiles.load_block(q, b, h, i0, 0, opt.queries, C.BM, C.D, C.BD, False)
    a = tiles.row_factor(b, h, i, opt, C.ACC, C.LINEAR)
    theta = tiles.load_theta(b, h, i, opt, C.ACC)
    position, bias = visibility.positions(b, h, i, opt), scores.load_row_bias(b, h, i, opt, C.ACC)
    return QueryBlock(
        rows, k, v, k_blocks, v_blocks, b, h, h, i0, i, first, last, lowest, highest, earliest, latest, position, bias,
        a, theta, tiles.load_seed(opt),
    ), i0  # fmt: skip


@triton.jit
def sweep(state, block, i0, opt, TILE: tl.constexpr, C: tl.constexpr):
    """Return state after TILE(state, …) of every key block that a query of this block sees."""
    if opt.tiles.lists.ptr is not None:
        state = sweep_lists(state, block, i0, opt, TILE, C)
    else:
        begin, inner, outer = find_whole_tiles(block, opt, C)
        if opt.bias.ptr is not None:  # every block is masked: one loop does
            inner = begin
            outer = begin
        elif (opt.left is not None) or C.RAGGED or (opt.key_index.rank.ptr is not None):
            for start in tl.range(begin, tl.minimum(inner, block.highest), C.BN):
                state = TILE(state, block, start, opt, C, True)
        if opt.bias.ptr is None:
            for start in tl.range(inner, outer, C.BN):
                state = TILE(state, block, start, opt, C, False)
        for start in tl.range(tl.maximum(inner, outer), block.highest, C.BN):
            state = TILE(state, block, start, opt, C, True)
    return state


@triton.jit
def sweep_lists(state, block, i0, opt, TILE: tl.constexpr, C: tl.constexpr):
    """Return state after TILE(state, …) of the tiles that the mask shows: the full ones, then the partial ones."""
    entries, full, partial, end = find_lists(opt.tiles, block.b, block.h, i0 // C.BM)
    start = tl.load(entries)
    for at in tl.range(0, full):
        here = start
        start = tl.load(entries + at + 1)  # early: the next tile waits for it
        state = TILE(state, block, here, opt, C, False)
    for at in tl.range(partial, end):
        state = TILE(state, block, tl.load(entries + at), opt, C, True)
    return state


@triton.jit
def find_lists(table, b, h, block):
    """Return (pointer to the tiles of a block, how many are full, where the partial ones begin, where they end)."""
    end = table.tiles // 2
    entries = visibility.head_of(table.lists, b, h, tiles.wide(table.blocks) // 2 * (end + 1))
    counts = visibility.head_of(table.counts, b, h, table.blocks) + 2 * block
    return entries + tiles.wide(block) * (end + 1), tl.load(counts), end - tl.load(counts + 1), end


@triton.jit
def find_whole_tiles(block, opt, C: tl.constexpr):
    """Return (begin, inner, outer): the block sees keys from `begin` on, and whole tiles in [inner, outer)."""
    begin = block.lowest // C.BN * C.BN
    inner = tl.cdiv(block.earliest, C.BN) * C.BN
    outer = tl.maximum(block.latest, 0) // C.BN * C.BN
    if opt.key_index.rank.ptr is not None:
        _, _, holes = visibility.find_key_span(block.b, block.h, opt)
        inner = tl.where(holes, begin, inner)
        outer = tl.where(holes, begin, outer)
    return begin, inner, outer


@triton.jit
def score_tile(block, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Score one key block: (keys, x = q·kᵀ [M, N], y, visible, key positions [1, N])."""
    j = (start + tl.arange(0, C.BN))[None, :]
    g = block.h // opt.group
    if C.BULK and not EDGE:
        keys = tiles.load_bulk_block(block.k_blocks, block.b, g, start, C.BN, C.BD)
    else:
        keys = tiles.load_block(block.k, block.b, g, start, block.lowest, block.highest, C.BN, C.D, C.BD, not EDGE)
    x = tiles.dot(block.q, tl.trans(keys), None, C)
    first, last = block.first[:, None], block.last[:, None]
    bias = block.bias
    if opt.row_bias.ptr is not None:
        bias = bias[:, None]
    i = block.i[:, None]
    bits = None
    if EDGE and opt.bits.words.ptr is not None:
        bits = scores.load_bits(block.b, block.h, i, j, start, opt, C.BN)
    ahead, place = start - block.i0, place_of(block, C)
    y, visible = scores.compute_scores(x, block.b, block.h, i, j, ahead, first, last, bias, place, opt, C, EDGE, bits)
    return keys, x, y, visible, j


@triton.jit
def place_of(block, C: tl.constexpr):
    """Return (positions of the queries [M, 1], their head, or heads [M, 1]), as a score function takes them."""
    head = block.head
    if C.PACKED:
        head = head[:, None]
    return block.position[:, None], head


@triton.jit
def load_values(block, start, visible, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Load v's block [N, E], with keys that are hidden from every row set to 0, as 0·NaN is NaN."""
    g = block.h // opt.group
    if C.BULK and not EDGE:
        values = tiles.load_bulk_block(block.v_blocks, block.b, g, start, C.BN, C.BE)
    else:
        values = tiles.load_block(block.v, block.b, g, start, block.lowest, block.highest, C.BN, C.E, C.BE, not EDGE)
    return zero_hidden(values, visible, opt, EDGE)


@triton.jit
def zero_hidden(block, visible, opt, EDGE: tl.constexpr):
    """Set the rows of a key block to 0 that a mask, a bias or intervals hide from every query."""
    GAPS: tl.constexpr = (
        (opt.mask.ptr is not None) or (opt.interval.ptr is not None) or (opt.key_bias.ptr is not None)
    )  # inside the block's range, which no key outside is read of
    if (opt.bias.ptr is not None) or (EDGE and GAPS):
        block = tl.where(tl.max(visible.to(tl.int32), 0)[:, None] != 0, block, 0.0)
    return block


@triton.jit
def find_key_range(i0, opt, n, BM: tl.constexpr, BN: tl.constexpr):
    """Return (begin, inner, outer): queries i0 … i0 + BM see keys from `begin` on and all of [inner, outer)."""
    lowest, latest = tiles.window_range(i0, opt, n)
    earliest, _ = tiles.window_range(tl.minimum(i0 + BM, opt.queries) - 1, opt, n)
    return lowest // BN * BN, tl.cdiv(earliest, BN) * BN, tl.maximum(latest, 0) // BN * BN


@triton.jit
def find_query_range(j0, opt, n, BM: tl.constexpr, BN: tl.constexpr):
    """Return (begin, inner, outer, end) of the queries that see keys j0 … j0 + BN: all of them in [inner, outer)."""
    j_last = tl.minimum(j0 + BN, n) - 1
    begin = j0 * 0
    inner = j0 * 0
    outer = j0 * 0 + opt.queries
    end = j0 * 0 + opt.queries
    if opt.right is not None:
        begin = tl.maximum(j0 - opt.right, 0) // BM * BM
        inner = tl.cdiv(tl.maximum(j_last - opt.right, 0), BM) * BM
    if opt.left is not None:
        outer = tl.minimum(outer, tl.maximum(j0 + opt.left + 1, 0))
        end = tl.minimum(end, tl.maximum(j_last + opt.left + 1, 0))
    outer = tl.where(j0 + BN > n, 0, outer // BM * BM)  # a cut block is all edge
    end = tl.where(j0 >= n, 0, end)
    return begin, inner, outer, end


@triton.jit
def find_query_range_of_head(queries, b, h, j0, opt, C: tl.constexpr):
    """Return `find_query_range` of one head, where an interval or a bias decides too; `queries` where none does."""
    begin, inner, outer, end = queries
    if opt.ranges.ptr is not None:
        where = visibility.head_of(opt.ranges, b, h, 4 * tl.cdiv(opt.keys, C.BN)) + j0 // C.BN * 4
        begin, inner, outer, end = tl.load(where), tl.load(where + 1), tl.load(where + 2), tl.load(where + 3)
    if opt.key_index.rank.ptr is not None:
        lowest, highest, holes = visibility.find_key_span(b, h, opt)
        cut = holes | (j0 < lowest) | (j0 + C.BN > highest)
        outer = tl.where(cut, 0, outer)  # a cut block is all edge
        end = tl.where((j0 >= highest) | (j0 + C.BN <= lowest), 0, end)
    return begin, inner, outer, end
