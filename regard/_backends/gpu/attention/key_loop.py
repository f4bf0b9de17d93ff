"""The road over the keys: which blocks a block of queries visits, and what it finds there.

Causal order, window and lengths leave a block of queries one range of key blocks. Those that every query sees whole
carry no masking code; a block that the bool mask hides from all of them is skipped. What to do with a block is a tile
function, `TILE(state, scene, start, opt, C, EDGE) -> state`, so that every kernel walks the same road.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard._backends.gpu.attention import tiles


class Scene(NamedTuple):
    """A block of queries and what it looks at."""

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
def scene_of(q, k, v, k_blocks, v_blocks, opt, C: tl.constexpr):
    """(scene, i0) of this program: one block of queries of one head."""
    return scene_at(tl.program_id(0), q, k, v, k_blocks, v_blocks, opt, C)


@triton.jit
def scene_at(block, q, k, v, k_blocks, v_blocks, opt, C: tl.constexpr):
    """(scene, i0) of a block of queries, the longest causal rows of a head first."""
    blocks = tl.cdiv(opt.queries, C.BM)
    i0 = (blocks - 1 - block % blocks) * C.BM
    h = (block // blocks) % opt.heads
    b = block // blocks // opt.heads
    i = i0 + tl.arange(0, C.BM)
    n = tiles.key_count(opt, b)
    first, last = tiles.interval(i, opt, n)
    lowest, _ = tiles.interval(i0, opt, n)
    _, highest = tiles.interval(tl.minimum(i0 + C.BM, opt.queries) - 1, opt, n)
    rows = tiles.block_of(q, b, h, i0, 0, opt.queries, C.BM, C.D, C.BD, False)
    a = tiles.row_factor(b, h, i, opt, C.ACC, C.LINEAR)
    theta = tiles.number(opt.theta, C.ACC)
    return Scene(
        rows, k, v, k_blocks, v_blocks, b, h, i, first, last, lowest, highest, a, theta, tiles.load_seed(opt)
    ), i0


@triton.jit
def sweep(state, scene, i0, opt, TILE: tl.constexpr, C: tl.constexpr):
    """state = TILE(state, …) for every key block that a query of this block sees; whole ones carry no masking code."""
    begin, inner, outer = key_blocks(i0, opt, tiles.key_count(opt, scene.b), C.BM, C.BN)
    if (opt.bias.ptr is not None) or (opt.mask.ptr is not None):  # every block is masked: one loop does
        inner = begin
        outer = begin
    elif opt.left is not None:
        for start in tl.range(begin, tl.minimum(inner, scene.highest), C.BN):
            state = visit(state, scene, i0, start, opt, TILE, C, True)
    if (opt.bias.ptr is None) and (opt.mask.ptr is None):
        for start in tl.range(inner, outer, C.BN):
            state = visit(state, scene, i0, start, opt, TILE, C, False)
    for start in tl.range(tl.maximum(inner, outer), scene.highest, C.BN):
        state = visit(state, scene, i0, start, opt, TILE, C, True)
    return state


@triton.jit
def visit(state, scene, i0, start, opt, TILE: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr):
    if opt.mask.ptr is not None:
        if visible_tile(scene.b, scene.h, i0, start, opt, C.BM, C.BN):
            state = TILE(state, scene, start, opt, C, EDGE)
    else:
        state = TILE(state, scene, start, opt, C, EDGE)
    return state


@triton.jit
def look(scene, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """(keys, x, y, seen, j) of one key block: x = q·kᵀ [M, N], scores y, who sees what, key positions [1, N]."""
    j = (start + tl.arange(0, C.BN))[None, :]
    g = scene.h // opt.group
    if C.BULK and not EDGE:
        keys = tiles.bulk_of(scene.k_blocks, scene.b, g, start, C.BN, C.BD)
    else:
        keys = tiles.block_of(scene.k, scene.b, g, start, scene.lowest, scene.highest, C.BN, C.D, C.BD, not EDGE)
    x = tiles.dot(scene.q, tl.trans(keys), None, C)
    first, last = scene.first[:, None], scene.last[:, None]
    y, seen = tiles.scores(x, scene.b, scene.h, scene.i[:, None], j, first, last, opt, C.LINEAR, EDGE)
    return keys, x, y, seen, j


@triton.jit
def values_of(scene, start, seen, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """v's block [N, E]; where a dense mask hides a key from every row it is blank, as 0·NaN is NaN."""
    g = scene.h // opt.group
    if C.BULK and not EDGE:
        values = tiles.bulk_of(scene.v_blocks, scene.b, g, start, C.BN, C.BE)
    else:
        values = tiles.block_of(scene.v, scene.b, g, start, scene.lowest, scene.highest, C.BN, C.E, C.BE, not EDGE)
    return blank(values, seen, opt)


@triton.jit
def blank(block, seen, opt):
    if (opt.bias.ptr is not None) or (opt.mask.ptr is not None):
        block = tl.where(tl.max(seen.to(tl.int32), 0)[:, None] != 0, block, 0.0)
    return block


@triton.jit
def visible_tile(b, h, i0, start, opt, BM: tl.constexpr, BN: tl.constexpr):
    """Does the bool mask show any key of this tile to any of its queries?"""
    i = (i0 + tl.arange(0, BM))[:, None]
    j = (start + tl.arange(0, BN))[None, :]
    there = (i < opt.queries) & (j < opt.keys)
    return tl.max(tl.max(tl.load(tiles.dense_at(opt.mask, b, h, i, j), mask=there, other=0).to(tl.int32), 1), 0) != 0


@triton.jit
def key_blocks(i0, opt, n, BM: tl.constexpr, BN: tl.constexpr):
    """(begin, inner, outer) of queries i0 … i0 + BM: they see keys from block begin on, all of [inner, outer)."""
    lowest, latest = tiles.interval(i0, opt, n)
    earliest, _ = tiles.interval(tl.minimum(i0 + BM, opt.queries) - 1, opt, n)
    return lowest // BN * BN, tl.cdiv(earliest, BN) * BN, tl.maximum(latest, 0) // BN * BN


@triton.jit
def query_blocks(j0, opt, n, BM: tl.constexpr, BN: tl.constexpr):
    """For keys j0 … j0 + BN: (begin, inner, outer, end) of the queries that see any of them, all of them inside."""
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
