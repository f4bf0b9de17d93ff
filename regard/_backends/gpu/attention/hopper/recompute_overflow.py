"""Rows whose weights outgrew the shift in which `forward_hopper` kept them (their Z is NaN), done by `forward_online`.

A block without such a row ends at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.online import forward_block


@triton.jit
def forward_again(
    q, k, v, k_blocks, v_blocks, o, shifts, sums, stats, rows, opt, C: tl.constexpr, MANY: tl.constexpr
):  # fmt: skip
    """MANY blocks of queries to a program: most find, by one load for all of them, that there is nothing to do."""
    start = tl.program_id(0) * MANY
    end = tl.minimum(start + MANY, rows // opt.queries * tl.cdiv(opt.queries, C.BM))
    if unheld(start + tl.arange(0, MANY)[:, None], end, sums, opt, C):
        for block in range(start, end):
            if unheld(block, end, sums, opt, C):
                forward_block(block, q, k, v, k_blocks, v_blocks, o, shifts, sums, stats, opt, C, tiles.wide(rows))


@triton.jit
def unheld(block, end, sums, opt, C: tl.constexpr):
    """Is Z of any row NaN, in a block or in a column of them?"""
    blocks = tl.cdiv(opt.queries, C.BM)
    i = (blocks - 1 - block % blocks) * C.BM + tl.arange(0, C.BM)  # as sweeps.scene_at counts
    row = block // blocks * tiles.wide(opt.queries) + i
    z = tl.load(sums + row, mask=i < tl.where(block < end, opt.queries, 0), other=0.0)
    return tl.max(tl.ravel(tl.where(z == z, 0, 1)), 0) > 0
