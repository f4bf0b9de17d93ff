"""Rows of the ratio family too long for a ring (`rows_ring.py`): the row fills the places of a multiprocessor.

A program takes row after row:

    sum     a, b, the held chunks, c, d      a and b stay in registers, c and d are called into their places
    tell    c, d, the held chunks, a, b      and the next row is called into each place that is left

An odd row is read again from the cache, and told, with more care. Gluon, Hopper.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from regard.kernels.rows_exact import halves, reciprocal, silent
from regard.kernels.rows_online import ending
from regard.kernels.rows_places import (
    by_lane,
    call_chunk,
    call_quarter,
    call_row,
    chunk,
    columns_of,
    first_of,
    places_of,
    quarter,
    tell,
)
from regard.kernels.rows_quick import CROWD, apart, frame_of, weight
from regard.kernels.rows_ring import carefully, fall, stagger, summed
from regard.kernels.rows_terms import shift_of, suited, terms
from regard.kernels.rows_tiles import finite, larger


class Overlong(NamedTuple):
    """What the kernel is compiled for."""

    F: Any
    TRAITS: Any
    CHUNK: int  # columns; a quarter is half as many
    HELD: int  # chunks
    VECTOR: int  # numbers in 16 bytes
    EVEN: bool  # the row fills its chunks and quarters
    SCALED: bool  # the scale is not 1
    QUICK: bool  # float32 softmax: `rows_quick`
    CAREFUL: bool  # rows may be odd
    PHASES: int  # of the programs: `stagger`


class Told(NamedTuple):
    """What a row's weights are told from."""

    shift: Any
    pace: Any
    inverse: Any
    rest: Any


@gluon.jit
def added(x, own, sums, scale, FIRST: gl.constexpr, C: gl.constexpr):
    """(own, sums) of every thread, with some scores more; its sum is measured from its own maximum."""
    x = by_lane(x, C)
    most = gl.reduce(gl.reduce(x, 2, larger), 0, larger)  # [LANES]
    if FIRST:
        own = most
        sums = summed(x, own, scale, C)
    else:
        before = own
        own = larger(own, most)
        sums = sums * fall(before, own, scale, C) + summed(x, own, scale, C)
    return own, sums


@gluon.jit
def sum_row(work, row, scale, C: gl.constexpr):
    """(top, z, a, b) of a row. The waits count the copies that were called after the one waited for."""
    async_copy.wait_group(C.HELD + 1)
    a = quarter(work, 0, C)
    call_quarter(work, row, 2, C)
    own, sums = added(a, 0, 0, scale, True, C)
    async_copy.wait_group(C.HELD + 1)
    b = quarter(work, 1, C)
    call_quarter(work, row, 3, C)
    own, sums = added(b, own, sums, scale, False, C)
    for i in range(C.HELD):
        async_copy.wait_group(C.HELD + 1)
        own, sums = added(chunk(work, i, C), own, sums, scale, False, C)
        async_copy.commit_group()  # of nothing, so that the waits may count alike
    async_copy.wait_group(C.HELD + 1)
    own, sums = added(quarter(work, 2, C), own, sums, scale, False, C)
    async_copy.wait_group(C.HELD)
    own, sums = added(quarter(work, 3, C), own, sums, scale, False, C)
    top = gl.reduce(own, 0, larger)
    return top, gl.sum(sums * fall(own, top, scale, C), 0), a, b


@gluon.jit
def weights(x, told, scale, C: gl.constexpr):
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    if C.QUICK:
        p = weight(x, frame_of(told.shift, scale), told.inverse.to(gl.int32, bitcast=True), told.rest, C.SCALED)
    else:
        u, _v = terms(x, told.shift, told.pace, 0.0, F, TRAITS, C.VECTOR == 8, False)
        p = u * told.inverse
    return p


@gluon.jit
def tell_row(work, row, a, b, after, told, scale, C: gl.constexpr):
    """All weights of a row; the one that comes `after` it is called into the places that they leave."""
    c = quarter(work, 2, C)
    call_quarter(work, after, 0, C)
    tell(weights(c, told, scale, C), work, row, first_of(2, C), C)
    d = quarter(work, 3, C)
    call_quarter(work, after, 1, C)
    tell(weights(d, told, scale, C), work, row, first_of(3, C), C)
    for i in range(C.HELD):
        x = chunk(work, i, C)
        call_chunk(work, after, i, C)
        tell(weights(x, told, scale, C), work, row, i * C.CHUNK, C)
    tell(weights(a, told, scale, C), work, row, first_of(0, C), C)
    tell(weights(b, told, scale, C), work, row, first_of(1, C), C)


@gluon.jit
def read(work, row, first, C: gl.constexpr):
    """Scores of an odd row, from the cache."""
    columns = columns_of(first, C.CHUNK, C)
    x = gl.load(work.s + row * work.N + columns, mask=columns < work.N, other=float("-inf"))
    return x.to(gl.float32)


@gluon.jit
def sum_again(work, row, shift, pace, scale, C: gl.constexpr):
    """z of an odd row in the frame of its shift."""
    z = shift.to(gl.float64) * 0.0
    if not C.QUICK:
        z = z.to(gl.float32)
    for first in range(0, work.N, C.CHUNK):
        _u, v = carefully(read(work, row, first, C), shift, pace, scale, C)
        z += gl.sum(v, 0)
    return z


@gluon.jit
def tell_again(work, row, shift, pace, inverse, scale, C: gl.constexpr):
    """The weights of an odd row."""
    for first in range(0, work.N, C.CHUNK):
        u, _v = carefully(read(work, row, first, C), shift, pace, scale, C)
        tell(u * inverse, work, row, first, C)


@gluon.jit
def forward_overlong(s, p, state, R, N, scale: gl.float64, C: gl.constexpr):
    """Every num_programs-th row; the scale is not faint."""
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    HALF: gl.constexpr = C.VECTOR == 8
    work = places_of(s, p, R, N, C)
    slow = scale.to(gl.float32)
    stagger(C.PHASES)
    call_row(work, gl.program_id(0), C)
    for at in range(gl.program_id(0), R, gl.num_programs(0)):
        row, after = gl.cast(at, gl.int64), at + gl.num_programs(0)
        top, z, a, b = sum_row(work, at, scale, C)
        shift = shift_of(finite(top), F)
        pace = suited(top, slow, TRAITS)
        gap = z
        odd = shift * slow < 0.25
        if C.QUICK:
            gap = apart(frame_of(shift, scale), shift, scale)
            z = z * gap
            odd = ((z >= CROWD) & (top < float("inf"))) == 0
        if C.CAREFUL and odd:
            z = sum_again(work, row, shift, pace, scale, C)
            if C.QUICK:
                z = gl.where(top == float("-inf"), 0.0, z + F.rest(silent(shift, scale, F)))
                inverse = gl.where(top < float("inf"), reciprocal(z), float("nan"))
                z = gl.where(top < float("inf"), z, float("nan"))
            else:
                z, inverse = ending(top, z, shift, slow, F, TRAITS, HALF)
            tell_again(work, row, shift, pace, inverse, scale, C)
            call_row(work, after, C)
        else:
            if C.QUICK:
                z = z + F.rest(silent(shift, scale, F))
                near, rest = halves(reciprocal(z) * gap)
                tell_row(work, row, a, b, after, Told(shift, pace, near, rest / near), scale, C)
            else:
                z, inverse = ending(top, z, shift, slow, F, TRAITS, HALF)
                tell_row(work, row, a, b, after, Told(shift, pace, inverse, inverse), scale, C)
        gl.store(state + row, shift)
        gl.store(state + R + row, z.to(gl.float32))
    async_copy.wait_group(0)
