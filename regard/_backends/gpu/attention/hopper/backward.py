"""dk = Σ dsᵀ·q and dv = Σ pᵀ·do on Hopper, in Gluon: two warpgroups of 64 keys each, and a warp that fetches for both.

    fetch    q, do and what is known of their rows → ring of shared memory
    each     x = k·qᵀ, dp = v·doᵀ (tile t), dk += ds·q (tile t − 1)        keys first
             p of x                                                         while dp and dk are under way
             dv += p·do, ds of p and dp
             ds → shared memory, and on to scratch                          where `backward_product` makes dq of it

A tile of queries that reaches over the end comes as zeros, and so do the numbers of its rows: p = 1 meets do = 0, and
dp = δ = 0.
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

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.backward.slopes import Rows, slope_tile, weigh
from regard._backends.gpu.attention.hopper.epilogue import copy_out
from regard._backends.gpu.attention.hopper.ring import barriers, copy_in
from regard._backends.gpu.attention.hopper.warpgroup import ROWS, zeros

KEYS = ROWS  # of one warpgroup


class Shape(NamedTuple):
    """What the kernel is compiled for; names as in `tiles.Config`."""

    F: Any
    FOLDED: bool
    BEHIND: bool
    D: int
    NUMBERS: int  # of a row
    PARTS: int  # warpgroups, two
    STAGES: int  # of the ring
    REGISTERS: int  # of a thread


class Ring(NamedTuple):
    """Shared memory and its barriers: the copy engine sets `full`, the warpgroups `free`."""

    k: Any  # [PARTS, 1, 1, 64, D]
    v: Any
    q: Any  # [STAGES, 1, 1, M, D]
    do: Any
    rows: Any  # [STAGES · NUMBERS, 1, M], the numbers of a row: shift, δ, 1/Z
    ds: Any  # [PARTS, 1, 64, M]
    k_full: Any
    full: Any
    free: Any


class Blocks(NamedTuple):
    """What the kernel reads and writes, as the bulk copy engine knows it."""

    k: Any  # [B, G, N, D] by [1, 1, 64, D], and so v, dk and dv
    v: Any
    q: Any  # [B, H, M, D] by [1, 1, 64, D], and so do
    do: Any
    shift: Any  # [B · H, M] by [1, 64], and so δ and 1/Z
    delta: Any
    inverse: Any
    slopes: Any  # ds, [B · H, N, M] by [1, 64, 64]
    dk: Any
    dv: Any


class Walk(NamedTuple):
    """Keys from j0 on, and the tiles of queries that see them, from `begin` on, in each head of the group."""

    b: Any
    g: Any
    j0: Any
    begin: Any
    tiles: Any


@gluon.jit
def walk_of(opt, C: gl.constexpr):
    blocks = gl.cdiv(opt.keys, C.PARTS * KEYS)
    block = gl.program_id(0)
    j0 = block % blocks * (C.PARTS * KEYS)  # the first keys have the most causal queries
    groups = opt.heads // opt.group
    begin = 0
    if C.BEHIND:
        begin = j0 // ROWS
    count = gl.maximum(gl.cdiv(opt.queries, ROWS) - begin, 0)
    return Walk(block // blocks // groups, (block // blocks) % groups, j0, begin, count)


@gluon.jit
def fetch(blocks, ring, opt, C: gl.constexpr):
    PARTS: gl.constexpr = C.PARTS
    NUMBERS: gl.constexpr = C.NUMBERS
    walk = walk_of(opt, C)
    for part in gl.static_range(PARTS):
        j = walk.j0 + part * KEYS
        mbarrier.expect(ring.k_full.index(part), 2 * KEYS * C.D * 2)
        copy_in(blocks.k, [walk.b, walk.g, j, 0], ring.k_full.index(part), ring.k.index(part))
        copy_in(blocks.v, [walk.b, walk.g, j, 0], ring.k_full.index(part), ring.v.index(part))
    for t in range(walk.tiles * opt.group):
        stage = t % C.STAGES
        full = ring.full.index(stage)
        h = walk.g * opt.group + t // walk.tiles
        i = (walk.begin + t % walk.tiles) * ROWS
        mbarrier.wait(ring.free.index(stage), ((t // C.STAGES) & 1) ^ 1)
        mbarrier.expect(full, ROWS * (4 * C.D + 4 * NUMBERS))
        copy_in(blocks.q, [walk.b, h, i, 0], full, ring.q.index(stage))
        copy_in(blocks.do, [walk.b, h, i, 0], full, ring.do.index(stage))
        copy_in(blocks.shift, [walk.b * opt.heads + h, i], full, ring.rows.index(stage * NUMBERS))
        copy_in(blocks.delta, [walk.b * opt.heads + h, i], full, ring.rows.index(stage * NUMBERS + 1))
        if NUMBERS == 3:
            copy_in(blocks.inverse, [walk.b * opt.heads + h, i], full, ring.rows.index(stage * NUMBERS + 2))


@gluon.jit
def number(stage, at: gl.constexpr, ring, LAYOUT: gl.constexpr, C: gl.constexpr):
    """The at-th number of every row of a tile, along its columns: [1, M]."""
    x = ring.rows.index(stage * C.NUMBERS + at).reshape([ROWS])
    return gl.expand_dims(x.load(gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def rows_of(stage, ring, opt, LAYOUT: gl.constexpr, C: gl.constexpr):
    """What `weigh` asks of the rows of a tile."""
    shift = number(stage, 0, ring, LAYOUT, C)
    inverse = shift
    if C.NUMBERS == 3:
        inverse = number(stage, 2, ring, LAYOUT, C)
    return Rows(tiles.number(opt.scale, gl.float32), shift, inverse, shift, shift, shift, shift, shift, shift)


@gluon.jit
def with_delta(r, stage, ring, LAYOUT: gl.constexpr, C: gl.constexpr):
    """And what `slope_tile` asks: read when it is needed, as registers are few."""
    delta = number(stage, 1, ring, LAYOUT, C)
    return Rows(r.a, r.shift, r.inverse, delta, r.first, r.last, delta, delta, delta)


@gluon.jit
def step(
    t, pending, blocks, keys, values, ring, head, i0, j0, opt, part: gl.constexpr, C: gl.constexpr, EDGE: gl.constexpr
):
    """One tile of queries: dv += p·do at once; dk += ds·q of the tile before, while this one is weighed."""
    F: gl.constexpr = C.F
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16]), 2)
    dk, dv, last = pending
    stage = t % C.STAGES
    before = gl.where(last < 0, stage, last % C.STAGES)  # of the first tile: its own, times 0
    mbarrier.wait(ring.full.index(stage), (t // C.STAGES) & 1)
    q = ring.q.index(stage).reshape([ROWS, C.D])
    do = ring.do.index(stage).reshape([ROWS, C.D])
    left = ring.ds.index(part).reshape([KEYS, ROWS])
    x = warpgroup_mma(keys, q.permute((1, 0)), zeros(ROWS, S), use_acc=False, is_async=True)
    dp = warpgroup_mma(values, do.permute((1, 0)), zeros(ROWS, S), use_acc=False, is_async=True)
    dk = warpgroup_mma(left, ring.q.index(before).reshape([ROWS, C.D]), dk, is_async=True)
    r = rows_of(stage, ring, opt, S, C)
    seen = gl.full([KEYS, ROWS], 1, gl.int1, S)
    if EDGE:
        i = gl.expand_dims(i0 + gl.arange(0, ROWS, gl.SliceLayout(0, S)), 0)
        j = gl.expand_dims(j0 + gl.arange(0, KEYS, gl.SliceLayout(1, S)), 1)
        seen = j < opt.keys
        if C.BEHIND:
            seen = seen & (j <= i)
    x = warpgroup_mma_wait(2, deps=[x])
    p, up, down, power = weigh(x, seen, r, tiles.number(opt.theta, gl.float32), F, C.FOLDED, False)
    u = gl.convert_layout(p.to(ring.k.dtype), OPERAND)
    r = with_delta(r, stage, ring, S, C)
    dp = warpgroup_mma_wait(1, deps=[dp])
    dv = warpgroup_mma(u, do, dv, is_async=True)
    # no statistics' gradients: their sums do not fit the registers
    ds = slope_tile(x, seen, dp, p, up, down, power, r, F, False).to(ring.k.dtype)
    dk = warpgroup_mma_wait(1, deps=[dk])
    if blocks.slopes is not None:
        tma.store_wait(0)
    left.store(ds)
    fence_async_shared()  # before the arrival: the other way round ptxas 12.8 fails where nothing is stored
    mbarrier.arrive(ring.free.index(before), count=1, pred=last >= 0)
    if blocks.slopes is not None:
        copy_out(blocks.slopes, [head, j0, i0], ring.ds.index(part))
    dv, _ = warpgroup_mma_wait(0, deps=[dv, u])
    return dk, dv, t


@gluon.jit
def consume(blocks, ring, opt, part: gl.constexpr, C: gl.constexpr):
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    walk = walk_of(opt, C)
    j0 = walk.j0 + part * KEYS
    keys = ring.k.index(part).reshape([KEYS, C.D])
    values = ring.v.index(part).reshape([KEYS, C.D])
    left = ring.ds.index(part).reshape([KEYS, ROWS])
    left.store(zeros(ROWS, S).to(ring.k.dtype))
    fence_async_shared()
    pending = (zeros(C.D, OUT), zeros(C.D, OUT), walk.begin * 0 - 1)
    mbarrier.wait(ring.k_full.index(part), 0)
    for h in range(opt.group):
        head = (walk.b * (opt.heads // opt.group) + walk.g) * opt.group + h
        begin = h * walk.tiles
        end = begin + walk.tiles
        first = begin
        inner = begin
        if C.BEHIND:  # the tiles before its own are not this warpgroup's; its own is masked
            first = gl.minimum(begin + part, end)
            inner = gl.minimum(first + 1, end)
            for t in range(begin, first):
                mbarrier.wait(ring.full.index(t % C.STAGES), (t // C.STAGES) & 1)
                mbarrier.arrive(ring.free.index(t % C.STAGES), count=1)
        if j0 + KEYS > opt.keys:
            inner = end
        i0 = (walk.begin - begin) * ROWS
        for t in range(first, inner):
            pending = step(t, pending, blocks, keys, values, ring, head, i0 + t * ROWS, j0, opt, part, C, True)
        for t in range(inner, end):
            pending = step(t, pending, blocks, keys, values, ring, head, i0 + t * ROWS, j0, opt, part, C, False)
    dk, dv, last = pending
    if last >= 0:
        dk = warpgroup_mma(left, ring.q.index(last % C.STAGES).reshape([ROWS, C.D]), dk, is_async=True)
        dk = warpgroup_mma_wait(0, deps=[dk])
    keys.store((dk * tiles.number(opt.scale, gl.float32)).to(ring.k.dtype))  # keys and values are not needed any more
    values.store(dv.to(ring.k.dtype))
    fence_async_shared()
    copy_out(blocks.dk, [walk.b, walk.g, j0, 0], ring.k.index(part))
    copy_out(blocks.dv, [walk.b, walk.g, j0, 0], ring.v.index(part))
    tma.store_wait(0)


@gluon.jit
def backward_hopper(k, v, q, do, shift, delta, inverse, slopes, dk, dv, opt, C: gl.constexpr):
    """The first ten are tensor descriptors; without 1/Z or scratch None."""
    TYPE: gl.constexpr = q.dtype
    PARTS: gl.constexpr = C.PARTS
    STAGES: gl.constexpr = C.STAGES
    NUMBERS: gl.constexpr = C.NUMBERS
    blocks = Blocks(k, v, q, do, shift, delta, inverse, slopes, dk, dv)
    ring = Ring(
        gl.allocate_shared_memory(TYPE, [PARTS, 1, 1, KEYS, C.D], k.layout),
        gl.allocate_shared_memory(TYPE, [PARTS, 1, 1, KEYS, C.D], v.layout),
        gl.allocate_shared_memory(TYPE, [STAGES, 1, 1, ROWS, C.D], q.layout),
        gl.allocate_shared_memory(TYPE, [STAGES, 1, 1, ROWS, C.D], do.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES * NUMBERS, 1, ROWS], shift.layout),
        gl.allocate_shared_memory(TYPE, [PARTS, 1, KEYS, ROWS], gl.NVMMASharedLayout(128, 16, 3)),
        barriers(PARTS, 1),
        barriers(STAGES, 1),
        barriers(STAGES, PARTS),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (blocks, ring, opt, 0, C)),
            (consume, (blocks, ring, opt, 1, C)),
            (fetch, (blocks, ring, opt, C)),
        ],
        [4, 1],
        [C.REGISTERS, 24],
    )
