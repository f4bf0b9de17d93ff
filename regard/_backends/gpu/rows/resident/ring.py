"""Long rows of the ratio family: one program per multiprocessor, rows pass through its shared memory in a ring.

A row comes in chunks. While it is summed, the first chunks of the next one are on their way into what the ring holds
beyond a row; as each chunk is told, the place it leaves is filled anew. So the memory never waits for arithmetic, and
no register holds a score. An odd row is summed again from the ring, and told, with more care. Gluon, Hopper.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from regard._backends.gpu.rows.resident.buffers import copy, stagger
from regard._backends.gpu.rows.resident.ratio import (
    added,
    carefully,
    ended,
    ended_carefully,
    met,
    nothing_yet,
    weights,
)


class Ring(NamedTuple):
    """What the kernel is compiled for."""

    F: Any
    TRAITS: Any
    CHUNK: int  # columns
    CHUNKS: int  # of a row
    SLOTS: int  # chunks that the ring holds
    VECTOR: int  # numbers in 16 bytes
    EVEN: bool  # the row fills its chunks
    SCALED: bool  # the scale is not 1
    QUICK: bool  # float32 softmax: `rows_quick`
    CAREFUL: bool  # rows may be odd
    PHASES: int  # of the programs: `stagger`


class Work(NamedTuple):
    """A program's rows and where they lie."""

    ring: Any
    s: Any
    p: Any
    R: Any
    N: Any
    lanes: Any  # [CHUNK]
    scale: Any  # float64


@gluon.jit
def call(work, chunk, slot, C: gl.constexpr):
    """Have the program's chunk number `chunk` copied into a slot of the ring."""
    row = gl.program_id(0) + chunk // C.CHUNKS * gl.num_programs(0)
    columns = work.lanes + chunk % C.CHUNKS * C.CHUNK
    inside = (columns < work.N) & (row < work.R)
    copy(work.ring.index(slot), work.s + row.to(gl.int64) * work.N + columns, mask=inside)
    async_copy.commit_group()


@gluon.jit
def after(slot, C: gl.constexpr):
    return gl.where(slot == C.SLOTS - 1, 0, slot + 1)


@gluon.jit
def scores(work, slot, columns, C: gl.constexpr):
    x = work.ring.index(slot).load(work.lanes.type.layout).to(gl.float32)
    if not C.EVEN:
        x = gl.where(columns < work.N, x, float("-inf"))
    return x


@gluon.jit
def sum_row(work, slot, C: gl.constexpr):
    """The row that begins at a slot of the ring, its chunks taken as they come."""
    CHUNKS: gl.constexpr = C.CHUNKS
    own, sums = 0, 0
    for i in gl.static_range(CHUNKS):
        async_copy.wait_group(C.SLOTS - 1 - i)
        own, sums = added(scores(work, slot, work.lanes + i * C.CHUNK, C), own, sums, work.scale, i == 0, C)
        slot = after(slot, C)
    return met(own, sums, work.scale, C)


@gluon.jit
def sum_again(work, met_row, slot, C: gl.constexpr):
    """z of an odd row; all of its chunks are there."""
    z = nothing_yet(met_row, C)
    for i in range(C.CHUNKS):
        _u, v = carefully(scores(work, slot, work.lanes + i * C.CHUNK, C), met_row, work.scale, C)
        z += gl.sum(v, 0)
        slot = after(slot, C)
    return z


@gluon.jit
def replace(p, work, row, i, slot, coming, C: gl.constexpr):
    """Store the weights of chunk i of a row, and have a chunk to come called into the place that it leaves."""
    columns = work.lanes + i * C.CHUNK
    gl.store(work.p + row * work.N + columns, p.to(work.p.dtype.element_ty), mask=columns < work.N)
    call(work, coming, slot, C)
    return after(slot, C), coming + 1


@gluon.jit
def tell_again(work, row, slot, coming, met_row, inverse, C: gl.constexpr):
    """The weights of an odd row."""
    for i in range(C.CHUNKS):
        u, _v = carefully(scores(work, slot, work.lanes + i * C.CHUNK, C), met_row, work.scale, C)
        slot, coming = replace(u * inverse, work, row, i, slot, coming, C)
    return slot, coming


@gluon.jit
def tell(work, row, slot, coming, told, C: gl.constexpr):
    """The weights of a row."""
    CHUNKS: gl.constexpr = C.CHUNKS
    for i in gl.static_range(CHUNKS):
        p = weights(scores(work, slot, work.lanes + i * C.CHUNK, C), told, C)
        slot, coming = replace(p, work, row, i, slot, coming, C)
    return slot, coming


@gluon.jit
def forward_ring(s, p, state, R, N, scale: gl.float64, C: gl.constexpr):
    """Every num_programs-th row; the scale is not faint."""
    layout: gl.constexpr = gl.BlockedLayout([C.VECTOR], [32], [gl.num_warps()], [0])
    ring = gl.allocate_shared_memory(s.dtype.element_ty, [C.SLOTS, C.CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    lanes = gl.arange(0, C.CHUNK, layout)
    work = Work(ring, s, p, R, N, lanes, scale)
    SLOTS: gl.constexpr = C.SLOTS
    stagger(C.PHASES)
    for chunk in gl.static_range(SLOTS):
        call(work, chunk, chunk, C)
    coming = gl.to_tensor(C.SLOTS)  # the next chunk to call
    slot = gl.to_tensor(0)
    for at in range(gl.program_id(0), R, gl.num_programs(0)):
        row = gl.cast(at, gl.int64)
        this = sum_row(work, slot, C)
        if C.CAREFUL and this.odd:
            z, inverse = ended_carefully(this, sum_again(work, this, slot, C), scale, C)
            slot, coming = tell_again(work, row, slot, coming, this, inverse, C)
        else:
            z, told = ended(this, scale, C)
            slot, coming = tell(work, row, slot, coming, told, C)
        gl.store(state + row, this.shift)
        gl.store(state + R + row, z.to(gl.float32))
    async_copy.wait_group(0)
