"""Long rows of the ratio family: one program per multiprocessor, rows pass through its shared memory in a ring.

A row comes in chunks. While it is summed, the first chunks of the next one are on their way into what the ring holds
beyond a row; as each chunk is told, the place it leaves is filled anew. So the memory never waits for arithmetic, and
no register holds a score. As in `rows_long`, a thread measures its scores from their own maximum. An odd row is summed
again from the ring, and told, with more care. Gluon, Hopper.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from regard.kernels.rows_exact import exponentials, halves, reciprocal, silent
from regard.kernels.rows_long import fall_of
from regard.kernels.rows_online import ending
from regard.kernels.rows_quick import CROWD, FAR, LN2_REST, apart, frame_of, term, weight
from regard.kernels.rows_terms import shift_of, suited, terms
from regard.kernels.rows_tiles import finite, larger

# Triton 3.9, 3.6
copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


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
def stagger(PHASES: gl.constexpr):
    """Begin up to PHASES/2 µs later than the first programs: if all summed at once, the memory would idle so long."""
    if PHASES > 1:
        pause = gl.program_id(0) % PHASES * 500  # ns
        gl.inline_asm_elementwise("nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [pause], gl.int32, False, 1)


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
def wide(x):
    """A number per thread, [LANES], against a tile [K, LANES, VECTOR]."""
    return gl.expand_dims(gl.expand_dims(x, 0), 2)


@gluon.jit
def summed(x, own, scale, C: gl.constexpr):
    """Σv of a chunk in each thread's own frame, [LANES]."""
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    shift = shift_of(finite(own), F)
    if C.QUICK:
        z = gl.sum(gl.sum(term(x, frame_of(wide(shift), scale), C.SCALED), 2).to(gl.float64), 0)
        z = gl.where(gl.abs(frame_of(shift, scale).m) < FAR, z, float("nan"))
    else:
        pace = suited(own, scale.to(gl.float32) + finite(own) * 0.0, TRAITS)
        _u, v = terms(x, wide(shift), wide(pace), 0.0, F, TRAITS, C.VECTOR == 8, False)
        z = gl.sum(gl.sum(v, 2), 0)
    return z


@gluon.jit
def fall(before, own, scale, C: gl.constexpr):
    """What terms are multiplied by as the maximum rises from `before` to `own`."""
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    if C.QUICK:
        m = frame_of(shift_of(finite(before), F), scale).m - frame_of(shift_of(finite(own), F), scale).m
        power = ((gl.maximum(m, -127.0).to(gl.int32) + 127) << 23).to(gl.float32, bitcast=True)
        factor = gl.where(before == float("-inf"), 0.0, power).to(gl.float64) * (1.0 - m.to(gl.float64) * LN2_REST)
    else:
        factor = fall_of(before, own, scale.to(gl.float32), F, TRAITS)
    return factor


@gluon.jit
def sum_row(work, slot, C: gl.constexpr):
    """(top, z) of the row that begins at a slot of the ring, its chunks taken as they come."""
    LANES: gl.constexpr = 32 * gl.num_warps()
    CHUNKS: gl.constexpr = C.CHUNKS
    for i in gl.static_range(CHUNKS):
        async_copy.wait_group(C.SLOTS - 1 - i)
        x = scores(work, slot, work.lanes + i * C.CHUNK, C)
        x = gl.reshape(x, [C.CHUNK // (LANES * C.VECTOR), LANES, C.VECTOR])
        most = gl.reduce(gl.reduce(x, 2, larger), 0, larger)  # [LANES]
        if i == 0:
            own = most
            sums = summed(x, own, work.scale, C)
        else:
            before = own
            own = larger(own, most)
            more = summed(x, own, work.scale, C)
            sums = sums * fall(before, own, work.scale, C) + more
        slot = after(slot, C)
    top = gl.reduce(own, 0, larger)
    return top, gl.sum(sums * fall(own, top, work.scale, C), 0)


@gluon.jit
def carefully(x, shift, pace, scale, C: gl.constexpr):
    """(u, v) of an odd row."""
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    if C.QUICK:
        u = exponentials(x, shift, scale, False)
        v = u
    else:
        u, v = terms(x, shift, pace, 0.0, F, TRAITS, C.VECTOR == 8, True)
    return u, v


@gluon.jit
def sum_again(work, slot, shift, pace, C: gl.constexpr):
    """z of an odd row in the frame of its shift; all of its chunks are there."""
    z = shift.to(gl.float64) * 0.0
    if not C.QUICK:
        z = z.to(gl.float32)
    for i in range(C.CHUNKS):
        x = scores(work, slot, work.lanes + i * C.CHUNK, C)
        _u, v = carefully(x, shift, pace, work.scale, C)
        z += gl.sum(v, 0)
        slot = after(slot, C)
    return z


@gluon.jit
def tell_again(work, row, slot, coming, shift, pace, inverse, C: gl.constexpr):
    """The weights of an odd row; chunks to come are called into the places of those that are told."""
    for i in range(C.CHUNKS):
        columns = work.lanes + i * C.CHUNK
        u, _v = carefully(scores(work, slot, columns, C), shift, pace, work.scale, C)
        told = (u * inverse).to(work.p.dtype.element_ty)
        gl.store(work.p + row * work.N + columns, told, mask=columns < work.N)
        call(work, coming, slot, C)
        coming += 1
        slot = after(slot, C)
    return slot, coming


@gluon.jit
def tell(work, row, slot, coming, shift, pace, inverse, rest, C: gl.constexpr):
    """The weights of a row; chunks to come are called into the places of those that are told."""
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    CHUNKS: gl.constexpr = C.CHUNKS
    for i in gl.static_range(CHUNKS):
        columns = work.lanes + i * C.CHUNK
        x = scores(work, slot, columns, C)
        if C.QUICK:
            told = weight(x, frame_of(shift, work.scale), inverse.to(gl.int32, bitcast=True), rest, C.SCALED)
        else:
            u, _v = terms(x, shift, pace, 0.0, F, TRAITS, C.VECTOR == 8, False)
            told = u * inverse
        gl.store(work.p + row * work.N + columns, told.to(work.p.dtype.element_ty), mask=columns < work.N)
        call(work, coming, slot, C)
        coming += 1
        slot = after(slot, C)
    return slot, coming


@gluon.jit
def forward_ring(s, p, state, R, N, scale: gl.float64, C: gl.constexpr):
    """Every num_programs-th row; the scale is not faint."""
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    HALF: gl.constexpr = C.VECTOR == 8
    layout: gl.constexpr = gl.BlockedLayout([C.VECTOR], [32], [gl.num_warps()], [0])
    ring = gl.allocate_shared_memory(s.dtype.element_ty, [C.SLOTS, C.CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    lanes = gl.arange(0, C.CHUNK, layout)
    work = Work(ring, s, p, R, N, lanes, scale)
    slow = scale.to(gl.float32)
    SLOTS: gl.constexpr = C.SLOTS
    stagger(C.PHASES)
    for chunk in gl.static_range(SLOTS):
        call(work, chunk, chunk, C)
    coming = gl.to_tensor(C.SLOTS)  # the next chunk to call
    slot = gl.to_tensor(0)
    for at in range(gl.program_id(0), R, gl.num_programs(0)):
        row = gl.cast(at, gl.int64)
        top, z = sum_row(work, slot, C)
        shift = shift_of(finite(top), F)
        pace = suited(top, slow, TRAITS)
        gap = z
        odd = shift * slow < 0.25
        if C.QUICK:
            gap = apart(frame_of(shift, scale), shift, scale)
            z = z * gap
            odd = ((z >= CROWD) & (top < float("inf"))) == 0
        if C.CAREFUL and odd:
            z = sum_again(work, slot, shift, pace, C)
            if C.QUICK:
                z = gl.where(top == float("-inf"), 0.0, z + F.rest(silent(shift, scale, F)))
                inverse = gl.where(top < float("inf"), reciprocal(z), float("nan"))
                z = gl.where(top < float("inf"), z, float("nan"))
            else:
                z, inverse = ending(top, z, shift, slow, F, TRAITS, HALF)
            slot, coming = tell_again(work, row, slot, coming, shift, pace, inverse, C)
        else:
            if C.QUICK:
                z = z + F.rest(silent(shift, scale, F))
                near, rest = halves(reciprocal(z) * gap)
                slot, coming = tell(work, row, slot, coming, shift, pace, near, rest / near, C)
            else:
                z, inverse = ending(top, z, shift, slow, F, TRAITS, HALF)
                slot, coming = tell(work, row, slot, coming, shift, pace, inverse, inverse, C)
        gl.store(state + row, shift)
        gl.store(state + R + row, z.to(gl.float32))
    async_copy.wait_group(0)
