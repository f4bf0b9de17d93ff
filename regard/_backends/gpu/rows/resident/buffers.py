"""A row in the places of one multiprocessor: chunks in shared memory, each in its own, and four quarters in two.

The last two chunks of a row come as quarters a, b, c, d. a and b are taken into registers as they come, and c and d are
called into the places that they leave: 224 KB of shared memory and 32 KB of registers hold a row of 256 KB. Shorter
rows are cut finer, and several programs share a multiprocessor. Gluon.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Triton 3.9, 3.6
copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


class Places(NamedTuple):
    """A program's rows and where they lie; what it is compiled for has CHUNK, HELD, VECTOR and EVEN."""

    held: Any  # [HELD, CHUNK] in shared memory
    pair: Any  # [2, CHUNK / 2]
    s: Any
    p: Any
    R: Any
    N: Any


@gluon.jit
def stagger(PHASES: gl.constexpr):
    """Begin up to PHASES/2 µs later than the first programs: if all summed at once, the memory would idle so long."""
    if PHASES > 1:
        pause = gl.program_id(0) % PHASES * 500  # ns
        gl.inline_asm_elementwise("nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [pause], gl.int32, False, 1)


@gluon.jit
def places_of(s, p, R, N, C: gl.constexpr):
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    held = gl.allocate_shared_memory(s.dtype.element_ty, [C.HELD, C.CHUNK], PLAIN)
    pair = gl.allocate_shared_memory(s.dtype.element_ty, [2, C.CHUNK // 2], PLAIN)
    return Places(held, pair, s, p, R, N)


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
    call(work, row, work.pair.index(i % 2), first_of(i, C), C.CHUNK // 2, C)


@gluon.jit
def numbers(work, place, first, COUNT: gl.constexpr, outside, C: gl.constexpr):
    columns = columns_of(first, COUNT, C)
    x = place.load(columns.type.layout).to(gl.float32)
    if not C.EVEN:
        x = gl.where(columns < work.N, x, outside)
    return x


@gluon.jit
def chunk(work, i, C: gl.constexpr, outside=float("-inf")):
    return numbers(work, work.held.index(i), i * C.CHUNK, C.CHUNK, outside, C)


@gluon.jit
def quarter(work, i: gl.constexpr, C: gl.constexpr, outside=float("-inf")):
    return numbers(work, work.pair.index(i % 2), first_of(i, C), C.CHUNK // 2, outside, C)


@gluon.jit
def first_of(i: gl.constexpr, C: gl.constexpr):
    """The first column of a quarter."""
    return C.HELD * C.CHUNK + i * (C.CHUNK // 2)


@gluon.jit
def call_row(work, row, C: gl.constexpr):
    """The copies of a row but those of c and d, which wait for a and b: in the order in which they are waited for."""
    call_quarter(work, row, 0, C)
    call_quarter(work, row, 1, C)
    for i in range(C.HELD):
        call_chunk(work, row, i, C)


@gluon.jit
def by_lane(x, C: gl.constexpr):
    """[COUNT] as [K, LANES, VECTOR]: lane by lane, what one thread has."""
    LANES: gl.constexpr = 32 * gl.num_warps()
    return gl.reshape(x, [x.shape[0] // (LANES * C.VECTOR), LANES, C.VECTOR])


@gluon.jit
def tell(p, work, row, first, C: gl.constexpr):
    """Store results of some columns."""
    columns = columns_of(first, p.shape[0], C)
    gl.store(work.p + row * work.N + columns, p.to(work.p.dtype.element_ty), mask=columns < work.N)


@gluon.jit
def taken_in(work, row, more: gl.constexpr, state, fixed, C: gl.constexpr):
    """(state, a, b) after every score of a row, as they come: state = more(x, state, fixed, is it the first?, C).

    The waits count the copies that were called after the one waited for.
    """
    async_copy.wait_group(C.HELD + 1)
    a = quarter(work, 0, C)
    call_quarter(work, row, 2, C)
    state = more(a, state, fixed, True, C)
    async_copy.wait_group(C.HELD + 1)
    b = quarter(work, 1, C)
    call_quarter(work, row, 3, C)
    state = more(b, state, fixed, False, C)
    for i in range(C.HELD):
        async_copy.wait_group(C.HELD + 1)
        state = more(chunk(work, i, C), state, fixed, False, C)
        async_copy.commit_group()  # of nothing, so that the waits may count alike
    async_copy.wait_group(C.HELD + 1)
    state = more(quarter(work, 2, C), state, fixed, False, C)
    async_copy.wait_group(C.HELD)
    state = more(quarter(work, 3, C), state, fixed, False, C)
    return state, a, b


@gluon.jit
def told_all(work, row, a, b, after, weigh: gl.constexpr, told, C: gl.constexpr):
    """weigh(x, told, C) of all of a row; the one that comes `after` it is called into the places that are left."""
    c = quarter(work, 2, C)
    call_quarter(work, after, 0, C)
    tell(weigh(c, told, C), work, row, first_of(2, C), C)
    d = quarter(work, 3, C)
    call_quarter(work, after, 1, C)
    tell(weigh(d, told, C), work, row, first_of(3, C), C)
    for i in range(C.HELD):
        x = chunk(work, i, C)
        call_chunk(work, after, i, C)
        tell(weigh(x, told, C), work, row, i * C.CHUNK, C)
    tell(weigh(a, told, C), work, row, first_of(0, C), C)
    tell(weigh(b, told, C), work, row, first_of(1, C), C)
