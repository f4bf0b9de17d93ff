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

from regard.kernels import ptx, tiles, warpgroup
from regard.kernels.forward_online import ending, frame_of
from regard.kernels.tiles import LN2, LOG2E
from regard.kernels.warpgroup import ROWS

copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


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
    SPAN: int  # Σy and Σy² of the keys before the last multiple of it come from `moments`; −1: all, 0: none
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
    before: Any  # keys whose moments come from their forms


class Place(NamedTuple):
    """Which rows: what `ending` asks of a scene."""

    b: Any
    h: Any
    i: Any


class Told(NamedTuple):
    """And what of its sums."""

    frame: Any
    z: Any


class Targets(NamedTuple):
    """Where results go."""

    o: Any
    frames: Any
    sums: Any
    rough: Any  # [9, B, H, M]: `forward_statistics.Rough`
    forms: Any  # `moments.Forms`, to read


@gluon.jit
def start_of(t, walk, C: gl.constexpr):
    """The first key of the tile of step t: from the last tile, or the rows' own one, down, and around."""
    tile = walk.count - 1 - t
    if C.OWN:
        tile = gl.minimum(walk.i0 // C.BN, walk.count - 1) - t
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
def fetch(q_blocks, k_blocks, v_blocks, form_blocks, ring, walk, opt, C: gl.constexpr):
    PARTS: gl.constexpr = C.PARTS
    g = walk.h // opt.group
    for part in gl.static_range(PARTS):
        mbarrier.expect(ring.q_full.index(part), ROWS * C.D * 2)
        copy_in(q_blocks, [walk.b, walk.h, walk.i0 + part * ROWS, 0], ring.q_full.index(part), ring.q.index(part))
    PIECES: gl.constexpr = (3 * C.D + C.BN - 1) // C.BN if C.SPAN != 0 else 0
    for t in range(walk.count):
        stage, next_stage = t % C.STAGES, (t + 1) % C.STAGES
        start = start_of(t, walk, C)
        mbarrier.wait(ring.free.index(stage), ((t // C.STAGES) & 1) ^ 1)
        mbarrier.expect(ring.k_full.index(stage), C.BN * C.D * 2)
        copy_in(k_blocks, [walk.b, g, start, 0], ring.k_full.index(stage), ring.k.index(stage))
        mbarrier.wait(ring.free.index(next_stage), (((t + 1) // C.STAGES) & 1) ^ 1)
        mbarrier.expect(ring.v_full.index(stage), C.BN * C.D * 2)
        copy_in(v_blocks, [walk.b, g, start, 0], ring.v_full.index(stage), ring.v.index(stage))
    for c in gl.static_range(PIECES):
        t = walk.count + c
        stage = t % C.STAGES
        mbarrier.wait(ring.free.index(stage), ((t // C.STAGES) & 1) ^ 1)
        mbarrier.expect(ring.k_full.index(stage), C.BN * C.D * 2)
        head, part = form_of(walk, opt, C)
        copy_in(form_blocks, [head, part, c * C.BN, 0], ring.k_full.index(stage), ring.k.index(stage))


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
def step(t, o, p, r, q, ring, walk, i, a, theta, part: gl.constexpr, C: gl.constexpr):
    """Tile t is scored and weighed while o takes tile t − 1."""
    F: gl.constexpr = C.F
    PIECES: gl.constexpr = C.PIECES
    stage, before = t % C.STAGES, (t - 1) % C.STAGES
    s = score(t, q, ring, C)
    mbarrier.wait(ring.v_full.index(before), ((t - 1) // C.STAGES) & 1)
    values = ring.v.index(before).reshape([C.BN, C.D])
    o = mix(0, o, p, values, C)
    s = warpgroup_mma_wait(1, deps=[s])
    start = start_of(t, walk, C)
    fade, r = warpgroup.raised(s, r, a * LOG2E, start, C)
    y = warpgroup.pieces(s, PIECES)
    sums = warpgroup.blank(y[0])
    near = True
    if C.SPAN > 0:
        near = start >= walk.before
    new = ()
    for c in gl.static_range(PIECES):
        if c + 1 < PIECES:
            o = mix(c + 1, o, p, values, C)
        u, sums = warpgroup.weigh(
            y[c], r, sums, i, a, theta, start, walk.i0 + part * ROWS, near, c * (C.BN // PIECES), C, False
        )
        new = new + (operand(u, ring, C),)  # noqa: RUF005 (Triton knows no star)
    r = warpgroup.pinned(warpgroup.joined(r, sums, i, start, walk.i0 + part * ROWS, C, False))
    ready(t + 1, ring, walk, C)  # before the wait below: its branches, too, keep that wait in its place
    if PIECES == 1:
        o, _ = warpgroup_mma_wait(0, deps=[o, p[0]])
    elif PIECES == 2:
        o, _, _ = warpgroup_mma_wait(0, deps=[o, p[0], p[1]])
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
    start = start_of(begin, walk, C)
    if not C.OWN:
        s = warpgroup.shown(s, last, start)
    _, r = warpgroup.raised(s, r, lanes * LOG2E, start, C)
    y = warpgroup.pieces(s, PIECES)
    sums = warpgroup.blank(y[0])
    p = ()
    for c in gl.static_range(PIECES):
        u, sums = warpgroup.weigh(y[c], r, sums, i, lanes, theta, start, r0, True, c * WIDTH, C, True)
        p = p + (operand(u, ring, C),)  # noqa: RUF005
    r = warpgroup.joined(r, sums, i, start, r0, C, True)
    o = warpgroup.zeros(C.D, OUT)
    ready(begin + 1, ring, walk, C)
    for t in range(begin + 1, walk.count):
        o, p, r = step(t, o, p, r, q, ring, walk, i, lanes, theta, part, C)
    end = walk.count - 1
    mbarrier.wait(ring.v_full.index(end % C.STAGES), (end // C.STAGES) & 1)
    values = ring.v.index(end % C.STAGES).reshape([C.BN, C.D])
    for c in gl.static_range(PIECES):
        o = mix(c, o, p, values, C)
    none = a * 0.0
    formed = (none, none, none)
    if C.SPAN != 0:
        formed = form(q, ring, walk, targets, opt, C)
    o = warpgroup_mma_wait(0, deps=[o])
    finish(formed, o, r, q, i, a, targets, ring, walk, opt, part, C)


@gluon.jit
def form(q, ring, walk, targets, opt, C: gl.constexpr):
    """(Σy, Σy², |q|²·Σ|k|²) over the keys whose forms follow the tiles in the ring."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    turned = warpgroup.zeros(C.D, S)
    for c in gl.static_range(3):
        t = walk.count + c * C.D // C.BN
        stage = t % C.STAGES
        mbarrier.wait(ring.k_full.index(stage), (t // C.STAGES) & 1)
        keys = ring.k.index(stage).reshape([C.BN, C.D]).slice(c * C.D % C.BN, C.D).permute((1, 0))
        turned = warpgroup_mma(q, keys, turned, use_acc=c > 0, is_async=True)
        turned = warpgroup_mma_wait(0, deps=[turned])
        mbarrier.arrive(ring.free.index(stage), count=1, pred=(c + 1) * C.D % C.BN == 0)
    wide = q.load(S).to(gl.float32)
    head, part = form_of(walk, opt, C)
    at = head
    if C.SPAN > 0:
        at = head * (gl.cdiv(gl.minimum(opt.queries, opt.keys), C.SPAN) - 1) + part
    center = gl.load(targets.forms.sums + at * C.D + gl.arange(0, C.D, gl.SliceLayout(0, S)))
    one = gl.sum(wide * gl.expand_dims(center, 0), 1)
    two = gl.sum(wide * turned, 1)
    reach = gl.sum(wide * wide, 1) * gl.load(targets.forms.lengths + at)
    if C.SPAN > 0:
        some = walk.before > 0
        one, two, reach = gl.where(some, one, 0.0), gl.where(some, two, 0.0), gl.where(some, reach, 0.0)
    return one, two, reach


@gluon.jit
def finish(formed, o, r, q, i, a, targets, ring, walk, opt, part: gl.constexpr, C: gl.constexpr):
    """o / Z and the row's state; its sums for `forward_statistics`, whose code would not fit beside the loop's."""
    F: gl.constexpr = C.F
    NEED: gl.constexpr = C.NEED
    inside = i < opt.queries
    top = whole(gl.max(r.top, 1), i)
    behind = whole(gl.max(r.frame, 1), i)
    frame = behind
    if F.family == "ratio" and F.shift != "none":
        frame = frame_of(top, a * LOG2E, F)
    shift = behind - frame
    fade = gl.exp2(shift)
    bare = whole(gl.sum(r.z, 1), i)
    z = bare * fade
    outer, _, inverse, total = ending(Told(frame, z), Place(walk.b, walk.h, i), inside, opt, C)
    o = o * gl.expand_dims(gl.convert_layout(inverse * fade, gl.SliceLayout(1, o.type.layout)), 1)
    q.store(o.to(ring.v.dtype))  # q is not needed any more
    fence_async_shared()
    copy_out(targets.o, [walk.b, walk.h, walk.i0 + part * ROWS, 0], ring.q.index(part))
    row = (tiles.wide(walk.b) * opt.heads + walk.h) * opt.queries + i
    natural = outer * LN2
    gl.store(targets.frames + row, natural, mask=inside)
    gl.store(targets.sums + row, total * gl.exp2(outer - natural * LOG2E), mask=inside)
    if NEED.top:
        rows = gl.num_programs(0) // gl.cdiv(opt.queries, C.BM) * tiles.wide(opt.queries)
        to = targets.rough + row
        gl.store(to, top, mask=inside)
        gl.store(to + rows, z, mask=inside)
        if NEED.distance:
            gl.store(to + 2 * rows, whole(gl.sum(r.distance, 1), i) * fade, mask=inside)
        if NEED.moments:
            gl.store(to + 3 * rows, whole(gl.sum(r.mean, 1), i) + whole(formed[0], i), mask=inside)
            gl.store(to + 4 * rows, whole(gl.sum(r.m2, 1), i) + whole(formed[1], i), mask=inside)
            gl.store(to + 5 * rows, whole(formed[2], i), mask=inside)
        if NEED.log_u:
            gl.store(to + 6 * rows, (whole(gl.sum(r.log_u, 1), i) + shift * bare) * fade, mask=inside)
        if NEED.square:
            gl.store(to + 7 * rows, whole(gl.sum(r.square, 1), i) * (fade * fade), mask=inside)
        if NEED.first:
            lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, r.first.type.layout)), 0)
            gl.store(to + 8 * rows, whole(gl.sum(gl.where(lane == 0, r.first, 0.0), 1), i), mask=inside)
    tma.store_wait(0)


@gluon.jit
def whole(x, i):
    """A number per row as i has them."""
    return gl.convert_layout(x, i.type.layout)


@gluon.jit
def forward_hopper(
    q_blocks, k_blocks, v_blocks, o_blocks, form_blocks, frames, sums, rough, forms, opt, C: gl.constexpr
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
    before = 0
    if C.SPAN > 0:
        before = gl.minimum(i0, opt.keys) // C.SPAN * C.SPAN
    walk = Walk(pid // blocks // opt.heads, (pid // blocks) % opt.heads, i0, count, before)
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
    targets = Targets(o_blocks, frames, sums, rough, forms)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (consume, (targets, ring, walk, opt, 0, C)),
                (consume, (targets, ring, walk, opt, 1, C)),
                (fetch, (q_blocks, k_blocks, v_blocks, form_blocks, ring, walk, opt, C)),
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
                (fetch, (q_blocks, k_blocks, v_blocks, form_blocks, ring, walk, opt, C)),
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
