"""Short threshold rows, sixteen at once: each row is one lane of every vector, and no sum runs across lanes.

The steps are those of `_rows_threshold`, taken by all sixteen rows until the last one has its support.
"""

from __future__ import annotations

from regard._backends.cpu.jit.compile import real, tile, words
from regard._backends.cpu.rows.row_io import INF, fill, nothing_or_nan

SIDE = 16
STEPS = 60
UNKNOWN = 1e30  # no count


def side_step(tau, sums, known):
    """One step of `solve_linear` or `solve_quadratic` for SIDE rows at once; True while a support still changes.

    A row whose support repeats stays where it is; its `known` then holds the rest of its τ.
    """
    changes = 0.0
    for lane in range(SIDE):
        count, first, second = sums[lane], sums[SIDE + lane], sums[2 * SIDE + lane]
        if tile.order == 1:
            delta = (first - 1.0) / count
            closed = True
        else:
            gap = first * first - count * (second - 1.0)
            closed = gap >= 0.0
            norm = words.sqrt(second)
            root = (second - 1.0) / (first + words.sqrt(words.maximum(gap, 0.0)))
            delta = words.where(closed, root, (norm - 1.0) * norm / first)
        repeats = (count == known[lane]) | (delta != delta) | (known[lane] < 0.5)
        known[lane] = words.where(repeats, delta, words.where(closed, count, UNKNOWN))
        tau[lane] = words.where(repeats, tau[lane], tau[lane] + delta)
        changes = words.maximum(changes, words.where(repeats, 0.0, 1.0))
    return changes > 0.0


def interleave_loaded(s, block, x):
    """x ← SIDE rows from `block` on, their entries side by side."""
    for lane in range(SIDE):
        row = s[block + lane]
        for j in range(row.size):
            x[j * SIDE + lane] = tile.widen(row[j])


def interleave_direct(s, block, x):
    n = s.shape[1]
    words.side_interleave(s.reshape(s.size), block * n, n, x)
    for lane in range(SIDE):
        row = s[block + lane]
        for j in range(n // SIDE * SIDE, n):
            x[j * SIDE + lane] = row[j]


def forward_short(s, p, state, theta, step, mask, stride, masked, scale, scratch, first, last):
    """SIDE rows at once, interleaved: short rows spend their time in the sums of the solver, here one lane each."""
    n = s.shape[1]
    x = scratch[0]
    top, tau, known, sums = scratch[1, :SIDE], scratch[1, SIDE:], scratch[1, 2 * SIDE :], scratch[1, 3 * SIDE :]
    factor = tile.gain(theta[0]) * real(scale)
    for block in range(first, last, SIDE):
        if masked or last - block < SIDE:
            for lane in range(SIDE):
                i = min(block + lane, last - 1)
                row, seen = s[i], mask[i * stride : i * stride + n]
                for j in range(n):
                    visible = seen[j] if masked else True
                    x[j * SIDE + lane] = words.where(visible, tile.widen(row[j]), -INF)
        else:
            tile.interleave(s, block, x)
        words.side_maximum(x, n, top)
        words.side_begin(x, n, top, factor, tile.order, sums)
        for lane in range(SIDE):
            tau[lane] = -1.0
            known[lane] = UNKNOWN
        for _ in range(STEPS):
            if not side_step(tau, sums, known):
                break
            words.side_moments(x, n, tau, tile.order, sums)
        for lane in range(min(SIDE, last - block)):
            i = block + lane
            if not (words.abs(top[lane]) < INF):
                fill(p[i], nothing_or_nan(top[lane]))
                state[0, i] = nothing_or_nan(top[lane])
                state[1, i] = nothing_or_nan(top[lane])
                continue
            rest, seen = known[lane], mask[i * stride : i * stride + n]
            state[0, i] = top[lane] * factor + (tau[lane] + rest)
            state[1, i] = sums[(tile.order - 1) * SIDE + lane]
            write_row(s[i], p[i], seen, masked, factor, top[lane], tau[lane], rest, theta[0])


def write_row(s, row, mask, masked, factor, top, tau, rest, parameter):
    """row ← value(max(factor·(s − top) − τ − rest, 0))."""
    if masked:
        for j in range(row.size):
            y = (tile.widen(s[j]) - top) * factor
            t = words.maximum(words.where(mask[j], y, -INF) - tau - rest, 0.0)
            row[j] = tile.narrow(words.where(t > 0.0, tile.value(t, parameter), 0.0))
    else:
        for j in range(row.size):
            t = words.maximum((tile.widen(s[j]) - top) * factor - tau - rest, 0.0)
            row[j] = tile.narrow(words.where(t > 0.0, tile.value(t, parameter), 0.0))
