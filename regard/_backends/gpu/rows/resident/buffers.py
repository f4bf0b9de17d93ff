"""The shared-memory buffers of a resident row, and the loops that fill and drain them.

All chunks of a row but the last two have their own shared-memory buffer. The last two are split into quarters a, b, c
and d that share two buffers: a and b are moved to registers as they arrive, and c and d follow into their buffers. So
224 KB of shared memory and 32 KB of registers hold a row of 256 KB. Shorter rows have smaller chunks, and several
programs share an SM. Gluon.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from regard._backends.gpu.rows.tiles import nan_maximum

# Triton 3.9, 3.6
copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


class Config(NamedTuple):
    """What a resident kernel is compiled for."""

    F: Any
    TRAITS: Any
    TENSORS: int  # that are read: 1 forward, 2 backward
    TOLERANCE: float  # |Σp − 1| at which the threshold solver stops
    CHUNK: int  # columns; a quarter is half as many
    CHUNKS: int  # of a row
    HELD: int  # chunks with a buffer of their own, CHUNKS − 2
    VECTOR: int  # numbers in 16 bytes
    EVEN: bool  # the row fills its chunks
    SCALED: bool  # FAST, and the scale is not 1
    FAST: bool  # float32 softmax: `fast_exact`
    CAREFUL: bool  # a row may be imprecise, and is then computed again
    PHASES: int  # start times of the programs: `stagger`


class Buffers(NamedTuple):
    """A program's buffers, and the tensors that its rows are read from and written to."""

    held: Any  # [HELD, CHUNK] in shared memory
    pair: Any  # [2, CHUNK / 2]
    s: Any
    p: Any  # what is written, ds backward
    R: Any
    N: Any


class TwoBuffers(NamedTuple):
    """The buffers of dp and of what was saved: p, or s."""

    upstream: Any
    saved: Any


@gluon.jit
def stagger(PHASES: gl.constexpr):
    """Delays programs by up to PHASES/2 µs: if all summed at the same time, the memory would idle meanwhile."""
    if PHASES > 1:
        pause = gl.program_id(0) % PHASES * 500  # ns
        gl.inline_asm_elementwise("nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [pause], gl.int32, False, 1)


@gluon.jit
def allocate_buffers(s, p, R, N, C: gl.constexpr):
    """Allocates the buffers of one row."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    held = gl.allocate_shared_memory(s.dtype.element_ty, [C.HELD, C.CHUNK], PLAIN)
    pair = gl.allocate_shared_memory(s.dtype.element_ty, [2, C.CHUNK // 2], PLAIN)
    return Buffers(held, pair, s, p, R, N)


@gluon.jit
def columns_from(first, COUNT: gl.constexpr, C: gl.constexpr):
    """COUNT columns from `first` on, 16 bytes to a thread at a time."""
    layout: gl.constexpr = gl.BlockedLayout([C.VECTOR], [32], [gl.num_warps()], [0])
    return first + gl.arange(0, COUNT, layout)


@gluon.jit
def copy_columns(work, row, buffer, columns):
    """Starts the copy of some columns of a row into a buffer."""
    inside = (columns < work.N) & (row < work.R)
    copy(buffer, work.s + row.to(gl.int64) * work.N + columns, mask=inside)
    async_copy.commit_group()


@gluon.jit
def copy_chunk(work, row, i, C: gl.constexpr):
    """Starts the copy of chunk i of a row, of both tensors where there are two."""
    columns = columns_from(i * C.CHUNK, C.CHUNK, C)
    if C.TENSORS == 1:
        copy_columns(work, row, work.held.index(i), columns)
    else:
        copy_columns(work.upstream, row, work.upstream.held.index(i), columns)
        copy_columns(work.saved, row, work.saved.held.index(i), columns)


@gluon.jit
def copy_quarter(work, row, i: gl.constexpr, C: gl.constexpr):
    """Starts the copy of quarter i of a row, of both tensors where there are two."""
    columns = columns_from(quarter_start(i, C), C.CHUNK // 2, C)
    if C.TENSORS == 1:
        copy_columns(work, row, work.pair.index(i % 2), columns)
    else:
        copy_columns(work.upstream, row, work.upstream.pair.index(i % 2), columns)
        copy_columns(work.saved, row, work.saved.pair.index(i % 2), columns)


@gluon.jit
def load_buffer(buffer, columns, N, outside, C: gl.constexpr):
    """Loads a buffer as float32; `outside` beyond the end of the row."""
    x = buffer.load(columns.type.layout).to(gl.float32)
    if not C.EVEN:
        x = gl.where(columns < N, x, outside)
    return x


@gluon.jit
def load_pair(upstream, saved, columns, N, C: gl.constexpr):
    """(dp, p or s) from their buffers.

    A score of −inf becomes one so low that its slopes are 0, unless they are at −inf too.
    """
    FROM_SCORES: gl.constexpr = C.F.slope_of_weight is None
    x = load_buffer(saved, columns, N, float("-inf") if FROM_SCORES else 0.0, C)
    if FROM_SCORES and not C.TRAITS.slopes_vanish:
        x = nan_maximum(x, -3e38)
    return load_buffer(upstream, columns, N, 0.0, C), x


@gluon.jit
def load_chunk(work, i, C: gl.constexpr):
    """Loads chunk i: scores, or `load_pair`."""
    columns = columns_from(i * C.CHUNK, C.CHUNK, C)
    if C.TENSORS == 1:
        x = load_buffer(work.held.index(i), columns, work.N, float("-inf"), C)
    else:
        x = load_pair(work.upstream.held.index(i), work.saved.held.index(i), columns, work.saved.N, C)
    return x


@gluon.jit
def load_quarter(work, i: gl.constexpr, C: gl.constexpr):
    """Loads quarter i: scores, or `load_pair`."""
    columns = columns_from(quarter_start(i, C), C.CHUNK // 2, C)
    if C.TENSORS == 1:
        x = load_buffer(work.pair.index(i % 2), columns, work.N, float("-inf"), C)
    else:
        x = load_pair(work.upstream.pair.index(i % 2), work.saved.pair.index(i % 2), columns, work.saved.N, C)
    return x


@gluon.jit
def quarter_start(i: gl.constexpr, C: gl.constexpr):
    """The first column of quarter i."""
    return C.HELD * C.CHUNK + i * (C.CHUNK // 2)


@gluon.jit
def copy_row(work, row, C: gl.constexpr):
    """Starts all copies of a row but c and d, which follow a and b, in the order in which they are waited for."""
    copy_quarter(work, row, 0, C)
    copy_quarter(work, row, 1, C)
    for i in range(C.HELD):
        copy_chunk(work, row, i, C)


@gluon.jit
def by_lane(x, C: gl.constexpr):
    """Reshapes [COUNT] to [K, LANES, VECTOR], where a lane is what one thread holds."""
    LANES: gl.constexpr = 32 * gl.num_warps()
    return gl.reshape(x, [x.shape[0] // (LANES * C.VECTOR), LANES, C.VECTOR])


@gluon.jit
def store_columns(p, work, row, first, C: gl.constexpr):
    """Stores results from a column on."""
    columns = columns_from(first, p.shape[0], C)
    gl.store(work.p + row * work.N + columns, p.to(work.p.dtype.element_ty), mask=columns < work.N)


@gluon.jit
def reduce_row(work, row, accumulate: gl.constexpr, state, fixed, C: gl.constexpr):
    """(state, a, b) after state = accumulate(x, state, fixed, is it the first?, C) of every score as it arrives.

    The waits count the copies that were started after the one waited for.
    """
    async_copy.wait_group(C.TENSORS * (C.HELD + 1))
    a = load_quarter(work, 0, C)
    copy_quarter(work, row, 2, C)
    state = accumulate(a, state, fixed, True, C)
    async_copy.wait_group(C.TENSORS * (C.HELD + 1))
    b = load_quarter(work, 1, C)
    copy_quarter(work, row, 3, C)
    state = accumulate(b, state, fixed, False, C)
    for i in range(C.HELD):
        async_copy.wait_group(C.TENSORS * (C.HELD + 1))
        state = accumulate(load_chunk(work, i, C), state, fixed, False, C)
        async_copy.commit_group()  # an empty one for every tensor, so that every wait counts alike
        if C.TENSORS == 2:
            async_copy.commit_group()
    if C.TENSORS == 1:
        async_copy.wait_group(C.HELD + 1)
    else:
        async_copy.wait_group(2 * C.HELD)  # one barrier fewer: the compiler then keeps c for the gradient
    state = accumulate(load_quarter(work, 2, C), state, fixed, False, C)
    if C.TENSORS == 1:
        async_copy.wait_group(C.HELD)
    state = accumulate(load_quarter(work, 3, C), state, fixed, False, C)
    return state, a, b


@gluon.jit
def store_row(work, row, a, b, after, weigh: gl.constexpr, fixed, C: gl.constexpr):
    """Stores weigh(x, fixed, C) of a whole row, and copies the row `after` it into the buffers as they become free."""
    out = work
    if C.TENSORS == 2:
        out = work.upstream
    c = load_quarter(work, 2, C)
    copy_quarter(work, after, 0, C)
    store_columns(weigh(c, fixed, C), out, row, quarter_start(2, C), C)
    d = load_quarter(work, 3, C)
    copy_quarter(work, after, 1, C)
    store_columns(weigh(d, fixed, C), out, row, quarter_start(3, C), C)
    for i in range(C.HELD):
        x = load_chunk(work, i, C)
        copy_chunk(work, after, i, C)
        store_columns(weigh(x, fixed, C), out, row, i * C.CHUNK, C)
    store_columns(weigh(a, fixed, C), out, row, quarter_start(0, C), C)
    store_columns(weigh(b, fixed, C), out, row, quarter_start(1, C), C)
