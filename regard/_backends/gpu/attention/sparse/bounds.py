"""Lower bounds of τ: keys below a row's bound cannot have weight, and `candidates.py` does not list them.

The forward's bound is the τ of some of the row's keys (`tau_estimate.py`), which is below the τ of all keys. The
backward's bound is the forward's τ.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, tau_estimate, tiles, visibility
from regard._backends.gpu.attention.tiles import HIDDEN, LOG2E
from regard._call.score_function import tanh


@triton.jit
def sweep_groups(block, opt, C: tl.constexpr, STRIDE: tl.constexpr):
    """Return the largest of each group of keys, those at one place of their tiles, as `order_tile` has them.

    Of the tiles that every row sees whole, one of STRIDE counts.
    """
    begin, inner, outer = key_loop.find_whole_tiles(block, opt, C)
    best = tiles.zeros(C.BM, C.BN, C.ACC) + HIDDEN
    if (opt.left is not None) or C.RAGGED or (opt.key_index.rank.ptr is not None):
        for start in tl.range(begin, tl.minimum(inner, block.highest), C.BN):
            best = tl.maximum(best, order_tile(block, start, opt, C, True))
    skipped = tl.maximum(outer - inner - C.BN, 0) // C.BN % STRIDE  # so that the last tile counts, of recent keys
    for start in tl.range(inner + skipped * C.BN, outer, C.BN * STRIDE):
        best = tl.maximum(best, order_tile(block, start, opt, C, False))
    for start in tl.range(tl.maximum(inner, outer), block.highest, C.BN):
        best = tl.maximum(best, order_tile(block, start, opt, C, True))
    return best


@triton.jit
def bound_from_groups(q, k, bounds, opt, C: tl.constexpr, FULL: tl.constexpr, STRIDE: tl.constexpr):
    """Stores bound_i ≤ τ_i in units of y: −∞ lists every key, +∞ means that the lists would overflow."""
    block, _ = key_loop.load_query_block(q, k, k, k, k, opt, C)
    best = to_scores(sweep_groups(block, opt, C, STRIDE), opt)
    top = tl.max(best, 1)
    gain = block.a * C.F.gain(block.theta)
    x = (best - top[:, None]) * gain[:, None]
    tau = tau_estimate.solve_keys(x, block, opt, C)
    tau -= 1e-3 + 1e-6 * tl.abs(top * gain)  # for the rounding of the products, which another kernel computes again
    bound = tl.where(top > HIDDEN, top + tau / gain, -float("inf"))
    # keys are above the bound as if thrown at the groups: from the groups without one follows the number of keys
    above = tl.sum(tl.where(x > tau[:, None], 1.0, 0.0), 1)
    listed = -C.BN * STRIDE * tl.log(1.0 - above / (C.BN + 0.5))
    overflows = (listed > 3.0 * FULL) & (block.last - block.first > 4 * (FULL - 8))
    if opt.key_index.rank.ptr is not None:
        _, _, holes = visibility.find_key_span(block.b, block.h, opt)
        overflows = overflows | holes
    row = (tiles.wide(block.b) * opt.heads + block.h) * opt.queries + block.i
    tl.store(bounds + row, tl.where(overflows, float("inf"), bound), mask=block.i < opt.queries)


@triton.jit
def order_tile(block, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Numbers that order a tile's keys as their scores do: y, or the products where a soft cap lies between."""
    _, x, y, visible, _ = key_loop.score_tile(block, start, opt, C, EDGE)
    if opt.cap is not None:
        y = x
        if EDGE:
            y = tl.where(visible, x, HIDDEN)
    return y


@triton.jit
def to_scores(order, opt):
    """y of such numbers."""
    y = order
    if opt.cap is not None:
        cap = tiles.number(opt.cap, y.dtype)
        y = tl.where(y == HIDDEN, HIDDEN, cap * tanh(y * tiles.number(opt.scale, y.dtype) / cap))
    return y


@triton.jit
def bound_from_tau(shifts, sums, bounds, rows, opt, C: tl.constexpr, SIZE: tl.constexpr):
    """Stores τ of every row in units of y, or +∞ where no key has weight."""
    row = tiles.wide(tl.program_id(0)) * SIZE + tl.arange(0, SIZE)
    inside = row < rows
    i = (row % opt.queries).to(tl.int32)
    h = (row // opt.queries % opt.heads).to(tl.int32)
    b = (row // opt.queries // opt.heads).to(tl.int32)
    a = tiles.row_factor(b, h, i, opt, C.ACC, C.LINEAR)
    tau = tl.load(shifts + row, mask=inside, other=0.0) / (a * C.F.gain(tiles.load_theta(b, h, i, opt, C.ACC)))
    has_weight = tl.load(sums + row, mask=inside, other=0.0) != 0.0
    tl.store(bounds + row, tl.where(has_weight, tau, float("inf")), mask=inside)


@triton.jit
def store_slopes(slopes, rows, opt, C: tl.constexpr, SIZE: tl.constexpr):
    """Stores a·log2 e of every row."""
    row = tiles.wide(tl.program_id(0)) * SIZE + tl.arange(0, SIZE)
    i = (row % opt.queries).to(tl.int32)
    h = (row // opt.queries % opt.heads).to(tl.int32)
    b = tl.minimum(row, rows - 1) // opt.queries // opt.heads
    a = tiles.row_factor(b.to(tl.int32), h, i, opt, C.ACC, C.LINEAR)
    tl.store(slopes + row, a * LOG2E, mask=row < rows)
