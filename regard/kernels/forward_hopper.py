"""o = Σ_j u_j·v_j / Z on Hopper, in Gluon: two warpgroups in turn, and a warp that fetches for both.

One program has 128 queries, 64 to a warpgroup. While one warpgroup weighs its scores, the tensor cores multiply for
the other, and within a warpgroup q·kᵀ of the next tile runs beside p·v of the last:

    fetch    k, v → ring of shared memory
    each     s = q·kᵀ (tile t)  |  o += p·v (tile t − 1)      issued together, when it is this one's turn
             u of s, sums                                     under the other's products
             o ·= fade, p = u                                 once its own p·v is done

The tile that may be cut or crossed by the diagonal comes first and alone carries masking code. Sums are kept per
thread, in four lanes per row, as `tiles.fold` does.
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

from regard.kernels import statistics, tiles
from regard.kernels.forward_online import ending, frame_of, terms
from regard.kernels.statistics import Sums
from regard.kernels.tiles import HIDDEN, LN2, LOG2E

copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

ROWS = gl.constexpr(64)  # queries of one warpgroup


class Ring(NamedTuple):
    """Shared memory and its barriers: the copy engine sets `full`, the warpgroups `free` and each other's `turn`."""

    q: Any  # [2, 1, 1, 64, D]
    k: Any  # [STAGES, 1, 1, N, D]
    v: Any  # [STAGES, 1, 1, N, D]
    q_full: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    turn: Any


class Walk(NamedTuple):
    """Which tiles of keys a program visits."""

    b: Any
    h: Any
    i0: Any
    count: Any
    plain: Any  # tiles 1 … plain − 1 of the walk are whole and to one side of the diagonal
    diagonal: Any


class Place(NamedTuple):
    """Which rows: what `ending` asks of a scene."""

    b: Any
    h: Any
    i: Any


class Shape(NamedTuple):
    """What the kernel is compiled for; names as in `tiles.Config`."""

    F: Any
    NEED: Any
    SLOT: Any
    SPARSE: bool
    BEHIND: bool
    CUT: bool  # the last tile of keys is cut and is not the diagonal one for all
    D: int
    BM: int
    BN: int
    STAGES: int
    REGISTERS: int
    ACC: Any


class Tally(NamedTuple):
    """What a warpgroup carries from tile to tile beside o and p: top [M], the sums [M, 4]."""

    top: Any
    z: Any
    log_u: Any
    square: Any
    distance: Any
    mean: Any  # Σ y
    m2: Any  # Σ y²


@gluon.jit
def tile_at(t, walk, C: gl.constexpr):
    """The t-th tile of the walk: the diagonal one first; or the cut one, and the diagonal one at the end."""
    if C.CUT:
        plain = t - 1 + (t - 1 >= walk.diagonal).to(gl.int32)
        tile = gl.where(t == 0, walk.count - 1, gl.where(t == walk.plain, walk.diagonal, plain))
    else:
        tile = gl.where(t == 0, walk.diagonal, t - (t <= walk.diagonal).to(gl.int32))
    return tile


@gluon.jit
def fetch(q_blocks, k_blocks, v_blocks, ring, walk, group, C: gl.constexpr):
    g = walk.h // group
    for part in gl.static_range(2):
        mbarrier.expect(ring.q_full.index(part), ROWS * C.D * 2)
        copy_in(q_blocks, [walk.b, walk.h, walk.i0 + part * ROWS, 0], ring.q_full.index(part), ring.q.index(part))
    for t in range(walk.count):
        stage, phase = t % C.STAGES, (t // C.STAGES) & 1
        start = tile_at(t, walk, C) * C.BN
        mbarrier.wait(ring.k_free.index(stage), phase ^ 1)
        mbarrier.expect(ring.k_full.index(stage), C.BN * C.D * 2)
        copy_in(k_blocks, [walk.b, g, start, 0], ring.k_full.index(stage), ring.k.index(stage))
        mbarrier.wait(ring.v_free.index(stage), phase ^ 1)
        mbarrier.expect(ring.v_full.index(stage), C.BN * C.D * 2)
        copy_in(v_blocks, [walk.b, g, start, 0], ring.v_full.index(stage), ring.v.index(stage))


@gluon.jit
def zeros(N: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.zeros([ROWS, N], gl.float32, LAYOUT)


@gluon.jit
def cells(x):
    """[M, N] as [M, N/8, 4, 2]: a thread of the tensor core's result holds one [., :, lane, :] of two rows."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def per_row(x, like):
    """[M] as [M, 1, 1, 1]."""
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, like.type.layout))))
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 1), 2), 3)


@gluon.jit
def octet(like):
    """0, 8, 16, … as [1, N/8, 1, 1]: a constant in every register."""
    x = gl.arange(0, like.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, like.type.layout))))
    return 8 * gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 2), 3)


@gluon.jit
def within(like):
    """0 … 7, a key's place in its octet, as [1, 1, 4, 2]."""
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, like.type.layout))))
    lane = gl.expand_dims(gl.expand_dims(gl.expand_dims(lane, 0), 1), 3)
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, like.type.layout))))
    pair = gl.expand_dims(gl.expand_dims(gl.expand_dims(pair, 0), 1), 2)
    return 2 * lane + pair


@gluon.jit
def weigh(s, r, i, last, a, theta, tile, diagonal, C: gl.constexpr, EDGE: gl.constexpr):
    """(u, fade of what came before, tally) of one tile of products s = q·kᵀ."""
    NEED: gl.constexpr = C.NEED
    F: gl.constexpr = C.F
    b2 = a * LOG2E
    start = tile * C.BN
    y = cells(s)
    if EDGE:
        seen = octet(y) < per_row(last - start, y) - within(y)
        y = gl.where(seen, y, HIDDEN)
    top = r.top
    if NEED.top or (F.family == "ratio" and F.shift != "none"):
        highest = gl.max(gl.max(gl.max(y, 1), 2), 1)
        top = gl.maximum(top, gl.convert_layout(highest, top.type.layout))
    frame = frame_of(top, b2, F)
    u, v, power = terms(y, per_row(a, y), per_row(b2, y), per_row(frame, y), theta, F)
    if EDGE:
        u = gl.where(seen, u, 0.0)
        v = gl.where(seen, v, 0.0)
        power = gl.where(seen, power, 0.0)
        y = gl.where(seen, y, 0.0)
    shift = frame_of(r.top, b2, F) - frame
    fade = gl.exp2(shift)
    by_lane: gl.constexpr = gl.SliceLayout(1, r.z.type.layout)
    fall = gl.expand_dims(gl.convert_layout(fade, by_lane), 1)
    sum_u = gl.sum(u, 1)  # [M, 4, 2]
    log_u, square, distance, mean, m2 = r.log_u, r.square, r.distance, r.mean, r.m2
    if NEED.log_u:
        moved = log_u + gl.expand_dims(gl.convert_layout(shift, by_lane), 1) * r.z
        log_u = moved * fall + gl.sum(gl.sum(u * power, 1), 2)
    if NEED.square:
        square = square * (fall * fall) + gl.sum(gl.sum(u * u, 1), 2)
    if NEED.moments:
        mean += gl.sum(gl.sum(y, 1), 2)
        m2 += gl.sum(gl.sum(y * y, 1), 2)
    if NEED.distance:
        ahead = per_row(i - start, y) - within(y)
        w, sum_w = u, sum_u
        if EDGE and not C.BEHIND:
            w = gl.where(octet(y) <= ahead, u, -u)
            sum_w = gl.sum(w, 1)
        far = gl.sum(gl.sum(ahead.to(gl.float32), 1) * sum_w - gl.sum(w * octet(y).to(gl.float32), 1), 2)
        if not (EDGE or C.BEHIND):
            far = far * gl.where(tile < diagonal, 1.0, -1.0)
        distance = distance * fall + far
    sum_v = sum_u
    if not F.exponential:
        sum_v = gl.sum(v, 1)
    r = Tally(top, r.z * fall + gl.sum(sum_v, 2), log_u, square, distance, mean, m2)
    return gl.reshape(u, s.shape), fade, r


@gluon.jit
def ready(t, ring, walk, part: gl.constexpr, C: gl.constexpr):
    """Wait for the keys of tile t and for this warpgroup's turn."""
    more = t < walk.count
    mbarrier.wait(ring.k_full.index(t % C.STAGES), (t // C.STAGES) & 1, pred=more)
    mbarrier.wait(ring.turn.index(part), (t & 1) ^ part, pred=more)


@gluon.jit
def step(t, o, p, r, q, ring, walk, i, last, a, theta, part: gl.constexpr, C: gl.constexpr, EDGE: gl.constexpr):
    """Tile t is scored and weighed while o takes tile t − 1."""
    F: gl.constexpr = C.F
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    stage, before = t % C.STAGES, (t - 1) % C.STAGES
    tile = tile_at(t, walk, C)
    keys = ring.k.index(stage).reshape([C.BN, C.D]).permute((1, 0))
    s = warpgroup_mma(q, keys, zeros(C.BN, S), use_acc=False, is_async=True)
    mbarrier.wait(ring.v_full.index(before), ((t - 1) // C.STAGES) & 1)
    o = warpgroup_mma(p, ring.v.index(before).reshape([C.BN, C.D]), o, is_async=True)
    mbarrier.arrive(ring.turn.index(1 - part), count=1)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(ring.k_free.index(stage), count=1)
    u, fade, r = weigh(s, r, i, last, a, theta, tile, walk.diagonal, C, EDGE)
    ready(t + 1, ring, walk, part, C)  # before the wait below: a branch keeps ptxas from drawing that wait upwards
    o, p, u = warpgroup_mma_wait(0, deps=[o, p, u])
    mbarrier.arrive(ring.v_free.index(before), count=1)
    if F.family == "ratio" and F.shift != "none":
        o = o * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, o.type.layout)), 1)
    return o, gl.convert_layout(u.to(ring.v.dtype), p.type.layout), r


@gluon.jit
def consume(o_blocks, k, frames, sums, stats, rough, ring, walk, opt, part: gl.constexpr, C: gl.constexpr):
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    i = walk.i0 + part * ROWS + gl.arange(0, ROWS, ROW)
    last = gl.full([ROWS], 0, gl.int32, ROW) + opt.keys
    if C.BEHIND:
        last = gl.minimum(i + 1, last)
    a = gl.full([ROWS], 1.0, gl.float32, ROW)
    if opt.temperature.ptr is not None:
        a = 1.0 / tiles.rows_of(opt.temperature, walk.b, walk.h, i, i < opt.queries, 1.0).to(gl.float32)
    a = a * tiles.number(opt.scale, gl.float32)
    theta = tiles.number(opt.theta, gl.float32)
    q = ring.q.index(part).reshape([ROWS, C.D])
    zero = zeros(C.BN, S)
    none = gl.sum(gl.sum(cells(zero), 1), 2)
    r = Tally(gl.full([ROWS], HIDDEN, gl.float32, ROW), none, none, none, none, none, none)
    mbarrier.wait(ring.q_full.index(part), 0)
    mbarrier.wait(ring.k_full.index(0), 0)
    s = warpgroup_mma(q, ring.k.index(0).reshape([C.BN, C.D]).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(ring.k_free.index(0), count=1)
    u, _, r = weigh(s, r, i, last, a, theta, tile_at(0, walk, C), walk.diagonal, C, True)
    p = gl.convert_layout(u.to(ring.v.dtype), gl.DotOperandLayout(0, OUT, 2))
    o = zeros(C.D, OUT)
    ready(1, ring, walk, part, C)
    for t in range(1, walk.plain):
        o, p, r = step(t, o, p, r, q, ring, walk, i, last, a, theta, part, C, False)
    if C.CUT:
        if walk.plain < walk.count:
            o, p, r = step(walk.plain, o, p, r, q, ring, walk, i, last, a, theta, part, C, True)
    end = walk.count - 1
    mbarrier.wait(ring.v_full.index(end % C.STAGES), (end // C.STAGES) & 1)
    o = warpgroup_mma(p, ring.v.index(end % C.STAGES).reshape([C.BN, C.D]), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    finish(o, r, q, i, last, a, o_blocks, k, frames, sums, stats, rough, ring, walk, opt, part, C)


@gluon.jit
def finish(
    o, r, q, i, last, a, o_blocks, k, frames, sums, stats, rough, ring, walk, opt, part: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """o / Z, the row's state, its statistics, and which rows `forward_lesser` must sum again."""
    ROW: gl.constexpr = i.type.layout
    F: gl.constexpr = C.F
    b2 = a * LOG2E
    inside = i < opt.queries
    dead = i < 0
    z = gl.convert_layout(gl.sum(r.z, 1), ROW)
    zero = z * 0.0
    one = zero + 1.0
    su = z - 1.0
    log_u = gl.convert_layout(gl.sum(r.log_u, 1), ROW)
    square = gl.maximum(gl.convert_layout(gl.sum(r.square, 1), ROW) - 1.0, 0.0)
    distance = gl.convert_layout(gl.sum(r.distance, 1), ROW)
    mean = gl.convert_layout(gl.sum(r.mean, 1), ROW)
    m2 = gl.convert_layout(gl.sum(r.m2, 1), ROW)
    g = Sums(
        r.top, frame_of(r.top, b2, F), z, one, su, su, log_u, square, su, square, zero, distance, zero, zero, i, zero,
        zero, mean, m2,
    )  # fmt: skip
    frame, rest, inverse, total = ending(g, Place(walk.b, walk.h, i), inside, opt, C)
    row = (tiles.wide(walk.b) * opt.heads + walk.h) * opt.queries + i
    natural = frame * LN2
    gl.store(frames + row, natural, mask=inside)
    gl.store(sums + row, total * gl.exp2(frame - natural * LOG2E), mask=inside)
    if C.NEED.top:
        first_u = zero
        if C.NEED.first:
            BY: gl.constexpr = o.type.layout
            d = gl.arange(0, C.D, gl.SliceLayout(0, BY))
            key = k.ptr + tiles.wide(walk.b) * k.stride[0] + tiles.wide(walk.h // opt.group) * k.stride[1]
            first = gl.expand_dims(gl.load(key + d * k.stride[3]).to(gl.float32), 0)
            y = gl.convert_layout(gl.sum(q.load(BY).to(gl.float32) * first, 1), ROW)
            first_u = gl.exp2(y * b2 - g.frame)
        n = last.to(gl.float32)
        lse = natural + gl.log(total)
        statistics.finish(stats, row, inside, dead, g, a, n, one, one, one, one, first_u, rest, inverse, lse, opt, C)
        off = mean / n
        vague = su < 0.0156 + 6e-4 * gl.abs(g.frame)  # as in forward_online.completed
        if C.NEED.moments:
            vague = vague | (off * off > 256.0 * (m2 / n - off * off))
        rows = gl.num_programs(0) // gl.cdiv(opt.queries, C.BM) * tiles.wide(opt.queries)
        again = inside & vague
        gl.store(rough + row, gl.where(vague, r.top, float("inf")), mask=inside)
        gl.store(rough + rows + row, z, mask=again)
        gl.store(rough + 2 * rows + row, distance, mask=again)
        gl.store(rough + 3 * rows + row, off, mask=again)
    o = o * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, o.type.layout)), 1)
    q.store(o.to(ring.v.dtype))  # q is not needed any more
    fence_async_shared()
    copy_out(o_blocks, [walk.b, walk.h, walk.i0 + part * ROWS, 0], ring.q.index(part))
    tma.store_wait(0)


@gluon.jit
def forward_hopper(
    q_blocks, k_blocks, v_blocks, o_blocks, k, frames, sums, stats, rough, opt, C: gl.constexpr
):  # fmt: skip
    TYPE: gl.constexpr = q_blocks.dtype
    blocks = gl.cdiv(opt.queries, C.BM)
    pid = gl.program_id(0)
    i0 = (blocks - 1 - pid % blocks) * C.BM  # the longest causal rows first
    count = gl.cdiv(opt.keys, C.BN)
    if C.BEHIND:
        count = gl.minimum(count, gl.cdiv(i0 + C.BM, C.BN))
    diagonal = gl.minimum(i0 // C.BN, count - 1)
    plain = count
    if C.CUT:
        plain = count - (diagonal < count - 1).to(gl.int32)
    walk = Walk(pid // blocks // opt.heads, (pid // blocks) % opt.heads, i0, count, plain, diagonal)
    ring = Ring(
        gl.allocate_shared_memory(TYPE, [2, 1, 1, ROWS, C.D], q_blocks.layout),
        gl.allocate_shared_memory(TYPE, [C.STAGES, 1, 1, C.BN, C.D], k_blocks.layout),
        gl.allocate_shared_memory(TYPE, [C.STAGES, 1, 1, C.BN, C.D], v_blocks.layout),
        gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
    )
    for part in gl.static_range(2):
        mbarrier.init(ring.q_full.index(part), count=1)
        mbarrier.init(ring.turn.index(part), count=1)
    STAGES: gl.constexpr = C.STAGES
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.k_full.index(stage), count=1)
        mbarrier.init(ring.v_full.index(stage), count=1)
        mbarrier.init(ring.k_free.index(stage), count=2)
        mbarrier.init(ring.v_free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (o_blocks, k, frames, sums, stats, rough, ring, walk, opt, 0, C)),
            (consume, (o_blocks, k, frames, sums, stats, rough, ring, walk, opt, 1, C)),
            (fetch, (q_blocks, k_blocks, v_blocks, ring, walk, opt.group, C)),
        ],
        [4, 1],
        [C.REGISTERS, 24],
    )
