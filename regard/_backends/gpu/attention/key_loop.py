"""The loop over the key blocks of a block of queries.

Causal order, window and lengths leave a block of queries one range of key blocks. Blocks that every query sees whole
carry no masking code, and a block that the dense mask hides from all of them is skipped. A kernel gives the loop a tile
function, `TILE(state, block, start, opt, C, EDGE) -> state`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard._backends.gpu.attention import tiles


class QueryBlock(NamedTuple):
    """A block of queries of one head, with the keys that it sees."""

    q: Any  # [M, D]
    k: tiles.View
    v: tiles.View
    k_blocks: Any  # tensor descriptors where C.BULK
    v_blocks: Any
    b: Any
    h: Any
    i: Any  # [M]
    first: Any  # [M], the row's interval of keys
    last: Any
    lowest: Any  # the block's interval of keys
    highest: Any
    a: Any  # [M], s = a·y
    theta: Any
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
    first, last = tiles.interval(i, opt, n)
    lowest, _ = tiles.interval(i0, opt, n)
    _, highest = tiles.interval(tl.minimum(i0 + C.BM, opt.queries) - 1, opt, n)
    rows = tiles.load_block(q, b, h, i0, 0, opt.queries, C.BM, C.D, C.BD, False)
    a = tiles.row_factor(b, h, i, opt, C.ACC, C.LINEAR)
    theta = tiles.number(opt.theta, C.ACC)
    return QueryBlock(
        rows, k, v, k_blocks, v_blocks, b, h, i, first, last, lowest, highest, a, theta, tiles.load_seed(opt)
    ), i0


@triton.jit
def sweep(state, block, i0, opt, TILE: tl.constexpr, C: tl.constexpr):
    """Return state after TILE(state, …) of every key block that a query of this block sees."""
    begin, inner, outer = find_key_range(i0, opt, tiles.key_count(opt, block.b), C.BM, C.BN)
    if (opt.bias.ptr is not None) or (opt.mask.ptr is not None):  # every block is masked: one loop does
        inner = begin
        outer = begin
    elif opt.left is not None:
        for start in tl.range(begin, tl.minimum(inner, block.highest), C.BN):
            state = run_tile(state, block, i0, start, opt, TILE, C, True)
    if (opt.bias.ptr is None) and (opt.mask.ptr is None):
        for start in tl.range(inner, outer, C.BN):
            state = run_tile(state, block, i0, start, opt, TILE, C, False)
    for start in tl.range(tl.maximum(inner, outer), block.highest, C.BN):
        state = run_tile(state, block, i0, start, opt, TILE, C, True)
    return state


@triton.jit
def run_tile(state, block, i0, start, opt, TILE: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr):
    """Run TILE unless the dense mask hides the whole tile."""
    if opt.mask.ptr is not None:
        if has_visible_keys(block.b, block.h, i0, start, opt, C.BM, C.BN):
            state = TILE(state, block, start, opt, C, EDGE)
    else:
        state = TILE(state, block, start, opt, C, EDGE)
    return state


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
    y, visible = tiles.compute_scores(x, block.b, block.h, block.i[:, None], j, first, last, opt, C.LINEAR, EDGE)
    return keys, x, y, visible, j


@triton.jit
def load_values(block, start, visible, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Load v's block [N, E], with keys that the dense mask hides from every row set to 0, as 0·NaN is NaN."""
    g = block.h // opt.group
    if C.BULK and not EDGE:
        values = tiles.load_bulk_block(block.v_blocks, block.b, g, start, C.BN, C.BE)
    else:
        values = tiles.load_block(block.v, block.b, g, start, block.lowest, block.highest, C.BN, C.E, C.BE, not EDGE)
    return zero_hidden(values, visible, opt)


@triton.jit
def zero_hidden(block, visible, opt):
    """Set the rows of a key block to 0 that a dense mask or bias hides from every query."""
    if (opt.bias.ptr is not None) or (opt.mask.ptr is not None):
        block = tl.where(tl.max(visible.to(tl.int32), 0)[:, None] != 0, block, 0.0)
    return block


@triton.jit
def has_visible_keys(b, h, i0, start, opt, BM: tl.constexpr, BN: tl.constexpr):
    """True if the dense mask shows any key of this tile to any of its queries."""
    i = (i0 + tl.arange(0, BM))[:, None]
    j = (start + tl.arange(0, BN))[None, :]
    there = (i < opt.queries) & (j < opt.keys)
    return tl.max(tl.max(tl.load(tiles.dense_ptr(opt.mask, b, h, i, j), mask=there, other=0).to(tl.int32), 1), 0) != 0


@triton.jit
def find_key_range(i0, opt, n, BM: tl.constexpr, BN: tl.constexpr):
    """Return (begin, inner, outer): queries i0 … i0 + BM see keys from `begin` on and all of [inner, outer)."""
    lowest, latest = tiles.interval(i0, opt, n)
    earliest, _ = tiles.interval(tl.minimum(i0 + BM, opt.queries) - 1, opt, n)
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
