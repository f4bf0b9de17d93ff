"""Rows of the ratio family that shared memory does not hold: most of a row stays there, the rest is read twice.

A program takes row after row. A row is HELD chunks, each with a place of its own, and four quarters a, b, c, d that
share two places; a and b come a second time, from the L2 cache, where they still are:

    sum     a, b, the held chunks, c, d         c and d are called into the places of a and b,
    tell    c, d, two held, a, b, the others    a and b once more; the next row into each place that is left

So copies are always under way, and no program waits for another. Gluon, Hopper.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from regard.kernels.rows_exact import halves, reciprocal, silent
from regard.kernels.rows_online import ending
from regard.kernels.rows_quick import CROWD, apart, frame_of, weight
from regard.kernels.rows_ring import carefully, copy, fall, stagger, summed
from regard.kernels.rows_terms import shift_of, suited, terms
from regard.kernels.rows_tiles import finite, larger


class Overlong(NamedTuple):
    """What the kernel is compiled for."""

    F: Any
    TRAITS: Any
    CHUNK: int  # columns; a quarter is half as many
    HELD: int  # chunks, two or more
    VECTOR: int  # numbers in 16 bytes
    EVEN: bool  # the row fills its chunks and quarters
    SCALED: bool  # the scale is not 1
    QUICK: bool  # float32 softmax: `rows_quick`
    CAREFUL: bool  # rows may be odd
    PHASES: int  # of the programs: `stagger`


class Work(NamedTuple):
    """Where a program's rows lie."""

    held: Any  # [HELD, CHUNK] in shared memory
    pair: Any  # [2, CHUNK / 2]
    s: Any
    p: Any
    R: Any
    N: Any
    scale: Any  # float64


class Told(NamedTuple):
    """What a row's weights are told from."""

    shift: Any
    pace: Any
    inverse: Any
    rest: Any


@gluon.jit
def columns_of(first, COUNT: gl.constexpr, C: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([C.VECTOR], [32], [gl.num_warps()], [0])
    return first + gl.arange(0, COUNT, layout)


@gluon.jit
def call(work, row, place, first, COUNT: gl.constexpr, C: gl.constexpr):
    """Have COUNT columns of a row copied into a place."""
    columns = columns_of(first, COUNT, C)
    inside = (columns < work.N) & (row < work.R)
    copy(place, work.s + row.to(gl.int64) * work.N + columns, mask=inside)
    async_copy.commit_group()


@gluon.jit
def call_chunk(work, row, i, C: gl.constexpr):
    call(work, row, work.held.index(i), i * C.CHUNK, C.CHUNK, C)


@gluon.jit
def call_quarter(work, row, i: gl.constexpr, C: gl.constexpr):
    call(work, row, work.pair.index(i % 2), C.HELD * C.CHUNK + i * (C.CHUNK // 2), C.CHUNK // 2, C)


@gluon.jit
def scores(work, place, first, COUNT: gl.constexpr, C: gl.constexpr):
    columns = columns_of(first, COUNT, C)
    x = place.load(columns.type.layout).to(gl.float32)
    if not C.EVEN:
        x = gl.where(columns < work.N, x, float("-inf"))
    return x


@gluon.jit
def chunk(work, i, C: gl.constexpr):
    return scores(work, work.held.index(i), i * C.CHUNK, C.CHUNK, C)


@gluon.jit
def quarter(work, i: gl.constexpr, C: gl.constexpr):
    return scores(work, work.pair.index(i % 2), C.HELD * C.CHUNK + i * (C.CHUNK // 2), C.CHUNK // 2, C)


@gluon.jit
def added(x, own, sums, scale, FIRST: gl.constexpr, C: gl.constexpr):
    """(own, sums) of every thread, with some scores more; its sum is measured from its own maximum."""
    LANES: gl.constexpr = 32 * gl.num_warps()
    x = gl.reshape(x, [x.shape[0] // (LANES * C.VECTOR), LANES, C.VECTOR])
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
def sum_row(work, row, C: gl.constexpr):
    """(top, z) of a row. The waits count the copies that were called after the one waited for."""
    async_copy.wait_group(C.HELD - 1)
    own, sums = added(quarter(work, 0, C), 0, 0, work.scale, True, C)
    call_quarter(work, row, 2, C)
    async_copy.wait_group(C.HELD - 1)
    own, sums = added(quarter(work, 1, C), own, sums, work.scale, False, C)
    call_quarter(work, row, 3, C)
    for i in range(C.HELD):
        async_copy.wait_group(C.HELD + 1)
        own, sums = added(chunk(work, i, C), own, sums, work.scale, False, C)
        async_copy.commit_group()  # of nothing, so that the waits may count alike
    async_copy.wait_group(C.HELD + 1)
    own, sums = added(quarter(work, 2, C), own, sums, work.scale, False, C)
    async_copy.wait_group(C.HELD)
    own, sums = added(quarter(work, 3, C), own, sums, work.scale, False, C)
    top = gl.reduce(own, 0, larger)
    return top, gl.sum(sums * fall(own, top, work.scale, C), 0)


@gluon.jit
def tell(x, work, row, first, told, C: gl.constexpr):
    """The weights of some scores."""
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    if C.QUICK:
        p = weight(x, frame_of(told.shift, work.scale), told.inverse.to(gl.int32, bitcast=True), told.rest, C.SCALED)
    else:
        u, _v = terms(x, told.shift, told.pace, 0.0, F, TRAITS, C.VECTOR == 8, False)
        p = u * told.inverse
    columns = columns_of(first, x.shape[0], C)
    gl.store(work.p + row * work.N + columns, p.to(work.p.dtype.element_ty), mask=columns < work.N)


@gluon.jit
def tell_chunk(work, row, i, after, told, C: gl.constexpr):
    """A held chunk, in whose place that of the row `after` is called."""
    x = chunk(work, i, C)
    call_chunk(work, after, i, C)
    tell(x, work, row, i * C.CHUNK, told, C)


@gluon.jit
def tell_quarter(work, row, i: gl.constexpr, later, next: gl.constexpr, told, C: gl.constexpr):
    """A quarter, in whose place the `next` one of a `later` row is called."""
    x = quarter(work, i, C)
    call_quarter(work, later, next, C)
    tell(x, work, row, C.HELD * C.CHUNK + i * (C.CHUNK // 2), told, C)


@gluon.jit
def tell_row(work, row, after, told, C: gl.constexpr):
    """All weights of a row; the one that comes `after` it is called meanwhile."""
    tell_quarter(work, row, 2, row, 0, told, C)
    tell_quarter(work, row, 3, row, 1, told, C)
    for i in range(2):
        tell_chunk(work, row, i, after, told, C)
    async_copy.wait_group(3)
    tell_quarter(work, row, 0, after, 0, told, C)
    async_copy.wait_group(3)
    tell_quarter(work, row, 1, after, 1, told, C)
    for i in range(2, C.HELD):
        tell_chunk(work, row, i, after, told, C)


@gluon.jit
def call_row(work, row, C: gl.constexpr):
    """The first copies of a row, in the order in which `tell_row` calls them."""
    for i in range(2):
        call_chunk(work, row, i, C)
    call_quarter(work, row, 0, C)
    call_quarter(work, row, 1, C)
    for i in range(2, C.HELD):
        call_chunk(work, row, i, C)


@gluon.jit
def read(work, row, first, C: gl.constexpr):
    """Scores of an odd row, from the cache."""
    columns = columns_of(first, C.CHUNK, C)
    x = gl.load(work.s + row * work.N + columns, mask=columns < work.N, other=float("-inf"))
    return x.to(gl.float32)


@gluon.jit
def sum_again(work, row, shift, pace, C: gl.constexpr):
    """z of an odd row in the frame of its shift."""
    z = shift.to(gl.float64) * 0.0
    if not C.QUICK:
        z = z.to(gl.float32)
    for first in range(0, work.N, C.CHUNK):
        _u, v = carefully(read(work, row, first, C), shift, pace, work.scale, C)
        z += gl.sum(v, 0)
    return z


@gluon.jit
def tell_again(work, row, shift, pace, inverse, C: gl.constexpr):
    """The weights of an odd row."""
    for first in range(0, work.N, C.CHUNK):
        u, _v = carefully(read(work, row, first, C), shift, pace, work.scale, C)
        columns = columns_of(first, C.CHUNK, C)
        gl.store(work.p + row * work.N + columns, (u * inverse).to(work.p.dtype.element_ty), mask=columns < work.N)


@gluon.jit
def forward_overlong(s, p, state, R, N, scale: gl.float64, C: gl.constexpr):
    """Every num_programs-th row; the scale is not faint."""
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    HALF: gl.constexpr = C.VECTOR == 8
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    held = gl.allocate_shared_memory(s.dtype.element_ty, [C.HELD, C.CHUNK], PLAIN)
    pair = gl.allocate_shared_memory(s.dtype.element_ty, [2, C.CHUNK // 2], PLAIN)
    work = Work(held, pair, s, p, R, N, scale)
    slow = scale.to(gl.float32)
    stagger(C.PHASES)
    call_row(work, gl.program_id(0), C)
    for at in range(gl.program_id(0), R, gl.num_programs(0)):
        row, after = gl.cast(at, gl.int64), at + gl.num_programs(0)
        top, z = sum_row(work, at, C)
        shift = shift_of(finite(top), F)
        pace = suited(top, slow, TRAITS)
        gap = z
        odd = shift * slow < 0.25
        if C.QUICK:
            gap = apart(frame_of(shift, scale), shift, scale)
            z = z * gap
            odd = ((z >= CROWD) & (top < float("inf"))) == 0
        if C.CAREFUL and odd:
            z = sum_again(work, row, shift, pace, C)
            if C.QUICK:
                z = gl.where(top == float("-inf"), 0.0, z + F.rest(silent(shift, scale, F)))
                inverse = gl.where(top < float("inf"), reciprocal(z), float("nan"))
                z = gl.where(top < float("inf"), z, float("nan"))
            else:
                z, inverse = ending(top, z, shift, slow, F, TRAITS, HALF)
            tell_again(work, row, shift, pace, inverse, C)
            call_row(work, after, C)
        else:
            if C.QUICK:
                z = z + F.rest(silent(shift, scale, F))
                near, rest = halves(reciprocal(z) * gap)
                tell_row(work, row, after, Told(shift, pace, near, rest / near), C)
            else:
                z, inverse = ending(top, z, shift, slow, F, TRAITS, HALF)
                tell_row(work, row, after, Told(shift, pace, inverse, inverse), C)
        gl.store(state + row, shift)
        gl.store(state + R + row, z.to(gl.float32))
    async_copy.wait_group(0)
