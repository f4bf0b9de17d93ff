"""o = Σ_j u_j·v_j / Z on Hopper, in Gluon: warpgroups of 64 queries each, and a warp that fetches for all.

While one warpgroup weighs its scores, the tensor cores multiply for another, and within a warpgroup q·kᵀ of the next
tile runs beside p·v of the last:

    fetch    k, v → ring of shared memory
    each     s = q·kᵀ (tile t), o += p·v (tile t − 1)         the latter in pieces,
             u of s, sums                                     between which a piece of s each is weighed
             o ·= fade, p = u                                 once its own p·v is done

A warpgroup stands still while it hands over a product that the tensor cores cannot take in yet: hence the pieces.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.hopper import ptx, warpgroup
from regard._backends.gpu.attention.hopper.epilogue import Targets, finish, form
from regard._backends.gpu.attention.hopper.ring import (
    Ring,
    barriers,
    fetch,
    pass_by,
    ready,
    rounds_of,
    start_of,
    walk_of,
)
from regard._backends.gpu.attention.hopper.warpgroup import ROWS
from regard._backends.gpu.attention.tiles import LOG2E


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
    FOLLOWS: gl.constexpr = F.family == "ratio" and F.shift != "none" and not C.STILL
    stage, before = t % C.STAGES, (t - 1) % C.STAGES
    s = score(t, q, ring, C)
    mbarrier.wait(ring.v_full.index(before), ((t - 1) // C.STAGES) & 1)
    values = ring.v.index(before).reshape([C.BN, C.D])
    o = mix(0, o, p, values, C)
    s = warpgroup_mma_wait(1, deps=[s])
    start = start_of(t, walk, C)
    fade, r = warpgroup.raised(s, r, a * LOG2E, start, C, C.STILL)
    way = warpgroup.manner(s, r, a, theta, ring.v.dtype, C)
    y = warpgroup.pieces(s, PIECES)
    sums = warpgroup.blank(r)
    near = True
    if C.SPAN > 0:
        near = start >= walk.before
    new = ()
    for c in gl.static_range(PIECES):
        if c + 1 < PIECES:
            o = mix(c + 1, o, p, values, C)
        if F.log_odds is not None:
            u, sums = warpgroup.weigh_odds(y[c], sums, a, theta, way, ring.v.dtype, C)
        else:
            u, sums = warpgroup.weigh(
                y[c], r, sums, i, a, theta, start, walk.i0 + part * ROWS, near, c * (C.BN // PIECES), C, False
            )
        new = new + (u,)  # noqa: RUF005 (Triton knows no star)
    r = warpgroup.joined(r, sums, i, start, walk.i0 + part * ROWS, C, False)
    ready(t + 1, ring, walk, C)  # before the wait below: its branches, too, keep that wait in its place
    if PIECES == 1:
        o, _ = warpgroup_mma_wait(0, deps=[o, p[0]])
    elif PIECES == 2:
        o, _, _ = warpgroup_mma_wait(0, deps=[o, p[0], p[1]])
    else:
        o, _, _, _, _ = warpgroup_mma_wait(0, deps=[o, p[0], p[1], p[2], p[3]])
    p = ()
    for c in gl.static_range(PIECES):
        p = p + (operand(new[c], ring, C),)  # noqa: RUF005
    mbarrier.arrive(ring.free.index(stage), count=1)
    if FOLLOWS:
        o = ptx.faded(o, fade)
    return o, p, r


@gluon.jit
def operand(u, ring, C: gl.constexpr):
    """Weights in 16 bits, as the tensor cores take them."""
    F: gl.constexpr = C.F
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16]), 2)
    return gl.convert_layout(ptx.rounded(u, ring.v.dtype, F, C.PARTS == 3 and C.PIECES == 1), LAYOUT)


@gluon.jit
def consume(targets, ring, opt, blocks, part: gl.constexpr, C: gl.constexpr):
    if C.AHEAD:
        base = 0
        for round in range(rounds_of(blocks, C)):
            walk = walk_of(round, base, opt, C)
            consume_block(targets, ring, walk, opt, blocks, part, C)
            base = walk.end + C.FORMS
    else:
        consume_block(targets, ring, walk_of(0, 0, opt, C), opt, blocks, part, C)


@gluon.jit
def consume_block(targets, ring, walk, opt, blocks, part: gl.constexpr, C: gl.constexpr):
    F: gl.constexpr = C.F
    PIECES: gl.constexpr = C.PIECES
    WIDTH: gl.constexpr = C.BN // C.PIECES
    PIECE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    r0 = walk.i0 + part * ROWS
    i = r0 + gl.arange(0, ROWS, gl.SliceLayout(1, PIECE))
    last = i * 0 + opt.keys
    begin = walk.base
    if C.BEHIND:
        last = gl.minimum(i + 1, last)
        if C.BM > C.BN:
            begin = walk.base + gl.maximum(walk.count - 1 - r0 // C.BN, 0)
            pass_by(walk.base, begin, ring, C)
    a = gl.full([ROWS], 1.0, gl.float32, i.type.layout)
    if opt.temperature.ptr is not None:
        a = 1.0 / tiles.load_rows(opt.temperature, walk.b, walk.h, i, i < opt.queries, 1.0).to(gl.float32)
    a = a * tiles.number(opt.scale, gl.float32)
    theta = tiles.number(opt.theta, gl.float32)
    r = warpgroup.nothing(WIDTH, PIECE, F)
    lanes = r.z + gl.expand_dims(gl.convert_layout(a, gl.SliceLayout(1, r.z.type.layout)), 1)
    at = walk.round % 2 * C.PARTS + part
    q = ring.q.index(at).reshape([ROWS, C.D])
    mbarrier.wait(ring.q_full.index(at), (walk.round // 2) & 1)
    ready(begin, ring, walk, C)
    s = warpgroup_mma_wait(0, deps=[score(begin, q, ring, C)])
    mbarrier.arrive(ring.free.index(begin % C.STAGES), count=1)
    start = start_of(begin, walk, C)
    if not C.OWN:
        s = warpgroup.shown(s, last, start)
    _, r = warpgroup.raised(s, r, lanes * LOG2E, start, C, False)
    y = warpgroup.pieces(s, PIECES)
    sums = warpgroup.blank(r)
    p = ()
    for c in gl.static_range(PIECES):
        u, sums = warpgroup.weigh(y[c], r, sums, i, lanes, theta, start, r0, True, c * WIDTH, C, True)
        p = p + (operand(u, ring, C),)  # noqa: RUF005
    r = warpgroup.joined(r, sums, i, start, r0, C, True)
    o = warpgroup.zeros(C.D, OUT)
    ready(begin + 1, ring, walk, C)
    for t in range(begin + 1, walk.end):
        o, p, r = step(t, o, p, r, q, ring, walk, i, lanes, theta, part, C)
    end = walk.end - 1
    mbarrier.wait(ring.v_full.index(end % C.STAGES), (end // C.STAGES) & 1)
    values = ring.v.index(end % C.STAGES).reshape([C.BN, C.D])
    for c in gl.static_range(PIECES):
        o = mix(c, o, p, values, C)
    none = a * 0.0
    formed = (none, none, none)
    if C.SPAN != 0:
        formed = form(q, ring, walk, targets, opt, C)
    o = warpgroup_mma_wait(0, deps=[o])
    finish(formed, o, r, q, i, a, targets, ring, walk, opt, blocks, part, C)


@gluon.jit
def forward_hopper(
    q_blocks, k_blocks, v_blocks, o_blocks, form_blocks, shifts, sums, rough, forms, opt, blocks, C: gl.constexpr
):  # fmt: skip
    TYPE: gl.constexpr = q_blocks.dtype
    PARTS: gl.constexpr = C.PARTS
    STAGES: gl.constexpr = C.STAGES
    QUERIES: gl.constexpr = 2 * C.PARTS if C.AHEAD else C.PARTS
    ring = Ring(
        gl.allocate_shared_memory(TYPE, [QUERIES, 1, 1, ROWS, C.D], q_blocks.layout),
        gl.allocate_shared_memory(TYPE, [STAGES, 1, 1, C.BN, C.D], k_blocks.layout),
        gl.allocate_shared_memory(TYPE, [STAGES, 1, 1, C.BN, C.D], v_blocks.layout),
        barriers(QUERIES, 1),
        barriers(QUERIES, 1),
        barriers(STAGES, 1),
        barriers(STAGES, 1),
        barriers(STAGES, PARTS),
    )
    fence_async_shared()
    targets = Targets(o_blocks, shifts, sums, rough, forms)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (consume, (targets, ring, opt, blocks, 0, C)),
                (consume, (targets, ring, opt, blocks, 1, C)),
                (fetch, (q_blocks, k_blocks, v_blocks, form_blocks, ring, opt, blocks, C)),
            ],
            [4, 1],
            [C.REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (targets, ring, opt, blocks, 0, C)),
                (consume, (targets, ring, opt, blocks, 1, C)),
                (consume, (targets, ring, opt, blocks, 2, C)),
                (fetch, (q_blocks, k_blocks, v_blocks, form_blocks, ring, opt, blocks, C)),
            ],
            [4, 4, 1],
            [C.REGISTERS, C.REGISTERS, 24],
        )
