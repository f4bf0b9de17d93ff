"""dq = a · Σ_j ds_j·k_j from stored ds [heads, keys, queries]: one program per block of queries.

The keys are added in their order, so that equal inputs give equal bits. Every query sees keys from the first on:
`stored_ds.supports` admits no window.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, tiles


@triton.jit
def product_tile(acc, ds_blocks, k, k_blocks, b, h, i, start, highest, n, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Add one block of keys: dq += ds·k; ds that no query of the tile sees was never stored."""
    g = h // opt.group
    ds = tl.reshape(ds_blocks.load([b * opt.heads + h, start, i]), [C.BN, C.BM])
    if EDGE:
        _, last = tiles.interval((i + tl.arange(0, C.BM))[None, :], opt, n)
        ds = tl.where((start + tl.arange(0, C.BN))[:, None] < last, ds, 0.0)
        keys = tiles.load_block(k, b, g, start, 0, highest, C.BN, C.D, C.BD, False)
    else:
        keys = tiles.load_bulk_block(k_blocks, b, g, start, C.BN, C.BD)
    return tiles.dot(tl.trans(ds), keys, acc, C)


@triton.jit
def backward_product(k, k_blocks, ds_blocks, dq, opt, C: tl.constexpr):
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
    _, highest = tiles.interval(tl.minimum(i0 + C.BM, opt.queries) - 1, opt, n)
    _, _, outer = key_loop.find_key_range(i0, opt, n, C.BM, C.BN)
    acc = tiles.zeros(C.BM, C.BD, C.ACC)
    for start in tl.range(0, outer, C.BN):
        acc = product_tile(acc, ds_blocks, k, k_blocks, b, h, i0, start, highest, n, opt, C, False)
    for start in tl.range(outer, highest, C.BN):
        acc = product_tile(acc, ds_blocks, k, k_blocks, b, h, i0, start, highest, n, opt, C, True)
    if not (C.LINEAR and opt.temperature.ptr is not None):
        acc = acc * tiles.number(opt.scale, C.ACC)
    tiles.store_block(dq, b, h, i0, opt.queries, acc, C.BM, C.D, C.BD)
