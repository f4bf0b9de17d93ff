"""Resident kernel of the ratio family whose rows pass through a ring buffer in shared memory.

One program per SM takes row after row, in chunks. While a row is summed, the first chunks of the next one are copied
into what the ring buffer holds beyond a row; as the weights of a chunk are stored, its slot is filled anew. So the
memory never waits for arithmetic, and no register holds a score. An imprecise row is computed again, by slower
formulas, from the ring buffer. Gluon, Hopper.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from regard._backends.gpu.rows.resident.buffers import columns_from, copy_columns, load_buffer, stagger
from regard._backends.gpu.rows.resident.ratio_sums import (
    add_scores,
    careful_terms,
    finish_careful,
    finish_row,
    merge_threads,
    weigh,
    zero_sum,
)

SLOTS = gl.constexpr(6)  # chunks in the ring buffer; a row has at most 4, so half of the next one fits


class Work(NamedTuple):
    """A program's ring buffer, and the tensors that its rows are read from and written to."""

    ring: Any
    s: Any
    p: Any
    R: Any
    N: Any
    lanes: Any  # [CHUNK]
    scale: Any  # float64


@gluon.jit
def copy_chunk(work, chunk, slot, C: gl.constexpr):
    """Starts the copy of the program's chunk number `chunk` into a slot."""
    row = gl.program_id(0) + chunk // C.CHUNKS * gl.num_programs(0)
    copy_columns(work, row, work.ring.index(slot), work.lanes + chunk % C.CHUNKS * C.CHUNK)


@gluon.jit
def next_slot(slot):
    """The slot after a slot."""
    return gl.where(slot == SLOTS - 1, 0, slot + 1)


@gluon.jit
def load_chunk(work, slot, i, C: gl.constexpr):
    """Loads chunk i of a row from a slot."""
    return load_buffer(work.ring.index(slot), work.lanes + i * C.CHUNK, work.N, float("-inf"), C)


@gluon.jit
def sum_row(work, slot, C: gl.constexpr):
    """Sums the row that begins at a slot, its chunks as they arrive."""
    CHUNKS: gl.constexpr = C.CHUNKS
    own, sums = 0, 0
    for i in gl.static_range(CHUNKS):
        async_copy.wait_group(SLOTS - 1 - i)
        own, sums = add_scores(load_chunk(work, slot, i, C), own, sums, work.scale, i == 0, C)
        slot = next_slot(slot)
    return merge_threads(own, sums, work.scale, C)


@gluon.jit
def sum_again(work, total, slot, C: gl.constexpr):
    """z of an imprecise row."""
    z = zero_sum(total, C)
    for i in range(C.CHUNKS):
        _u, v = careful_terms(load_chunk(work, slot, i, C), total, work.scale, C)
        z += gl.sum(v, 0)
        slot = next_slot(slot)
    return z


@gluon.jit
def replace_chunk(p, work, row, i, slot, coming, C: gl.constexpr):
    """Stores the weights of chunk i of a row, and starts the copy of chunk number `coming` into its slot."""
    columns = work.lanes + i * C.CHUNK
    gl.store(work.p + row * work.N + columns, p.to(work.p.dtype.element_ty), mask=columns < work.N)
    copy_chunk(work, coming, slot, C)
    return next_slot(slot), coming + 1


@gluon.jit
def store_again(work, row, slot, coming, total, inverse, C: gl.constexpr):
    """Stores the weights of an imprecise row."""
    for i in range(C.CHUNKS):
        u, _v = careful_terms(load_chunk(work, slot, i, C), total, work.scale, C)
        slot, coming = replace_chunk(u * inverse, work, row, i, slot, coming, C)
    return slot, coming


@gluon.jit
def store_weights(work, row, slot, coming, factors, C: gl.constexpr):
    """Stores the weights of a row."""
    CHUNKS: gl.constexpr = C.CHUNKS
    for i in gl.static_range(CHUNKS):
        p = weigh(load_chunk(work, slot, i, C), factors, C)
        slot, coming = replace_chunk(p, work, row, i, slot, coming, C)
    return slot, coming


@gluon.jit
def forward_ring(s, p, state, R, N, scale: gl.float64, theta: gl.float64, C: gl.constexpr):
    """Weights of every num_programs-th row."""
    ring = gl.allocate_shared_memory(s.dtype.element_ty, [SLOTS, C.CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    work = Work(ring, s, p, R, N, columns_from(0, C.CHUNK, C), scale)
    stagger(C.PHASES)
    for chunk in gl.static_range(SLOTS):
        copy_chunk(work, chunk, chunk, C)
    coming = gl.to_tensor(SLOTS)  # the next chunk to copy
    slot = gl.to_tensor(0)
    for at in range(gl.program_id(0), R, gl.num_programs(0)):
        row = gl.cast(at, gl.int64)
        total = sum_row(work, slot, C)
        if C.CAREFUL and total.imprecise:
            z, inverse = finish_careful(total, sum_again(work, total, slot, C), scale, C)
            slot, coming = store_again(work, row, slot, coming, total, inverse, C)
        else:
            z, factors = finish_row(total, scale, C)
            slot, coming = store_weights(work, row, slot, coming, factors, C)
        gl.store(state + row, total.shift)
        gl.store(state + R + row, z.to(gl.float32))
    async_copy.wait_group(0)
