"""Short threshold rows, sixteen at once: each row is one lane of every vector, and no sum runs across lanes.

The steps are those of `threshold_solver`, taken by all sixteen rows until the last one has its support.
"""

from __future__ import annotations

from regard._backends.cpu.jit.compile import prim, real, tile
from regard._backends.cpu.rows.row_io import INF, fill, weightless_value
from regard._backends.cpu.threshold_solver import (
    STEPS,
    linear_step,
    norm_step,
    quadratic_gap,
    quadratic_step,
)

SIDE = 16
UNKNOWN = 1e30  # no count


def step_rows(tau, sums, known):
    """One step of `solve_linear` or `solve_quadratic` for SIDE rows at once; True while any support changes.

    A row whose support repeats keeps its τ; its `known` then holds the rest of τ.
    """
    changes = 0.0
    for lane in range(SIDE):
        count, first, second = sums[lane], sums[SIDE + lane], sums[2 * SIDE + lane]
        if tile.order == 1:
            delta, closed = linear_step(count, first), True
        else:
            gap = quadratic_gap(count, first, second)
            closed = gap >= 0.0
            delta = prim.where(closed, quadratic_step(first, second, gap), norm_step(first, second))
        repeats = (count == known[lane]) | (delta != delta) | (known[lane] < 0.5)
        known[lane] = prim.where(repeats, delta, prim.where(closed, count, UNKNOWN))
        tau[lane] = prim.where(repeats, tau[lane], tau[lane] + delta)
        changes = prim.maximum(changes, prim.where(repeats, 0.0, 1.0))
    return changes > 0.0


def interleave(s, block, x):
    """x[j·SIDE + lane] ← entry j of row block + lane, for SIDE rows."""
    n = s.shape[1]
    prim.side_interleave(s.reshape(s.size), block * n, n, x)
    start = n // SIDE * SIDE
    for lane in range(SIDE):
        row = s[block + lane]
        for j in range(start, n):
            x[j * SIDE + lane] = row[j]


def forward_short(s, p, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    """`forward_long` for SIDE rows at once: short rows spend their time in the solver's sums."""
    n = s.shape[1]
    x = scratch[0]
    top, tau, known, sums = scratch[1, :SIDE], scratch[1, SIDE:], scratch[1, 2 * SIDE :], scratch[1, 3 * SIDE :]
    factor = tile.gain(theta[0]) * real(scale)
    for block in range(first, last, SIDE):
        if masked or last - block < SIDE:
            for lane in range(SIDE):
                i = min(block + lane, last - 1)
                row, visible = s[i], mask[i * stride : i * stride + n]
                for j in range(n):
                    is_visible = visible[j] if masked else True
                    x[j * SIDE + lane] = prim.where(is_visible, row[j], -INF)
        else:
            interleave(s, block, x)
        prim.side_maximum(x, n, top)
        prim.side_begin(x, n, top, factor, tile.order, sums)
        for lane in range(SIDE):
            tau[lane] = -1.0
            known[lane] = UNKNOWN
        for _ in range(STEPS):
            if not step_rows(tau, sums, known):
                break
            prim.side_moments(x, n, tau, tile.order, sums)
        for lane in range(min(SIDE, last - block)):
            i = block + lane
            if not (prim.abs(top[lane]) < INF):
                fill(p[i], weightless_value(top[lane]))
                state[0, i] = weightless_value(top[lane])
                state[1, i] = weightless_value(top[lane])
                continue
            rest, visible = known[lane], mask[i * stride : i * stride + n]
            state[0, i] = top[lane] * factor + (tau[lane] + rest)
            state[1, i] = sums[(tile.order - 1) * SIDE + lane]
            write_row(s[i], p[i], visible, masked, factor, top[lane], tau[lane], rest, theta[0])


def write_row(s, row, mask, masked, factor, top, tau, rest, parameter):
    """row ← value(max(factor·(s − top) − τ − rest, 0))."""
    if masked:
        for j in range(row.size):
            y = (s[j] - top) * factor
            t = prim.maximum(prim.where(mask[j], y, -INF) - tau - rest, 0.0)
            row[j] = prim.where(t > 0.0, tile.value(t, parameter), 0.0)
    else:
        for j in range(row.size):
            t = prim.maximum((s[j] - top) * factor - tau - rest, 0.0)
            row[j] = prim.where(t > 0.0, tile.value(t, parameter), 0.0)
