"""o = Σ_j u_j·v_j / Z on Hopper, in Gluon: warpgroups of 64 queries each, and a warp that fetches for all.

While one warpgroup weighs its scores, the tensor cores multiply for another, and within a warpgroup q·kᵀ of the next
tile runs beside p·v of the last:

    fetch    k, v → ring of shared memory
    each     s = q·kᵀ (tile t), o += p·v (tile t − 1)         the latter in pieces,
             u of s, sums                                     between which a piece of s each is weighed
             o ·= fade, p = u                                 once its own p·v is done

A warpgroup stands still while it hands over a product that the tensor cores cannot take in yet: hence the pieces.

Tiles of keys are walked from the last to the first, so that the one which a row sees in part comes first and alone
carries masking code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from regard.kernels import ptx, statistics, tiles, warpgroup
from regard.kernels.forward_online import ending, frame_of
from regard.kernels.statistics import Sums
from regard.kernels.tiles import LN2, LOG2E
from regard.kernels.warpgroup import ROWS

copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


class Shape(NamedTuple):
    """What the kernel is compiled for; names as in `tiles.Config`."""

    F: Any
    NEED: Any
    SLOT: Any
    SPARSE: bool
    BEHIND: bool
    D: int
    BM: int
    BN: int
    PARTS: int  # warpgroups
    STAGES: int  # of the ring
    REGISTERS: int  # of a thread
    PIECES: int  # of a tile: 1 or 4
    LAZY: float  # powers of two by which a score may exceed its frame
    ACC: Any


class Ring(NamedTuple):
    """Shared memory and its barriers: the copy engine sets `full`, the warpgroups `free`."""

    q: Any  # [PARTS, 1, 1, 64, D]
    k: Any  # [STAGES, 1, 1, N, D]
    v: Any  # [STAGES, 1, 1, N, D]
    q_full: Any
    k_full: Any
    v_full: Any
    free: Any  # by step t: the keys of tile t and the values of tile t − 1


class Walk(NamedTuple):
    """A program's queries, from i0 on, and the number of tiles they see."""

    b: Any
    h: Any
    i0: Any
    count: Any


class Place(NamedTuple):
    """Which rows: what `ending` asks of a scene."""

    b: Any
    h: Any
    i: Any


class Targets(NamedTuple):
    """Where results go."""

    o: Any
    frames: Any
    sums: Any
    stats: Any
    rough: Any  # [4, B, H, M] for `forward_lesser`: top or +inf, Z, Σu·|i − j|, mean y


@gluon.jit
def fetch(q_blocks, k_blocks, v_blocks, ring, walk, group, C: gl.constexpr):
    PARTS: gl.constexpr = C.PARTS
    g = walk.h // group
    for part in gl.static_range(PARTS):
        mbarrier.expect(ring.q_full.index(part), ROWS * C.D * 2)
        copy_in(q_blocks, [walk.b, walk.h, walk.i0 + part * ROWS, 0], ring.q_full.index(part), ring.q.index(part))
    for t in range(walk.count):
        stage, next_stage = t % C.STAGES, (t + 1) % C.STAGES
        start = (walk.count - 1 - t) * C.BN
        mbarrier.wait(ring.free.index(stage), ((t // C.STAGES) & 1) ^ 1)
        mbarrier.expect(ring.k_full.index(stage), C.BN * C.D * 2)
        copy_in(k_blocks, [walk.b, g, start, 0], ring.k_full.index(stage), ring.k.index(stage))
        mbarrier.wait(ring.free.index(next_stage), (((t + 1) // C.STAGES) & 1) ^ 1)
        mbarrier.expect(ring.v_full.index(stage), C.BN * C.D * 2)
        copy_in(v_blocks, [walk.b, g, start, 0], ring.v_full.index(stage), ring.v.index(stage))


@gluon.jit
def ready(t, ring, walk, C: gl.constexpr):
    """Wait for the keys of tile t."""
    mbarrier.wait(ring.k_full.index(t % C.STAGES), (t // C.STAGES) & 1, pred=t < walk.count)


@gluon.jit
def score(t, q, ring, C: gl.constexpr):
    """s = q·kᵀ of tile t, under way."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    keys = ring.k.index(t % C.STAGES).reshape([C.BN, C.D]).permute((1, 0))
    return warpgroup_mma(q, keys, warpgroup.zeros(C.BN, S), use_acc=False, is_async=True)


@gluon.jit
def mix(c: gl.constexpr, o, p, values, C: gl.constexpr):
    """o + p·v of piece c, under way."""
    WIDTH: gl.constexpr = C.BN // C.PIECES
    return warpgroup_mma(p[c], values.slice(c * WIDTH, WIDTH), o, is_async=True)


@gluon.jit
def step(t, o, p, r, q, ring, walk, i, last, a, theta, part: gl.constexpr, C: gl.constexpr):
    """Tile t is scored and weighed while o takes tile t − 1."""
    F: gl.constexpr = C.F
    PIECES: gl.constexpr = C.PIECES
    stage, before = t % C.STAGES, (t - 1) % C.STAGES
    s = score(t, q, ring, C)
    mbarrier.wait(ring.v_full.index(before), ((t - 1) // C.STAGES) & 1)
    values = ring.v.index(before).reshape([C.BN, C.D])
    o = mix(0, o, p, values, C)
    s = warpgroup_mma_wait(1, deps=[s])
    start = (walk.count - 1 - t) * C.BN
    fade, r = warpgroup.raised(s, r, a * LOG2E, start, C)
    y = warpgroup.pieces(s, PIECES)
    sums = warpgroup.blank(y[0])
    new = ()
    for c in gl.static_range(PIECES):
        if c + 1 < PIECES:
            o = mix(c + 1, o, p, values, C)
        u, sums = warpgroup.weigh(
            y[c], r, sums, i, last, a, theta, start, walk.i0 + part * ROWS, c * (C.BN // PIECES), C, False
        )
        new = new + (operand(u, ring, C),)  # noqa: RUF005 (Triton knows no star)
    r = warpgroup.pinned(warpgroup.joined(r, sums, i, start, walk.i0 + part * ROWS, C, False))
    ready(t + 1, ring, walk, C)  # before the wait below: its branches, too, keep that wait in its place
    if PIECES == 1:
        o, _ = warpgroup_mma_wait(0, deps=[o, p[0]])
    else:
        o, _, _, _, _ = warpgroup_mma_wait(0, deps=[o, p[0], p[1], p[2], p[3]])
    mbarrier.arrive(ring.free.index(stage), count=1)
    if F.family == "ratio" and F.shift != "none":
        o = ptx.faded(o, fade)
    return o, new, r


@gluon.jit
def operand(u, ring, C: gl.constexpr):
    """Weights in 16 bits, as the tensor cores take them."""
    F: gl.constexpr = C.F
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16]), 2)
    return gl.convert_layout(ptx.rounded(u, ring.v.dtype, F), LAYOUT)


@gluon.jit
def pass_by(count, ring, C: gl.constexpr):
    """Give back the first tiles, which only later warpgroups see."""
    for t in range(count):
        stage, phase = t % C.STAGES, (t // C.STAGES) & 1
        mbarrier.wait(ring.k_full.index(stage), phase)
        mbarrier.wait(ring.v_full.index(stage), phase)
        mbarrier.arrive(ring.free.index(stage), count=1)


@gluon.jit
def consume(targets, ring, walk, opt, part: gl.constexpr, C: gl.constexpr):
    F: gl.constexpr = C.F
    PIECES: gl.constexpr = C.PIECES
    WIDTH: gl.constexpr = C.BN // C.PIECES
    PIECE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    r0 = walk.i0 + part * ROWS
    i = r0 + gl.arange(0, ROWS, gl.SliceLayout(1, PIECE))
    last = i * 0 + opt.keys
    begin = 0
    if C.BEHIND:
        last = gl.minimum(i + 1, last)
        if C.BM > C.BN:
            begin = gl.maximum(walk.count - 1 - r0 // C.BN, 0)
            pass_by(begin, ring, C)
    a = gl.full([ROWS], 1.0, gl.float32, i.type.layout)
    if opt.temperature.ptr is not None:
        a = 1.0 / tiles.rows_of(opt.temperature, walk.b, walk.h, i, i < opt.queries, 1.0).to(gl.float32)
    a = a * tiles.number(opt.scale, gl.float32)
    theta = tiles.number(opt.theta, gl.float32)
    r = warpgroup.nothing(WIDTH, PIECE, F)
    lanes = r.z + gl.expand_dims(gl.convert_layout(a, gl.SliceLayout(1, r.z.type.layout)), 1)
    q = ring.q.index(part).reshape([ROWS, C.D])
    mbarrier.wait(ring.q_full.index(part), 0)
    ready(begin, ring, walk, C)
    s = warpgroup_mma_wait(0, deps=[score(begin, q, ring, C)])
    mbarrier.arrive(ring.free.index(begin % C.STAGES), count=1)
    start = (walk.count - 1 - begin) * C.BN
    s = warpgroup.shown(s, last, start)
    _, r = warpgroup.raised(s, r, lanes * LOG2E, start, C)
    y = warpgroup.pieces(s, PIECES)
    sums = warpgroup.blank(y[0])
    p = ()
    for c in gl.static_range(PIECES):
        u, sums = warpgroup.weigh(y[c], r, sums, i, last, lanes, theta, start, r0, c * WIDTH, C, True)
        p = p + (operand(u, ring, C),)  # noqa: RUF005
    r = warpgroup.joined(r, sums, i, start, r0, C, True)
    o = warpgroup.zeros(C.D, OUT)
    ready(begin + 1, ring, walk, C)
    for t in range(begin + 1, walk.count):
        o, p, r = step(t, o, p, r, q, ring, walk, i, last, lanes, theta, part, C)
    end = walk.count - 1
    mbarrier.wait(ring.v_full.index(end % C.STAGES), (end // C.STAGES) & 1)
    values = ring.v.index(end % C.STAGES).reshape([C.BN, C.D])
    for c in gl.static_range(PIECES):
        o = mix(c, o, p, values, C)
    o = warpgroup_mma_wait(0, deps=[o])
    finish(o, r, q, i, last, a, targets, ring, walk, opt, part, C)


@gluon.jit
def finish(o, r, q, i, last, a, targets, ring, walk, opt, part: gl.constexpr, C: gl.constexpr):
    """o / Z, the row's state, its statistics, and which rows `forward_lesser` must sum again."""
    F: gl.constexpr = C.F
    ROW: gl.constexpr = i.type.layout
    b2 = a * LOG2E
    inside = i < opt.queries
    top = gl.convert_layout(gl.max(r.top, 1), ROW)
    behind = gl.convert_layout(gl.max(r.frame, 1), ROW)
    frame = frame_of(top, b2, F)
    if F.family == "pointwise" or F.shift == "none":
        frame = behind
    shift = behind - frame
    fade = gl.exp2(shift)
    bare = gl.convert_layout(gl.sum(r.z, 1), ROW)
    z = bare * fade
    su = z - 1.0
    log_u = (gl.convert_layout(gl.sum(r.log_u, 1), ROW) + shift * bare) * fade
    square = statistics.at_least_0(gl.convert_layout(gl.sum(r.square, 1), ROW) * (fade * fade) - 1.0)
    distance = gl.convert_layout(gl.sum(r.distance, 1), ROW) * fade
    mean, m2 = gl.convert_layout(gl.sum(r.mean, 1), ROW), gl.convert_layout(gl.sum(r.m2, 1), ROW)
    zero = z * 0.0
    one = zero + 1.0
    g = Sums(
        top, frame, z, one, su, su, log_u, square, su, square, zero, distance, zero, zero, i, zero, zero, mean, m2
    )  # fmt: skip
    outer, rest, inverse, total = ending(g, Place(walk.b, walk.h, i), inside, opt, C)
    o = o * gl.expand_dims(gl.convert_layout(inverse * fade, gl.SliceLayout(1, o.type.layout)), 1)
    q.store(o.to(ring.v.dtype))  # q is not needed any more
    fence_async_shared()
    copy_out(targets.o, [walk.b, walk.h, walk.i0 + part * ROWS, 0], ring.q.index(part))
    row = (tiles.wide(walk.b) * opt.heads + walk.h) * opt.queries + i
    natural = outer * LN2
    gl.store(targets.frames + row, natural, mask=inside)
    gl.store(targets.sums + row, total * gl.exp2(outer - natural * LOG2E), mask=inside)
    if C.NEED.top:
        first_u = zero
        if C.NEED.first:
            lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, r.first.type.layout)), 0)
            first = gl.convert_layout(gl.sum(gl.where(lane == 0, r.first, 0.0), 1), ROW)
            first_u = gl.exp2(first * b2 - frame)
        n = last.to(gl.float32)
        lse = natural + gl.log(total)
        statistics.finish(
            targets.stats, row, inside, i < 0, g, a, n, one, one, one, one, first_u, rest, inverse, lse, opt, C
        )
        off = mean / n
        vague = su < 0.0156 + 6e-4 * gl.abs(frame)  # as in forward_online.completed
        if C.NEED.moments:
            vague = vague | (off * off > 256.0 * (m2 / n - off * off))
        rows = gl.num_programs(0) // gl.cdiv(opt.queries, C.BM) * tiles.wide(opt.queries)
        gl.store(targets.rough + row, gl.where(vague, top, float("inf")), mask=inside)
        gl.store(targets.rough + rows + row, z, mask=inside & vague)
        gl.store(targets.rough + 2 * rows + row, distance, mask=inside & vague)
        gl.store(targets.rough + 3 * rows + row, off, mask=inside & vague)
    tma.store_wait(0)


@gluon.jit
def forward_hopper(
    q_blocks, k_blocks, v_blocks, o_blocks, frames, sums, stats, rough, opt, C: gl.constexpr
):  # fmt: skip
    TYPE: gl.constexpr = q_blocks.dtype
    PARTS: gl.constexpr = C.PARTS
    STAGES: gl.constexpr = C.STAGES
    blocks = gl.cdiv(opt.queries, C.BM)
    pid = gl.program_id(0)
    i0 = (blocks - 1 - pid % blocks) * C.BM  # the longest causal rows first
    count = gl.cdiv(opt.keys, C.BN)
    if C.BEHIND:
        count = gl.minimum(count, gl.cdiv(i0 + C.BM, C.BN))
    walk = Walk(pid // blocks // opt.heads, (pid // blocks) % opt.heads, i0, count)
    ring = Ring(
        gl.allocate_shared_memory(TYPE, [PARTS, 1, 1, ROWS, C.D], q_blocks.layout),
        gl.allocate_shared_memory(TYPE, [STAGES, 1, 1, C.BN, C.D], k_blocks.layout),
        gl.allocate_shared_memory(TYPE, [STAGES, 1, 1, C.BN, C.D], v_blocks.layout),
        barriers(PARTS, 1),
        barriers(STAGES, 1),
        barriers(STAGES, 1),
        barriers(STAGES, PARTS),
    )
    fence_async_shared()
    targets = Targets(o_blocks, frames, sums, stats, rough)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (consume, (targets, ring, walk, opt, 0, C)),
                (consume, (targets, ring, walk, opt, 1, C)),
                (fetch, (q_blocks, k_blocks, v_blocks, ring, walk, opt.group, C)),
            ],
            [4, 1],
            [C.REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (targets, ring, walk, opt, 0, C)),
                (consume, (targets, ring, walk, opt, 1, C)),
                (consume, (targets, ring, walk, opt, 2, C)),
                (fetch, (q_blocks, k_blocks, v_blocks, ring, walk, opt.group, C)),
            ],
            [4, 4, 1],
            [C.REGISTERS, C.REGISTERS, 24],
        )


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    ring = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(N):
        mbarrier.init(ring.index(at), count=COUNT)
    return ring
