"""Row kernel for short rows of the threshold family: one warp solves several rows, each over a few of its lanes.

The tile is [ROWS, K, LANES]: each lane of a row holds K of its columns, so that a sum over a row is a sum within each
lane and a few shuffles, and no warp waits for another.
"""

import triton
import triton.language as tl

from regard._backends.gpu.rows import tiles
from regard._backends.gpu.rows.solver import Logits, solve, sum_held


@triton.jit
def forward_threshold_short(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, LANES: tl.constexpr, C: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """Weights of ROWS whole rows per program."""
    ACC: tl.constexpr = state.dtype.element_ty
    TOLERANCE: tl.constexpr = C.TOLERANCE
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    columns = tl.arange(0, COLUMNS // LANES)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    tile = tiles.Tile(s, mask, tiles.per_row(row), columns, R, N, mask_row, mask_column)
    if HAS_THETA:
        theta = tl.load(theta_rows + row, mask=row < R, other=1.5).to(ACC)
    else:
        theta = tl.zeros([ROWS], ACC) + tl.sum(tiles.scalar_tile(theta, ACC))
    gain = F.gain(theta) + theta * 0.0
    factor = tl.sum(tiles.scalar_tile(scale, ACC)) * gain
    x = tiles.load_scores(tile, HAS_MASK, ACC)
    maxima = tl.reduce(x, 1, tiles.nan_maximum)  # [ROWS, LANES], of each lane: their solution is a lower bound
    top = tl.reduce(maxima, 1, tiles.nan_maximum)
    y = (maxima[:, None, :] - tiles.per_row(tiles.finite_or_zero(top))) * tiles.per_row(factor)
    held = Logits(0, y, 0, 0, theta, 0, 0, 0, 0)
    tau, _total, _slope = solve(sum_held, held, tiles.finite_or_zero(top) * 0.0 - 1.0, gain, 1e-3, C)
    y = (x - tiles.per_row(tiles.finite_or_zero(top))) * tiles.per_row(factor)
    held = Logits(0, y, 0, 0, theta, 0, 0, 0, 0)
    tau, total, slope = solve(sum_held, held, tau, gain, TOLERANCE, C)
    inverse = tl.where(top < float("inf"), tiles.reciprocal(total), float("nan"))
    tiles.store(
        p, F.weigh(tl.maximum(y - tiles.per_row(tau), 0.0), tiles.per_row(theta)) * tiles.per_row(inverse), tile
    )
    shift = tl.where(top == float("-inf"), 0.0, tiles.finite_or_zero(top) * factor + tau)
    tl.store(state + row, shift, mask=row < R)
    tl.store(state + R + row, tl.where(top < float("inf"), slope, float("nan")), mask=row < R)
