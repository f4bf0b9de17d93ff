"""Gradient of a row's loss, ds = (p − e_y)·dl, in one read and one write: p follows from the row state."""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.losses.forward import exp_below
from regard._backends.gpu.rows import tiles


@triton.jit
def backward(
    dl, s, target, state, ds, R, N, parts, ignore, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_TARGET: tl.constexpr,
):  # fmt: skip
    """(p − e_y)·dl of one tile; 0 in rows whose target is `ignore`, NaN where it is no column or p is NaN."""
    ACC: tl.constexpr = state.dtype.element_ty
    rows, columns, _row, _part = tiles.locate_tile(parts, ROWS, COLUMNS)
    tile = tiles.Tile(s, s, rows, columns, R, N, 0, 0)
    inside = rows < R
    x = tiles.load_scores(tile, False, ACC)
    top = tl.load(state + rows, mask=inside, other=0.0)
    second = tl.load(state + R + rows, mask=inside, other=0.0)
    third = tl.load(state + 2 * R + rows, mask=inside, other=0.0)
    upstream = tl.load(dl + rows, mask=inside, other=0.0).to(ACC)
    if F.family == "threshold":
        theta = tiles.scalar_tile(theta, ACC)
        p = F.weigh(tl.maximum((x - top) * F.gain(theta) - second - third, 0.0), theta)
    else:
        p = exp_below(x - top) * second
    upstream = tl.where(top == top, upstream, float("nan"))
    if HAS_TARGET:
        y = tl.load(target + rows, mask=inside, other=0)
        upstream = tl.where((y >= 0) & (y < N), upstream, float("nan"))
        gradient = tl.where(y == ignore, 0.0, (p - (columns == y).to(ACC)) * upstream)
    else:
        gradient = p * upstream
    tiles.store(ds, gradient, tile)
