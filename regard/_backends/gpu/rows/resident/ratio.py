"""Resident kernel of the ratio family for rows that the ring buffer does not hold (`buffers.py`).

A program takes row after row:

    sum      a, b, the held chunks, c, d      a and b stay in registers, c and d follow into their buffers
    store    c, d, the held chunks, a, b      and the next row is copied into each buffer that is free

An imprecise row is read again from the cache and computed by slower formulas. Gluon, Hopper.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from regard._backends.gpu.rows.resident.buffers import (
    allocate_buffers,
    columns_from,
    copy_row,
    reduce_row,
    stagger,
    store_columns,
    store_row,
)
from regard._backends.gpu.rows.resident.ratio_sums import (
    add_scores,
    careful_terms,
    finish_careful,
    finish_row,
    merge_threads,
    weigh,
    zero_sum,
)


@gluon.jit
def accumulate(x, state, scale, FIRST: gl.constexpr, C: gl.constexpr):
    """Adds scores to the threads' (maxima, sums), for `reduce_row`."""
    own, sums = state
    return add_scores(x, own, sums, scale, FIRST, C)


@gluon.jit
def load_again(work, row, first, C: gl.constexpr):
    """Loads scores of an imprecise row from the cache."""
    columns = columns_from(first, C.CHUNK, C)
    x = gl.load(work.s + row * work.N + columns, mask=columns < work.N, other=float("-inf"))
    return x.to(gl.float32)


@gluon.jit
def sum_again(work, row, total, scale, C: gl.constexpr):
    """z of an imprecise row."""
    z = zero_sum(total, C)
    for first in range(0, work.N, C.CHUNK):
        _u, v = careful_terms(load_again(work, row, first, C), total, scale, C)
        z += gl.sum(v, 0)
    return z


@gluon.jit
def store_again(work, row, total, inverse, scale, C: gl.constexpr):
    """Stores the weights of an imprecise row."""
    for first in range(0, work.N, C.CHUNK):
        u, _v = careful_terms(load_again(work, row, first, C), total, scale, C)
        store_columns(u * inverse, work, row, first, C)


@gluon.jit
def forward_resident_ratio(s, p, state, R, N, scale: gl.float64, theta: gl.float64, C: gl.constexpr):
    """Weights of every num_programs-th row."""
    work = allocate_buffers(s, p, R, N, C)
    stagger(C.PHASES)
    copy_row(work, gl.program_id(0), C)
    for at in range(gl.program_id(0), R, gl.num_programs(0)):
        row, after = gl.cast(at, gl.int64), at + gl.num_programs(0)
        sums, a, b = reduce_row(work, at, accumulate, (0, 0), scale, C)
        total = merge_threads(sums[0], sums[1], scale, C)
        if C.CAREFUL and total.imprecise:
            z, inverse = finish_careful(total, sum_again(work, row, total, scale, C), scale, C)
            store_again(work, row, total, inverse, scale, C)
            copy_row(work, after, C)
        else:
            z, factors = finish_row(total, scale, C)
            store_row(work, row, a, b, after, weigh, factors, C)
        gl.store(state + row, total.shift)
        gl.store(state + R + row, z.to(gl.float32))
    async_copy.wait_group(0)
