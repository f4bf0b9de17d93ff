"""Loss of a row and its row state, in one pass over the row: Ω*(s) − s_y; and its gradient, (p − e_y)·dl.

A program reads a row in pieces, several of which are in flight at once. Lane i takes the columns i, i + LANES, …

    softmax      each lane keeps a maximum m and Σ exp(s − m); Ω* = max + log Σ
    threshold    each lane keeps its three largest scores, and τ is solved for these. Scores that no lane kept are at
                 most a lane's third: if no third is above τ, they have no weight, and τ is that of the whole row. Else
                 τ is a lower bound, from which the solver goes on with the whole row, read once per step.

With t = max(y − τ, 0), y = gain·(s − max) and α = 1 + gain, Ω*(s) − max = (Σ value(t)·t − 1)/α + (1 + τ)/gain. Its
derivative in τ is 0 at the solution, so an error of τ enters squared; half a Newton step takes most of that away.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard._backends.gpu.rows import tiles
from regard._backends.gpu.rows.solver import (
    Logits,
    add_three,
    bound_from_maxima,
    evaluate,
    load_logits,
    reduce_sums,
    reset_layout,
    solve,
)
from regard._backends.gpu.rows.threshold import sum_steps

LOG2E = tl.constexpr(1.4426950408889634)
KEPT = tl.constexpr(3)  # scores of a lane


class Kept(NamedTuple):
    """The logits that the lanes have kept, each [1, LANES]."""

    first: Any
    second: Any
    third: Any
    theta: Any


@triton.jit
def exp_below(x):
    """exp(x) for x ≤ 0."""
    if x.dtype == tl.float64:
        e = tl.exp(x)
    else:
        e = tl.exp2(x * LOG2E)
    return e


@triton.jit
def locate_row(s, R, N, LANES: tl.constexpr):
    """The tile of the first LANES columns of this program's row, and the row (int64)."""
    row = tl.program_id(0).to(tl.int64)
    rows = row + tl.arange(0, 1)[:, None]
    return tiles.Tile(s, s, rows, tl.arange(0, LANES)[None, :], R, N, 0, 0), row


@triton.jit
def load_pieces(tile, first, LANES: tl.constexpr, PIECES: tl.constexpr):
    """The next PIECES·LANES scores of a row as they are stored, −inf beyond its end."""
    RAW: tl.constexpr = tile.s.dtype.element_ty
    pieces = ()
    for i in tl.static_range(PIECES):
        columns = first + i * LANES + tile.columns
        pieces += (tiles.load_scores(tiles.move_tile(tile, columns), False, RAW),)
    return pieces


@triton.jit
def store_row(loss, state, potential, top, second, third, s, target, row, R, N, ignore, HAS_TARGET: tl.constexpr):
    """Stores Ω* − s_y (without a target Ω*) and the state: the maximum and two numbers; NaN where it is not finite.

    The loss is 0 where the target is `ignore`, and NaN where it is no column.
    """
    ACC: tl.constexpr = state.dtype.element_ty
    top = tl.where(tl.abs(top) < float("inf"), top, float("nan"))
    value = potential + top
    if HAS_TARGET:
        y = tl.load(target + row)
        inside = (y >= 0) & (y < N)
        score = tl.load(s + row * N + tl.where(inside, y, 0)).to(ACC)
        value = tl.where(inside, potential + (top - score), float("nan"))
        value = tl.where(y == ignore, 0.0, value)
    tl.store(loss + row, value)
    tl.store(state + row, top)
    tl.store(state + R + row, second)
    tl.store(state + 2 * R + row, third)


@triton.jit
def forward_softmax(
    s, target, loss, state, R, N, ignore, theta: tl.float64,
    F: tl.constexpr, LANES: tl.constexpr, PIECES: tl.constexpr, HAS_TARGET: tl.constexpr, PAIRS: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """log Σ exp(s) − s_y of one row per program; the state is (max, 1/Z, 0)."""
    ACC: tl.constexpr = state.dtype.element_ty
    tile, row = locate_row(s, R, N, LANES)
    m = tl.full([1, LANES], float("-inf"), ACC)
    z = tl.zeros([1, LANES], ACC)
    for first in range(0, N, LANES * PIECES):
        pieces = load_pieces(tile, first, LANES, PIECES)
        before = m
        for i in tl.static_range(PIECES):
            m = tiles.nan_maximum(m, pieces[i].to(ACC))
        shift = tiles.finite_or_zero(m)
        z = z * exp_below(before - shift)
        for i in tl.static_range(PIECES):
            z += exp_below(pieces[i].to(ACC) - shift)
    top = tl.sum(tiles.row_maximum(m))
    total = tl.sum(z * exp_below(m - tiles.finite_or_zero(top)))
    store_row(loss, state, tl.log(total), top, 1.0 / total, 0.0, s, target, row, R, N, ignore, HAS_TARGET)


@triton.jit
def insert(x, first, second, third):
    """The three largest of x and three others in falling order; the first is NaN once an x was."""
    low = tl.minimum(first, x)
    lower = tl.minimum(second, low)
    return tiles.nan_maximum(first, x), tl.maximum(second, low), tl.maximum(third, lower)


INSERT = """{{
    .reg .b32 low, lower;
    min.{0} low, $3, $6;
    max.NaN.{0} $0, $3, $6;
    min.{0} lower, $4, low;
    max.{0} $1, $4, low;
    max.{0} $2, $5, lower;
}}"""
INSERT_BFLOAT16 = tl.constexpr(INSERT.format("bf16x2"))
INSERT_FLOAT16 = tl.constexpr(INSERT.format("f16x2"))


@triton.jit
def insert_pairs(x, first, second, third):
    """`insert` of 16-bit numbers, two to an instruction; one at a time it would take longer than the loads."""
    ASM: tl.constexpr = INSERT_BFLOAT16 if x.dtype == tl.bfloat16 else INSERT_FLOAT16
    return tl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,r,r,r,r", [first, second, third, x], (x.dtype, x.dtype, x.dtype), is_pure=True, pack=2
    )


@triton.jit
def sum_kept(kept, tau, step, TOLERANCE: tl.constexpr, C: tl.constexpr):
    """Σ value, Σ slope and the size of the support over the kept logits, as `solver.sum_held`."""
    F: tl.constexpr = C.F
    value, slope, count = evaluate(kept.first, tau, kept.theta, F)
    value, slope, count = add_three(value, slope, count, *evaluate(kept.second, tau, kept.theta, F))
    value, slope, count = add_three(value, slope, count, *evaluate(kept.third, tau, kept.theta, F))
    return reduce_sums(value, slope, count, True, TOLERANCE, F)


@triton.jit
def weighted_excess(y, tau, theta, F: tl.constexpr):
    """value(t)·t of each logit."""
    t = tl.maximum(y - tau, 0.0)
    return F.weigh(t, theta) * t


@triton.jit
def sum_excess(logits, tau, C: tl.constexpr):
    """Σ value(t)·t over a whole row, read again."""
    F: tl.constexpr = C.F
    COLUMNS: tl.constexpr = logits.tile.columns.shape[1]
    total = tl.zeros([1, COLUMNS], tau.dtype)
    for first in range(0, logits.tile.N, COLUMNS):
        total += weighted_excess(load_logits(logits, first + logits.tile.columns, C), tau, logits.theta, F)
    return tl.sum(total, 1, keep_dims=True)


@triton.jit
def forward_threshold(
    s, target, loss, state, R, N, ignore, theta: tl.float64,
    F: tl.constexpr, LANES: tl.constexpr, PIECES: tl.constexpr, HAS_TARGET: tl.constexpr, PAIRS: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Ω*(s) − s_y of one row per program; the state is (max, τ, rest), where τ + rest is a Newton step further."""
    ACC: tl.constexpr = state.dtype.element_ty
    TOLERANCE: tl.constexpr = C.TOLERANCE
    tile, row = locate_row(s, R, N, LANES)
    a = tl.full([1, LANES], float("-inf"), s.dtype.element_ty if PAIRS else ACC)
    b, c = a, a
    for start in range(0, N, LANES * PIECES):
        pieces = load_pieces(tile, start, LANES, PIECES)
        for i in tl.static_range(PIECES):
            if PAIRS:
                a, b, c = insert_pairs(pieces[i], a, b, c)
            else:
                a, b, c = insert(pieces[i].to(ACC), a, b, c)
    a, b, c = a.to(ACC), b.to(ACC), c.to(ACC)
    theta = tiles.scalar_tile(theta, ACC)
    gain = F.gain(theta) + theta * 0.0
    top, tau = bound_from_maxima(a, theta, gain, gain, C)
    shift = tiles.finite_or_zero(top)
    kept = Kept((a - shift) * gain, (b - shift) * gain, (c - shift) * gain, theta)
    tau, total, slope = solve(sum_kept, kept, tau, gain, TOLERANCE, C)
    excess = weighted_excess(kept.first, tau, theta, F) + weighted_excess(kept.second, tau, theta, F)
    excess = tl.sum(excess + weighted_excess(kept.third, tau, theta, F), 1, keep_dims=True)
    if (tl.max((kept.third > tau).to(tl.int32)) > 0) & (N > KEPT * LANES):
        logits = Logits(tile, 0, reset_layout(top), gain, theta, 0, 0, 0, 0)
        tau, total, slope = solve(sum_steps, logits, reset_layout(tau), gain, TOLERANCE, C)
        excess = sum_excess(logits, tau, C)
    rest = (total - 1.0) * gain / tl.where(slope > 0.0, slope, 1.0)
    potential = (excess - 1.0) / (1.0 + gain) + ((1.0 + tau) - 0.5 * (total - 1.0) * rest) / gain
    store_row(
        loss, state, tl.sum(potential), tl.sum(top), tl.sum(tau), tl.sum(rest),
        s, target, row, R, N, ignore, HAS_TARGET,
    )  # fmt: skip


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
