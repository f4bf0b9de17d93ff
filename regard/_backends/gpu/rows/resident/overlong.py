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

from regard._backends.gpu.rows.resident.buffers import (
    call_row,
    columns_of,
    places_of,
    stagger,
    taken_in,
    tell,
    told_all,
)
from regard._backends.gpu.rows.resident.ratio import (
    added,
    carefully,
    ended,
    ended_carefully,
    met,
    nothing_yet,
    weights,
)


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


@gluon.jit
def sum_more(x, state, scale, FIRST: gl.constexpr, C: gl.constexpr):
    own, sums = state
    return added(x, own, sums, scale, FIRST, C)


@gluon.jit
def read(work, row, first, C: gl.constexpr):
    """Scores of an odd row, from the cache."""
    columns = columns_of(first, C.CHUNK, C)
    x = gl.load(work.s + row * work.N + columns, mask=columns < work.N, other=float("-inf"))
    return x.to(gl.float32)


@gluon.jit
def sum_again(work, row, met_row, scale, C: gl.constexpr):
    """z of an odd row."""
    z = nothing_yet(met_row, C)
    for first in range(0, work.N, C.CHUNK):
        _u, v = carefully(read(work, row, first, C), met_row, scale, C)
        z += gl.sum(v, 0)
    return z


@gluon.jit
def tell_again(work, row, met_row, inverse, scale, C: gl.constexpr):
    """The weights of an odd row."""
    for first in range(0, work.N, C.CHUNK):
        u, _v = carefully(read(work, row, first, C), met_row, scale, C)
        tell(u * inverse, work, row, first, C)


@gluon.jit
def forward_overlong(s, p, state, R, N, scale: gl.float64, C: gl.constexpr):
    """Every num_programs-th row; the scale is not faint."""
    work = places_of(s, p, R, N, C)
    stagger(C.PHASES)
    call_row(work, gl.program_id(0), C)
    for at in range(gl.program_id(0), R, gl.num_programs(0)):
        row, after = gl.cast(at, gl.int64), at + gl.num_programs(0)
        sums, a, b = taken_in(work, at, sum_more, (0, 0), scale, C)
        this = met(sums[0], sums[1], scale, C)
        if C.CAREFUL and this.odd:
            z, inverse = ended_carefully(this, sum_again(work, row, this, scale, C), scale, C)
            tell_again(work, row, this, inverse, scale, C)
            call_row(work, after, C)
        else:
            z, told = ended(this, scale, C)
            told_all(work, row, a, b, after, weights, told, C)
        gl.store(state + row, this.shift)
        gl.store(state + R + row, z.to(gl.float32))
    async_copy.wait_group(0)
