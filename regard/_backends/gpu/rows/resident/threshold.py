"""Resident kernel of the threshold family: a row is read once and solved in shared memory (`buffers.py`).

    read     a, b, the held chunks, c, d      every thread keeps its maxima, which give a lower bound of τ
    solve    Σ value, Σ slope over the row, until Σ value = 1
    store    c, d, the held chunks, a, b      and the next row is copied into each buffer that is free

Gluon, Hopper.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from regard._backends.gpu.rows.resident.buffers import (
    allocate_buffers,
    by_lane,
    copy_row,
    load_chunk,
    load_quarter,
    reduce_row,
    stagger,
    store_row,
)
from regard._backends.gpu.rows.solver import FINE, LIMIT, add_three, add_two, evaluate, next_tau
from regard._backends.gpu.rows.tiles import finite_or_zero, nan_maximum, reciprocal


class Logits(NamedTuple):
    """A row's logits y = factor·(s − top): some of them in registers, `some`, or all in buffers and a and b."""

    some: Any
    work: Any
    a: Any
    b: Any
    top: Any
    factor: Any
    theta: Any
    gain: Any


class WeightFactors(NamedTuple):
    """What a row's weights are computed from."""

    top: Any
    factor: Any
    theta: Any
    tau: Any
    inverse: Any


@gluon.jit
def accumulate(x, maxima, _fixed, FIRST: gl.constexpr, C: gl.constexpr):
    """Maxima of what each thread has read, [LANES, VECTOR], for `reduce_row`."""
    here = gl.reduce(by_lane(x, C), 0, nan_maximum)
    if not FIRST:
        here = nan_maximum(maxima, here)
    return here


@gluon.jit
def to_logits(x, row):
    """y of scores x."""
    return (x - finite_or_zero(row.top)) * row.factor


@gluon.jit
def reduce_sums(value, slope, count, TOLERANCE: gl.constexpr, F: gl.constexpr):
    """Sums over all threads in one reduction; the support is counted only where `next_tau` uses it."""
    if F.order == 2 and TOLERANCE < FINE:
        total, slope, count = gl.reduce((value, slope, count), 0, add_three)
    else:
        total, slope = gl.reduce((value, slope), 0, add_two)
        count = total
    return total, slope, count


@gluon.jit
def sum_some(row, tau, TOLERANCE: gl.constexpr, C: gl.constexpr):
    """Σ value, Σ slope and the size of the support of the scores `some` [n]."""
    F: gl.constexpr = C.F
    value, slope, count = evaluate(to_logits(row.some, row), tau, row.theta, F)
    return reduce_sums(value, slope, count, TOLERANCE, F)


@gluon.jit
def sum_by_lane(x, tau, row, C: gl.constexpr):
    """`evaluate` summed over the scores of each thread, [LANES]."""
    F: gl.constexpr = C.F
    value, slope, count = evaluate(by_lane(to_logits(x, row), C), tau, row.theta, F)
    return gl.sum(gl.sum(value, 2), 0), gl.sum(gl.sum(slope, 2), 0), gl.sum(gl.sum(count, 2), 0)


@gluon.jit
def sum_row(row, tau, TOLERANCE: gl.constexpr, C: gl.constexpr):
    """Σ value, Σ slope and the size of the support of a whole row."""
    F: gl.constexpr = C.F
    value, slope, count = sum_by_lane(row.a, tau, row, C)
    value, slope, count = add_three(value, slope, count, *sum_by_lane(row.b, tau, row, C))
    for i in range(C.HELD):
        value, slope, count = add_three(value, slope, count, *sum_by_lane(load_chunk(row.work, i, C), tau, row, C))
    value, slope, count = add_three(value, slope, count, *sum_by_lane(load_quarter(row.work, 2, C), tau, row, C))
    value, slope, count = add_three(value, slope, count, *sum_by_lane(load_quarter(row.work, 3, C), tau, row, C))
    return reduce_sums(value, slope, count, TOLERANCE, F)


@gluon.jit
def solve(sum_logits: gl.constexpr, row, after, TOLERANCE: gl.constexpr, C: gl.constexpr):
    """(τ, Σ value, Σ slope) where Σ value = 1, from a lower bound of τ.

    `solver.solve` for scalars; its first step is in the loop too, because `sum_row` is long.
    """
    F: gl.constexpr = C.F
    floor = after * 0.0 - 1.0
    tau, total, slope = after + 0.0, after + 0.0, after + 0.0  # one value by two names is not carried through a loop
    far = 1
    step = 0
    while (far > 0) & (step < LIMIT):
        tau = after
        total, slope, count = sum_logits(row, tau, TOLERANCE, C)
        after, floor, far = next_tau(tau, floor, total, slope, count, row.gain, TOLERANCE, F)
        step += 1
    return tau, total, slope


@gluon.jit
def weigh(x, factors, C: gl.constexpr):
    """Weights of some scores."""
    F: gl.constexpr = C.F
    return F.weigh(gl.maximum(to_logits(x, factors) - factors.tau, 0.0), factors.theta) * factors.inverse


@gluon.jit
def forward_resident_threshold(s, p, state, R, N, scale: gl.float64, theta: gl.float64, C: gl.constexpr):
    """Weights of every num_programs-th row."""
    F: gl.constexpr = C.F
    TOLERANCE: gl.constexpr = C.TOLERANCE
    work = allocate_buffers(s, p, R, N, C)
    theta = theta.to(gl.float32)
    gain = F.gain(theta) + theta * 0.0
    factor = scale.to(gl.float32) * gain
    stagger(C.PHASES)
    copy_row(work, gl.program_id(0), C)
    for at in range(gl.program_id(0), R, gl.num_programs(0)):
        row, after = gl.cast(at, gl.int64), at + gl.num_programs(0)
        maxima, a, b = reduce_row(work, at, accumulate, 0, 0, C)
        some = gl.reshape(maxima, [maxima.shape[0] * C.VECTOR])
        top = gl.reduce(some, 0, nan_maximum)
        logits = Logits(some, work, a, b, top, factor, theta, gain)
        bound, _total, _slope = solve(sum_some, logits, finite_or_zero(top) * 0.0 - 1.0, 1e-4, C)
        tau, total, slope = solve(sum_row, logits, bound, TOLERANCE, C)
        is_finite = top < float("inf")
        inverse = gl.where(is_finite, reciprocal(total), float("nan"))
        store_row(work, row, a, b, after, weigh, WeightFactors(top, factor, theta, tau, inverse), C)
        gl.store(state + row, gl.where(top == float("-inf"), 0.0, finite_or_zero(top) * factor + tau))
        gl.store(state + R + row, gl.where(is_finite, slope, float("nan")))
    async_copy.wait_group(0)
