"""Row kernel for long rows of the pointwise family: each step of columns is written as soon as it is read.

A row that holds NaN or +inf becomes NaN as a whole. That is known only after all of it has been read; such a row is
written a second time.
"""

import triton
import triton.language as tl

from regard._backends.gpu.rows import tiles
from regard._backends.gpu.rows.ratio import merge_parts
from regard._backends.gpu.rows.terms import compute_terms


@triton.jit
def forward_pointwise(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, TRAITS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, STEP: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """Weights of one row, or of COLUMNS of a shared one, STEP columns at a time; COLUMNS is a multiple of STEP."""
    ACC: tl.constexpr = state.dtype.element_ty
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts).to(tl.int64)
    rows = row + tl.arange(0, 1)[:, None]
    begin = part * COLUMNS
    end = tl.minimum(begin + COLUMNS, N)
    steps = tiles.Tile(s, mask, rows, tl.arange(0, STEP)[None, :], R, N, mask_row, mask_column)
    scale = tiles.scalar_tile(scale, ACC)
    theta = tiles.load_theta(theta, theta_rows, rows, R, HAS_THETA, ACC)
    zero = tiles.scalar_tile(0.0, ACC)
    tops = tl.full([1, STEP], float("-inf"), ACC)
    if STAGE != "finish":
        for first in range(begin, end, STEP):
            tile = tiles.move_tile(steps, first + steps.columns)
            x = tiles.load_scores(tile, HAS_MASK, ACC)
            tops = tiles.nan_maximum(tops, x)
            u, _v = compute_terms(x, zero, scale, theta, F, TRAITS, False, False)
            tiles.store(p, u, tile)
    top, _z, _shift, _factor = merge_parts(
        tiles.row_maximum(tops), zero, zero, scale, partial, counters, row, part, parts, F, PARTS, STAGE, ACC
    )
    if STAGE != "publish":
        bad = tl.where(top < float("inf"), 0.0, float("nan"))
        tiles.store_state(state, zero, bad, rows, part, R)
        if tl.max(tl.where(top < float("inf"), 0, 1)) > 0:
            for first in range(begin, end, STEP):
                tiles.store(p, tl.zeros([1, STEP], ACC) + bad, tiles.move_tile(steps, first + steps.columns))
