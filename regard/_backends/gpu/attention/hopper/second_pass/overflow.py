"""`forward_overflow`: recomputes rows that overflowed the fixed shift of `forward_hopper`, as `forward_online` does.

Z of such a row is NaN. A block without such a row ends at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.forward.online import forward_block


@triton.jit
def forward_overflow(
    q, k, v, k_blocks, v_blocks, o, shifts, sums, stats, rows, opt, C: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Recomputes the blocks of queries with an overflow, BLOCKS blocks per program, which one load finds."""
    start = tl.program_id(0) * BLOCKS
    end = tl.minimum(start + BLOCKS, rows // opt.queries * tl.cdiv(opt.queries, C.BM))
    if has_overflow(start + tl.arange(0, BLOCKS)[:, None], end, sums, opt, C):
        for block in range(start, end):
            if has_overflow(block, end, sums, opt, C):
                forward_block(block, q, k, v, k_blocks, v_blocks, o, shifts, sums, stats, opt, C, tiles.wide(rows))


@triton.jit
def has_overflow(block, end, sums, opt, C: tl.constexpr):
    """True if Z of any row is NaN, in a block of queries or in a column of blocks."""
    blocks = tl.cdiv(opt.queries, C.BM)
    i = (blocks - 1 - block % blocks) * C.BM + tl.arange(0, C.BM)  # in the order of key_loop.load_query_block_at
    row = block // blocks * tiles.wide(opt.queries) + i
    z = tl.load(sums + row, mask=i < tl.where(block < end, opt.queries, 0), other=0.0)
    return tl.max(tl.ravel(tl.where(z == z, 0, 1)), 0) > 0
