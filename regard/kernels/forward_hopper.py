"""o = Σ_j u_j·v_j / Z on Hopper, in Gluon: warpgroups of 64 queries each, and a warp that fetches for all.

While one warpgroup weighs its scores, the tensor cores multiply for another, and within a warpgroup q·kᵀ of the next
tile runs beside p·v of the last:

    fetch    k, v → ring of shared memory
    each     s = q·kᵀ (tile t)  |  o += p·v (tile t − 1)      issued together
             u of s, sums                                     under the others' products
             o ·= fade, p = u                                 once its own p·v is done

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

from regard.kernels import statistics, tiles, warpgroup
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
    TURNS: bool  # does a warpgroup wait until the one before has its scores?
    ACC: Any


class Ring(NamedTuple):
    """Shared memory and its barriers: the copy engine sets `full`, the warpgroups `free` and each other's `turn`."""

    q: Any  # [PARTS, 1, 1, 64, D]
    k: Any  # [STAGES, 1, 1, N, D]
    v: Any  # [STAGES, 1, 1, N, D]
    q_full: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    turn: Any


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
        stage, phase = t % C.STAGES, (t // C.STAGES) & 1
        start = (walk.count - 1 - t) * C.BN
        mbarrier.wait(ring.k_free.index(stage), phase ^ 1)
        mbarrier.expect(ring.k_full.index(stage), C.BN * C.D * 2)
        copy_in(k_blocks, [walk.b, g, start, 0], ring.k_full.index(stage), ring.k.index(stage))
        mbarrier.wait(ring.v_free.index(stage), phase ^ 1)
        mbarrier.expect(ring.v_full.index(stage), C.BN * C.D * 2)
        copy_in(v_blocks, [walk.b, g, start, 0], ring.v_full.index(stage), ring.v.index(stage))


@gluon.jit
def ready(t, ring, walk, part: gl.constexpr, C: gl.constexpr):
    """Wait for the keys of tile t and for this warpgroup's turn."""
    more = t < walk.count
    mbarrier.wait(ring.k_full.index(t % C.STAGES), (t // C.STAGES) & 1, pred=more)
    if C.TURNS:
        mbarrier.wait(ring.turn.index(part), (t & 1) ^ (part > 0), pred=more)


@gluon.jit
def step(t, o, p, r, q, ring, walk, i, last, a, theta, part: gl.constexpr, C: gl.constexpr):
    """Tile t is scored and weighed while o takes tile t − 1."""
    F: gl.constexpr = C.F
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    stage, before = t % C.STAGES, (t - 1) % C.STAGES
    keys = ring.k.index(stage).reshape([C.BN, C.D]).permute((1, 0))
    s = warpgroup_mma(q, keys, warpgroup.zeros(C.BN, S), use_acc=False, is_async=True)
    mbarrier.wait(ring.v_full.index(before), ((t - 1) // C.STAGES) & 1)
    o = warpgroup_mma(p, ring.v.index(before).reshape([C.BN, C.D]), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    if C.TURNS:
        mbarrier.arrive(ring.turn.index((part + 1) % C.PARTS), count=1)
    start = (walk.count - 1 - t) * C.BN
    u, fade, r = warpgroup.weigh(s, r, i, last, a, theta, start, walk.i0 + part * ROWS, C, False)
    r = warpgroup.pinned(r)
    ready(t + 1, ring, walk, part, C)  # before the wait below: its branches, too, keep that wait in its place
    o, p, u = warpgroup_mma_wait(0, deps=[o, p, u])
    mbarrier.arrive(ring.k_free.index(stage), count=1)
    mbarrier.arrive(ring.v_free.index(before), count=1)
    if F.family == "ratio" and F.shift != "none":
        o = warpgroup.faded(o, fade)
    return o, gl.convert_layout(warpgroup.rounded(u, ring.v.dtype, F), p.type.layout), r


@gluon.jit
def pass_by(count, ring, part: gl.constexpr, C: gl.constexpr):
    """Give back the first tiles, which only later warpgroups see."""
    for t in range(count):
        stage, phase = t % C.STAGES, (t // C.STAGES) & 1
        mbarrier.wait(ring.k_full.index(stage), phase)
        mbarrier.arrive(ring.k_free.index(stage), count=1)
        mbarrier.wait(ring.v_full.index(stage), phase)
        mbarrier.arrive(ring.v_free.index(stage), count=1)
        if C.TURNS:
            mbarrier.wait(ring.turn.index(part), ((t + 1) & 1) ^ (part > 0))
            mbarrier.arrive(ring.turn.index((part + 1) % C.PARTS), count=1)


@gluon.jit
def consume(targets, ring, walk, opt, part: gl.constexpr, C: gl.constexpr):
    F: gl.constexpr = C.F
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    r0 = walk.i0 + part * ROWS
    i = r0 + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    last = i * 0 + opt.keys
    begin = 0
    if C.BEHIND:
        last = gl.minimum(i + 1, last)
        if C.BM > C.BN:
            begin = gl.maximum(walk.count - 1 - r0 // C.BN, 0)
            pass_by(begin, ring, part, C)
    a = gl.full([ROWS], 1.0, gl.float32, i.type.layout)
    if opt.temperature.ptr is not None:
        a = 1.0 / tiles.rows_of(opt.temperature, walk.b, walk.h, i, i < opt.queries, 1.0).to(gl.float32)
    a = a * tiles.number(opt.scale, gl.float32)
    theta = tiles.number(opt.theta, gl.float32)
    q = ring.q.index(part).reshape([ROWS, C.D])
    stage = begin % C.STAGES
    mbarrier.wait(ring.q_full.index(part), 0)
    mbarrier.wait(ring.k_full.index(stage), (begin // C.STAGES) & 1)
    keys = ring.k.index(stage).reshape([C.BN, C.D]).permute((1, 0))
    s = warpgroup_mma(q, keys, warpgroup.zeros(C.BN, S), use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(ring.k_free.index(stage), count=1)
    none = warpgroup.nothing(C.BN, S, F)
    u, _, r = warpgroup.weigh(s, none, i, last, a, theta, (walk.count - 1 - begin) * C.BN, r0, C, True)
    p = gl.convert_layout(warpgroup.rounded(u, ring.v.dtype, F), gl.DotOperandLayout(0, OUT, 2))
    o = warpgroup.zeros(C.D, OUT)
    ready(begin + 1, ring, walk, part, C)
    for t in range(begin + 1, walk.count):
        o, p, r = step(t, o, p, r, q, ring, walk, i, last, a, theta, part, C)
    end = walk.count - 1
    mbarrier.wait(ring.v_full.index(end % C.STAGES), (end // C.STAGES) & 1)
    o = warpgroup_mma(p, ring.v.index(end % C.STAGES).reshape([C.BN, C.D]), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    finish(o, r, q, i, last, a, targets, ring, walk, opt, part, C)


@gluon.jit
def finish(o, r, q, i, last, a, targets, ring, walk, opt, part: gl.constexpr, C: gl.constexpr):
    """o / Z, the row's state, its statistics, and which rows `forward_lesser` must sum again."""
    F: gl.constexpr = C.F
    ROW: gl.constexpr = i.type.layout
    b2 = a * LOG2E
    inside = i < opt.queries
    frame = frame_of(r.top, b2, F)
    if F.family == "pointwise" or F.shift == "none":
        frame = r.frame
    shift = r.frame - frame
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
        r.top, frame, z, one, su, su, log_u, square, su, square, zero, distance, zero, zero, i, zero, zero, mean, m2
    )  # fmt: skip
    outer, rest, inverse, total = ending(g, Place(walk.b, walk.h, i), inside, opt, C)
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
        gl.store(targets.rough + row, gl.where(vague, r.top, float("inf")), mask=inside)
        gl.store(targets.rough + rows + row, z, mask=inside & vague)
        gl.store(targets.rough + 2 * rows + row, distance, mask=inside & vague)
        gl.store(targets.rough + 3 * rows + row, off, mask=inside & vague)
    o = o * gl.expand_dims(gl.convert_layout(inverse * fade, gl.SliceLayout(1, o.type.layout)), 1)
    q.store(o.to(ring.v.dtype))  # q is not needed any more
    fence_async_shared()
    copy_out(targets.o, [walk.b, walk.h, walk.i0 + part * ROWS, 0], ring.q.index(part))
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
        barriers(STAGES, PARTS),
        barriers(STAGES, 1),
        barriers(STAGES, PARTS),
        barriers(PARTS, 1),
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
