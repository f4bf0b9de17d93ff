"""The ring of shared memory between the warp that fetches and the warpgroups that consume, on Hopper, in Gluon.

Tiles of keys are walked from the last to the first, so that the one which a row sees in part comes first and alone
carries masking code; where all rows see all keys they begin with the tile around the rows themselves, on whose two
sides distances have different signs. After the tiles may come the keys' forms (`moments`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from regard._backends.gpu.attention.hopper.warpgroup import ROWS

copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


class Shape(NamedTuple):
    """What the kernel is compiled for; names as in `tiles.Config`."""

    F: Any
    NEED: Any
    BEHIND: bool
    D: int
    BM: int
    BN: int
    PARTS: int  # warpgroups
    STAGES: int  # of the ring
    REGISTERS: int  # of a thread
    PIECES: int  # of a tile: 1, 2 or 4
    OWN: bool  # is the tile around the rows themselves the first?
    AHEAD: bool  # does a program take many blocks of queries, and fetch the next one's tiles while one ends?
    FORMS: int  # tiles of the ring that the keys' forms take
    SPAN: int  # Σy and Σy² of the keys before the last multiple of it come from `moments`; −1: all, 0: none
    LAZY: float  # powers of two by which a score may exceed its shift
    STILL: bool  # does the shift stay where the first tile set it? Rows that outgrow it are marked
    ACC: Any


class Ring(NamedTuple):
    """Shared memory and its barriers: the copy engine sets `full`, the warpgroups `free`."""

    q: Any  # [PARTS, 1, 1, 64, D], where a program takes many blocks twice as many, for those by turns
    k: Any  # [STAGES, 1, 1, N, D]
    v: Any  # [STAGES, 1, 1, N, D]
    q_full: Any
    q_free: Any
    k_full: Any
    v_full: Any
    free: Any  # by step t: the keys of tile t and the values of tile t − 1


class Walk(NamedTuple):
    """A block of queries, from i0 on, and the tiles they see: steps base, base + 1, … of the program."""

    round: Any
    b: Any
    h: Any
    i0: Any
    count: Any
    before: Any  # keys whose moments come from their forms
    base: Any
    end: Any


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    ring = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(N):
        mbarrier.init(ring.index(at), count=COUNT)
    return ring


@gluon.jit
def number_of(round, opt, C: gl.constexpr):
    """The block of queries that this program takes in a round."""
    number = round * gl.num_programs(0) + gl.program_id(0)
    if C.AHEAD and C.BEHIND:  # long and short rows by turns, of two heads at a time
        row = gl.cdiv(opt.queries, C.BM)
        pair = round // 2 * gl.num_programs(0) + gl.program_id(0)
        place = gl.where(round % 2 == 0, pair % row, 2 * row - 1 - pair % row)
        number = (pair // row * 2 + place % 2) * row + place // 2
    return number


@gluon.jit
def rounds_of(blocks, C: gl.constexpr):
    """How many blocks of queries this program takes."""
    each = 2 if C.BEHIND else 1
    blocks = blocks // each
    programs = gl.num_programs(0)
    return each * (blocks // programs + gl.where(gl.program_id(0) < blocks % programs, 1, 0))


@gluon.jit
def walk_of(round, base, opt, C: gl.constexpr):
    row = gl.cdiv(opt.queries, C.BM)
    number = number_of(round, opt, C)
    i0 = (row - 1 - number % row) * C.BM  # the longest causal rows first
    count = gl.cdiv(opt.keys, C.BN)
    before = 0
    if C.BEHIND:
        count = gl.minimum(count, gl.cdiv(i0 + C.BM, C.BN))
    if C.SPAN > 0:
        before = gl.minimum(i0, opt.keys) // C.SPAN * C.SPAN
    head = number // row
    return Walk(round, head // opt.heads, head % opt.heads, i0, count, before, base, base + count)


@gluon.jit
def start_of(t, walk, C: gl.constexpr):
    """The first key of the tile of step t: from the last tile, or the rows' own one, down, and around."""
    tile = walk.end - 1 - t
    if C.OWN:
        tile = gl.minimum(walk.i0 // C.BN, walk.count - 1) + walk.base - t
        tile = gl.where(tile < 0, tile + walk.count, tile)
    return tile * C.BN


@gluon.jit
def form_of(walk, opt, C: gl.constexpr):
    """Which of the forms: the key head, and the part of the keys where it ends."""
    part = 0
    if C.SPAN > 0:
        part = gl.maximum(walk.before // C.SPAN - 1, 0)
    return walk.b * (opt.heads // opt.group) + walk.h // opt.group, part


@gluon.jit
def fetch(q_blocks, k_blocks, v_blocks, form_blocks, ring, opt, blocks, C: gl.constexpr):
    if C.AHEAD:
        base = 0
        for round in range(rounds_of(blocks, C)):
            walk = walk_of(round, base, opt, C)
            fetch_block(q_blocks, k_blocks, v_blocks, form_blocks, ring, walk, opt, C)
            base = walk.end + C.FORMS
    else:
        fetch_block(q_blocks, k_blocks, v_blocks, form_blocks, ring, walk_of(0, 0, opt, C), opt, C)


@gluon.jit
def fetch_block(q_blocks, k_blocks, v_blocks, form_blocks, ring, walk, opt, C: gl.constexpr):
    PARTS: gl.constexpr = C.PARTS
    FORMS: gl.constexpr = C.FORMS
    g = walk.h // opt.group
    for part in gl.static_range(PARTS):
        at = walk.round % 2 * PARTS + part
        if C.AHEAD:
            mbarrier.wait(ring.q_free.index(at), ((walk.round // 2) & 1) ^ 1)
        mbarrier.expect(ring.q_full.index(at), ROWS * C.D * 2)
        copy_in(q_blocks, [walk.b, walk.h, walk.i0 + part * ROWS, 0], ring.q_full.index(at), ring.q.index(at))
    for t in range(walk.base, walk.end):
        stage, next_stage = t % C.STAGES, (t + 1) % C.STAGES
        start = start_of(t, walk, C)
        mbarrier.wait(ring.free.index(stage), ((t // C.STAGES) & 1) ^ 1)
        mbarrier.expect(ring.k_full.index(stage), C.BN * C.D * 2)
        copy_in(k_blocks, [walk.b, g, start, 0], ring.k_full.index(stage), ring.k.index(stage))
        mbarrier.wait(ring.free.index(next_stage), (((t + 1) // C.STAGES) & 1) ^ 1)
        mbarrier.expect(ring.v_full.index(stage), C.BN * C.D * 2)
        copy_in(v_blocks, [walk.b, g, start, 0], ring.v_full.index(stage), ring.v.index(stage))
    for c in gl.static_range(FORMS):
        t = walk.end + c
        stage, next_stage = t % C.STAGES, (t + 1) % C.STAGES
        head, part = form_of(walk, opt, C)
        mbarrier.wait(ring.free.index(stage), ((t // C.STAGES) & 1) ^ 1)
        mbarrier.expect(ring.k_full.index(stage), C.BN * C.D * 2)
        copy_in(form_blocks, [head, part, c * C.BN, 0], ring.k_full.index(stage), ring.k.index(stage))
        mbarrier.wait(ring.free.index(next_stage), (((t + 1) // C.STAGES) & 1) ^ 1)
        mbarrier.arrive(ring.v_full.index(stage), count=1)  # without values


@gluon.jit
def ready(t, ring, walk, C: gl.constexpr):
    """Wait for the keys of tile t."""
    mbarrier.wait(ring.k_full.index(t % C.STAGES), (t // C.STAGES) & 1, pred=t < walk.end)


@gluon.jit
def pass_by(begin, end, ring, C: gl.constexpr):
    """Give back the first tiles, which only later warpgroups see."""
    for t in range(begin, end):
        stage, phase = t % C.STAGES, (t // C.STAGES) & 1
        mbarrier.wait(ring.k_full.index(stage), phase)
        mbarrier.wait(ring.v_full.index(stage), phase)
        mbarrier.arrive(ring.free.index(stage), count=1)
