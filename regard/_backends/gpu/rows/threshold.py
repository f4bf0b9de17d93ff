"""Row kernels of the threshold family: p = value(max(y − τ, 0)) with Σp = 1, y = gain·(s − max)."""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.rows import tiles
from regard._backends.gpu.rows.solver import (
    Logits,
    bound_from_maxima,
    group_maxima,
    load_logits,
    solve,
    sum_held,
    sum_shared,
    sum_tile,
    tile_logits,
    with_logits,
)

SUMS = tl.constexpr(6)  # partial sums that a part publishes beside its maxima: three, in two buffers
SOLVED = tl.constexpr(4)  # numbers that `solve_rows` stores: maximum, τ, Σ value, Σ slope


@triton.jit
def gather_maxima(partial, parts, GROUPS: tl.constexpr, PARTS: tl.constexpr):
    """Loads the maxima that the row's parts have published, [1, PARTS·GROUPS]."""
    which = tl.arange(0, PARTS * GROUPS)[None, :]
    return tl.load(partial + which, mask=which < parts * GROUPS, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def load_scalar(pointer, ACC: tl.constexpr):
    """Loads one number, [1, 1]."""
    return tl.zeros([1, 1], ACC) + tl.load(pointer)


@triton.jit
def forward_threshold(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, C: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """Weights of one row or part per program; rows solved together would all take the steps of the slowest."""
    ACC: tl.constexpr = state.dtype.element_ty
    TOLERANCE: tl.constexpr = C.TOLERANCE
    rows, columns, row, part = tiles.locate_tile(parts, ROWS, COLUMNS)
    tile = tiles.Tile(s, mask, rows, columns, R, N, mask_row, mask_column)
    theta = tiles.load_theta(theta, theta_rows, rows, R, HAS_THETA, ACC)
    gain = F.gain(theta) + theta * 0.0
    factor = tiles.scalar_tile(scale, ACC) * gain
    x = tiles.load_scores(tile, HAS_MASK, ACC)
    scratch = partial + row * (GROUPS + SUMS) * parts
    if STAGE == "meet" or STAGE == "publish":
        tl.store(scratch + part * GROUPS + tl.arange(0, GROUPS)[None, :], group_maxima(x, GROUPS, VECTOR))
    if STAGE == "meet":
        tiles.wait_for_parts(counters + row, parts)
    if STAGE == "whole" or STAGE == "meet":
        if STAGE == "meet":
            top, tau = bound_from_maxima(gather_maxima(scratch, parts, GROUPS, PARTS), theta, gain, factor, C)
        elif GROUPS > 0:
            top, tau = bound_from_maxima(group_maxima(x, GROUPS, VECTOR), theta, gain, factor, C)
        else:
            top, tau = tiles.row_maximum(x), tl.full([1, 1], -1.0, ACC)
        y = (x - tiles.finite_or_zero(top)) * factor
        logits = Logits(
            tile, 0 if C.AGAIN else y, top, factor, theta, scratch + GROUPS * parts, counters + row, part, parts
        )
        if STAGE == "meet":
            tau, total, slope = solve(sum_shared, logits, tau, gain, TOLERANCE, C)
        else:
            tau, total, slope = solve(sum_tile, logits, tau, gain, TOLERANCE, C)
        y = tile_logits(logits, C)
    if STAGE == "finish":  # after `solve_rows`
        solved = partial + R * (GROUPS + SUMS) * parts + row * SOLVED
        top, tau = load_scalar(solved, ACC), load_scalar(solved + 1, ACC)
        total, slope = load_scalar(solved + 2, ACC), load_scalar(solved + 3, ACC)
        y = (x - tiles.finite_or_zero(top)) * factor
    if STAGE != "publish":
        inverse = tl.where(top < float("inf"), tiles.reciprocal(total), float("nan"))
        tiles.store(p, F.weigh(tl.maximum(y - tau, 0.0), theta) * inverse, tile)
        shift = tl.where(top == float("-inf"), 0.0, tiles.finite_or_zero(top) * factor + tau)
        tiles.store_state(state, shift, tl.where(top < float("inf"), slope, float("nan")), rows, part, R)


@triton.jit
def solve_rows(
    s, mask, theta_rows, partial, R, N, parts, mask_row, mask_column, scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr,
    GROUPS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Solves one row per program, between "publish" and "finish"; reads the row once per step."""
    ACC: tl.constexpr = partial.dtype.element_ty
    TOLERANCE: tl.constexpr = C.TOLERANCE
    row = tl.program_id(0).to(tl.int64)
    rows = row + tl.arange(0, 1)[:, None]
    tile = tiles.Tile(s, mask, rows, tl.arange(0, COLUMNS)[None, :], R, N, mask_row, mask_column)
    theta = tiles.load_theta(theta, theta_rows, rows, R, HAS_THETA, ACC)
    gain = F.gain(theta) + theta * 0.0
    factor = tiles.scalar_tile(scale, ACC) * gain
    maxima = gather_maxima(partial + row * (GROUPS + SUMS) * parts, parts, GROUPS, PARTS)
    top, tau = bound_from_maxima(maxima, theta, gain, factor, C)
    logits = Logits(tile, 0, top, factor, theta, 0, 0, 0, 0)
    tau, total, slope = solve(sum_steps, logits, tau, gain, TOLERANCE, C)
    solved = partial + R * (GROUPS + SUMS) * parts + row * SOLVED
    tl.store(solved, tl.sum(top))
    tl.store(solved + 1, tl.sum(tau))
    tl.store(solved + 2, tl.sum(total))
    tl.store(solved + 3, tl.sum(slope))


@triton.jit
def sum_steps(logits, tau, step, TOLERANCE: tl.constexpr, C: tl.constexpr):
    """Sums as in `sum_held` over a whole row, COLUMNS at a time, with compensation: a million columns sum exactly."""
    COLUMNS: tl.constexpr = logits.tile.columns.shape[1]
    total, slope, count = tau * 0.0, tau * 0.0, tau * 0.0
    lost_total, lost_slope = tau * 0.0, tau * 0.0
    for first in range(0, logits.tile.N, COLUMNS):
        y = load_logits(logits, first + logits.tile.columns, C)
        more_total, more_slope, more_count = sum_held(with_logits(logits, y), tau, step, TOLERANCE, C)
        total, lost_total = add_compensated(total, lost_total, more_total)
        slope, lost_slope = add_compensated(slope, lost_slope, more_slope)
        count += more_count
    return total, slope, count


@triton.jit
def add_compensated(total, lost, more):
    """Kahan's sum: (total + more, its rounding error)."""
    more = more - lost
    after = total + more
    return after, (after - total) - more


@triton.jit
def forward_threshold_short(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, LANES: tl.constexpr, C: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """Weights of ROWS short rows per program, one warp, each over a few of its lanes.

    The tile is [ROWS, K, LANES]: a lane holds K columns of a row, so that a sum over a row is a sum within each lane
    and a few shuffles, and no warp waits for another.
    """
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


@triton.jit
def load_slopes(dp, tile, state, scale, theta, F: tl.constexpr, HAS_MASK: tl.constexpr, ACC: tl.constexpr):
    """(g′, dp) of a tile; `tile.s` holds p where the normaliser has a slope_of_weight. dp is 0 where masked."""
    upstream = tiles.load(dp, tile, 0.0, ACC)
    if F.slope_of_weight is not None:
        a = F.slope_of_weight(tiles.load(tile.s, tile, 0.0, ACC), theta)
    else:
        x = tiles.load_scores(tile, HAS_MASK, ACC)
        tau = tl.load(state + tile.rows, mask=tile.rows < tile.R, other=0.0)
        a = F.slope(tl.maximum(x * scale * F.gain(theta) - tau, 0.0), theta)
    if HAS_MASK:
        upstream = tl.where(tiles.load_visible(tile), upstream, 0.0)
    return a.to(ACC), upstream


@triton.jit
def merge_delta(weight, delta, state, partial, counters, rows, row, part, parts, R, PARTS: tl.constexpr,
                STAGE: tl.constexpr):  # fmt: skip
    """δ = Σ g′·dp / Σ g′ of the whole row, from those sums of a part."""
    if STAGE != "whole":
        partial = tiles.share_sums((weight, delta), partial, counters, row, part, parts, STAGE)
        if STAGE != "publish":
            weight = tl.zeros_like(weight) + tl.sum(tiles.gather_sums(partial, 0, parts, 0.0, PARTS), 0)
            delta = tl.zeros_like(delta) + tl.sum(tiles.gather_sums(partial, 1, parts, 0.0, PARTS), 0)
    z = tl.load(state + R + rows, mask=rows < R, other=0.0)
    return tl.where(z == z, delta / tl.where(weight == 0.0, 1.0, weight), z)  # a NaN row stays NaN


@triton.jit
def backward_threshold(
    dp, saved, ds, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, AGAIN: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """ds = scale·g′·(dp − δ) with δ = Σ g′·dp / Σ g′."""
    ACC: tl.constexpr = state.dtype.element_ty
    rows, columns, row, part = tiles.locate_tile(parts, ROWS, COLUMNS)
    tile = tiles.Tile(saved, mask, rows, columns, R, N, mask_row, mask_column)
    theta = tiles.load_theta(theta, theta_rows, rows, R, HAS_THETA, ACC)
    scale = tiles.scalar_tile(scale, ACC)
    a, upstream = load_slopes(dp, tile, state, scale, theta, F, HAS_MASK, ACC)
    weight = tl.sum(a, 1, keep_dims=True)
    delta = tl.sum(a * upstream, 1, keep_dims=True)
    delta = merge_delta(weight, delta, state, partial, counters, rows, row, part, parts, R, PARTS, STAGE)
    if STAGE != "publish":
        if AGAIN:
            tl.debug_barrier()
            a, upstream = load_slopes(dp, tile, state, scale, theta, F, HAS_MASK, ACC)
        tiles.store(ds, a * (upstream - delta) * scale, tile)
