"""Short rows of the threshold family: one warp solves several rows, each over a few of its lanes.

The tile is [ROWS, K, LANES]: a row's columns lie K deep in each of its lanes' registers, so that a sum over a row is a
sum of what a lane holds and a few shuffles, and no warp waits for another.
"""

import triton
import triton.language as tl

from regard._backends.gpu.rows.solver import FINE, LIMIT, add_three, add_two, advance, sums_of
from regard._backends.gpu.rows.tiles import finite, larger, load_scores, number, reciprocal, store


@triton.jit
def forward_short(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr,
    LANES: tl.constexpr, TOLERANCE: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = state.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    columns = tl.arange(0, COLUMNS // LANES)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    rows = row[:, None, None]
    if HAS_THETA:
        theta = tl.load(theta_rows + row, mask=row < R, other=1.5).to(ACC)
    else:
        theta = tl.zeros([ROWS], ACC) + tl.sum(number(theta, ACC))
    gain = F.gain(theta) + theta * 0.0
    factor = tl.sum(number(scale, ACC)) * gain
    x = load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, ACC)
    few = tl.reduce(x, 1, larger)  # [ROWS, LANES], the largest of each lane: their solution is a lower bound
    top = tl.reduce(few, 1, larger)
    few = (few[:, None, :] - over(finite(top))) * over(factor)
    tau, _, _ = solve(few, finite(top) * 0.0 - 1.0, theta, gain, 1e-3, F)
    y = (x - over(finite(top))) * over(factor)
    tau, total, slope = solve(y, tau, theta, gain, TOLERANCE, F)
    inverse = tl.where(top < float("inf"), reciprocal(total), float("nan"))
    store(p, F.weigh(tl.maximum(y - over(tau), 0.0), over(theta)) * over(inverse), rows, columns, R, N)
    shift = tl.where(top == float("-inf"), 0.0, finite(top) * factor + tau)
    tl.store(state + row, shift, mask=row < R)
    tl.store(state + R + row, tl.where(top < float("inf"), slope, float("nan")), mask=row < R)


@triton.jit
def over(x):
    """A number per row, [ROWS], against a tile."""
    return x[:, None, None]


@triton.jit
def sums(y, tau, theta, TOLERANCE: tl.constexpr, F: tl.constexpr):
    """Σ value, Σ slope and the size of the support at τ, each [ROWS]."""
    value, slope, count = sums_of(y, over(tau), over(theta), F)
    if F.order == 2 and TOLERANCE < FINE:
        value, slope, count = tl.reduce((value, slope, count), 1, add_three)
        total, slope, count = tl.reduce((value, slope, count), 1, add_three)
    else:
        value, slope = tl.reduce((value, slope), 1, add_two)
        total, slope = tl.reduce((value, slope), 1, add_two)
        count = total
    return total, slope, count


@triton.jit
def solve(y, tau, theta, gain, TOLERANCE: tl.constexpr, F: tl.constexpr):
    """As `rows_solver.solve`; a row that has arrived stays, whatever its neighbours do."""
    floor = tau * 0.0 - 1.0
    total, slope, count = sums(y, tau, theta, TOLERANCE, F)
    after, floor, far = advance(tau, floor, total, slope, count, gain, TOLERANCE, F)
    step = 1
    while (tl.max(far) > 0) & (step < LIMIT):
        tau = tl.where(far > 0, after, tau)
        total, slope, count = sums(y, tau, theta, TOLERANCE, F)
        after, floor, far = advance(tau, floor, total, slope, count, gain, TOLERANCE, F)
        step += 1
    return tau, total, slope
