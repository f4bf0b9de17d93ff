"""Long rows of the threshold family, in the places of a multiprocessor (`rows_places.py`): read once, solved there.

    read    a, b, the held chunks, c, d      every thread keeps its maxima, from which τ begins
    solve   Σ value, Σ slope over all of them, until Σ value = 1
    tell    c, d, the held chunks, a, b      and the next row is called into each place that is left

Gluon, Hopper.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from regard._backends.gpu.rows.resident.buffers import (
    by_lane,
    call_row,
    chunk,
    places_of,
    quarter,
    stagger,
    taken_in,
    told_all,
)
from regard._backends.gpu.rows.solver import FINE, LIMIT, add_three, add_two, advance, sums_of
from regard._backends.gpu.rows.tiles import finite, larger, reciprocal


class Solved(NamedTuple):
    """What the kernel is compiled for."""

    F: Any
    TOLERANCE: float  # |Σp − 1| at which τ is found
    CHUNK: int  # columns; a quarter is half as many
    HELD: int  # chunks
    VECTOR: int  # numbers in 16 bytes
    EVEN: bool  # the row fills its chunks and quarters
    PHASES: int  # of the programs: `stagger`


class Map(NamedTuple):
    """y = factor·(x − top), and the map's parameter."""

    top: Any
    factor: Any
    theta: Any
    gain: Any


class Told(NamedTuple):
    """What a row's weights are told from."""

    map: Any
    tau: Any
    inverse: Any


@gluon.jit
def maxima(x, C: gl.constexpr):
    """Of what a thread has, [LANES, VECTOR]."""
    return gl.reduce(by_lane(x, C), 0, larger)


@gluon.jit
def larger_maxima(x, most, _fixed, FIRST: gl.constexpr, C: gl.constexpr):
    here = maxima(x, C)
    if not FIRST:
        here = larger(most, here)
    return here


@gluon.jit
def scaled(x, m):
    return (x - finite(m.top)) * m.factor


@gluon.jit
def joined(value, slope, count, TOLERANCE: gl.constexpr, F: gl.constexpr):
    """The sums of all threads, in one reduction; the support is counted where `advance` asks for it."""
    if F.order == 2 and TOLERANCE < FINE:
        total, slope, count = gl.reduce((value, slope, count), 0, add_three)
    else:
        total, slope = gl.reduce((value, slope), 0, add_two)
        count = total
    return total, slope, count


@gluon.jit
def begin(few, m, C: gl.constexpr):
    """About the τ at which a few scores [n] alone would sum to 1: a lower bound."""
    F: gl.constexpr = C.F
    y = scaled(few, m)
    after = finite(m.top) * 0.0 - 1.0
    tau, floor = after + 0.0, after + 0.0  # one value by two names would not be carried through a loop
    far = 1
    step = 0
    while (far > 0) & (step < LIMIT):
        tau = after
        value, slope, count = sums_of(y, tau, m.theta, F)
        total, slope, count = joined(value, slope, count, 1e-4, F)
        after, floor, far = advance(tau, floor, total, slope, count, m.gain, 1e-4, F)
        step += 1
    return tau


@gluon.jit
def lane_sums(x, tau, m, C: gl.constexpr):
    """`sums_of` the scores of each thread, [LANES]."""
    F: gl.constexpr = C.F
    value, slope, count = sums_of(by_lane(scaled(x, m), C), tau, m.theta, F)
    return gl.sum(gl.sum(value, 2), 0), gl.sum(gl.sum(slope, 2), 0), gl.sum(gl.sum(count, 2), 0)


@gluon.jit
def sums_over(work, a, b, tau, m, C: gl.constexpr):
    """Σ value, Σ slope and the size of the support of a row that is all here."""
    F: gl.constexpr = C.F
    TOLERANCE: gl.constexpr = C.TOLERANCE
    value, slope, count = lane_sums(a, tau, m, C)
    value, slope, count = add_three(value, slope, count, *lane_sums(b, tau, m, C))
    for i in range(C.HELD):
        value, slope, count = add_three(value, slope, count, *lane_sums(chunk(work, i, C), tau, m, C))
    value, slope, count = add_three(value, slope, count, *lane_sums(quarter(work, 2, C), tau, m, C))
    value, slope, count = add_three(value, slope, count, *lane_sums(quarter(work, 3, C), tau, m, C))
    return joined(value, slope, count, TOLERANCE, F)


@gluon.jit
def solve(work, a, b, after, m, C: gl.constexpr):
    """(τ, Σ value, Σ slope) with Σ value = 1, from a lower bound on."""
    F: gl.constexpr = C.F
    TOLERANCE: gl.constexpr = C.TOLERANCE
    floor = after * 0.0 - 1.0
    tau, total, slope = after + 0.0, after + 0.0, after + 0.0  # as in `begin`
    far = 1
    step = 0
    while (far > 0) & (step < LIMIT):
        tau = after
        total, slope, count = sums_over(work, a, b, tau, m, C)
        after, floor, far = advance(tau, floor, total, slope, count, m.gain, TOLERANCE, F)
        step += 1
    return tau, total, slope


@gluon.jit
def weights(x, told, C: gl.constexpr):
    F: gl.constexpr = C.F
    return F.weigh(gl.maximum(scaled(x, told.map) - told.tau, 0.0), told.map.theta) * told.inverse


@gluon.jit
def forward_solved(s, p, state, R, N, scale: gl.float64, theta: gl.float64, C: gl.constexpr):
    """Every num_programs-th row."""
    F: gl.constexpr = C.F
    work = places_of(s, p, R, N, C)
    theta = theta.to(gl.float32)
    gain = F.gain(theta) + theta * 0.0
    factor = scale.to(gl.float32) * gain
    stagger(C.PHASES)
    call_row(work, gl.program_id(0), C)
    for at in range(gl.program_id(0), R, gl.num_programs(0)):
        row, after = gl.cast(at, gl.int64), at + gl.num_programs(0)
        most, a, b = taken_in(work, at, larger_maxima, 0, 0, C)
        few = gl.reshape(most, [most.shape[0] * C.VECTOR])
        m = Map(gl.reduce(few, 0, larger), factor, theta, gain)
        tau, total, slope = solve(work, a, b, begin(few, m, C), m, C)
        sound = m.top < float("inf")
        inverse = gl.where(sound, reciprocal(total), float("nan"))
        told_all(work, row, a, b, after, weights, Told(m, tau, inverse), C)
        gl.store(state + row, gl.where(m.top == float("-inf"), 0.0, finite(m.top) * factor + tau))
        gl.store(state + R + row, gl.where(sound, slope, float("nan")))
    async_copy.wait_group(0)
