"""dq = a · Σ_j ds_j·k_j from stored ds [heads, keys, queries]: one program per block of queries.

The keys are added in their order, so that equal inputs give equal bits. Every query sees keys from the first on, or
`spans` say which.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, tiles
from regard._backends.gpu.attention.hopper.spans import load_spans


@triton.jit
def product_tile(
    acc, ds_blocks, k, k_blocks, b, h, i, start, rows, lowest, highest, n, opt, C: tl.constexpr, EDGE: tl.constexpr
):  # fmt: skip
    """Add one block of keys: dq += ds·k; ds that no query of the tile sees was never stored."""
    g = h // opt.group
    ds = tl.reshape(ds_blocks.load([b * opt.heads + h, start, i]), [C.BN, C.BM])
    if EDGE:
        if rows is None:
            _, last = tiles.window_range((i + tl.arange(0, C.BM))[None, :], opt, n)
        else:
            ds = tl.where((start + tl.arange(0, C.BN))[:, None] >= rows[0][None, :], ds, 0.0)
            last = rows[1][None, :]
        ds = tl.where((start + tl.arange(0, C.BN))[:, None] < last, ds, 0.0)
        keys = tiles.load_block(k, b, g, start, lowest, highest, C.BN, C.D, C.BD, False)
    else:
        keys = tiles.load_bulk_block(k_blocks, b, g, start, C.BN, C.BD)
    return tiles.dot(tl.trans(ds), keys, acc, C)


@triton.jit
def backward_product(k, k_blocks, ds_blocks, dq, spans, opt, C: tl.constexpr):
    """Compute dq of one block of queries."""
    blocks = tl.cdiv(opt.queries, C.BM)
    block = tl.program_id(0)
    first = block % blocks
    if opt.right is not None:  # heads by turns from their first and from their last rows on, the last from there
        first = tl.where((tl.num_programs(0) // blocks - block // blocks) % 2 == 1, blocks - 1 - first, first)
    i0 = first * C.BM
    h = (block // blocks) % opt.heads
    b = block // blocks // opt.heads
    n = tiles.key_count(opt, b)
    acc = tiles.zeros(C.BM, C.BD, C.ACC)
    if spans is None:
        _, highest = tiles.window_range(tl.minimum(i0 + C.BM, opt.queries) - 1, opt, n)
        _, _, outer = key_loop.find_key_range(i0, opt, n, C.BM, C.BN)
        for start in tl.range(0, outer, C.BN):
            acc = product_tile(acc, ds_blocks, k, k_blocks, b, h, i0, start, None, 0, highest, n, opt, C, False)
        for start in tl.range(outer, highest, C.BN):
            acc = product_tile(acc, ds_blocks, k, k_blocks, b, h, i0, start, None, 0, highest, n, opt, C, True)
    else:
        first, last, lowest, earliest, latest, highest = load_spans(spans, b, h, i0, C.BM)
        rows = (first, last)
        inner = tl.cdiv(earliest, C.BN) * C.BN
        outer = tl.minimum(latest, highest) // C.BN * C.BN
        for start in tl.range(tl.minimum(lowest, highest) // C.BN * C.BN, tl.minimum(inner, highest), C.BN):
            acc = product_tile(acc, ds_blocks, k, k_blocks, b, h, i0, start, rows, lowest, highest, n, opt, C, True)
        for start in tl.range(inner, outer, C.BN):
            acc = product_tile(acc, ds_blocks, k, k_blocks, b, h, i0, start, rows, lowest, highest, n, opt, C, False)
        for start in tl.range(tl.maximum(inner, outer), highest, C.BN):
            acc = product_tile(acc, ds_blocks, k, k_blocks, b, h, i0, start, rows, lowest, highest, n, opt, C, True)
        acc = tl.where((first < last)[:, None], acc, 0.0)  # of a row that sees nothing ds may never have been stored
    if not (C.LINEAR and opt.temperature.ptr is not None):
        acc = acc * tiles.number(opt.scale, C.ACC)
    tiles.store_block(dq, b, h, i0, opt.queries, acc, C.BM, C.D, C.BD)
