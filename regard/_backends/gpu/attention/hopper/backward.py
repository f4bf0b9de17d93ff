"""dk = Σ dsᵀ·q and dv = Σ pᵀ·do in Gluon for Hopper: two consumer warpgroups of 64 keys each, one producer warp.

    producer    q, do and their row state → ring buffer
    consumer    x = k·qᵀ, dp = v·doᵀ (tile t), dk += ds·q (tile t − 1)      keys are the rows of a tile
                p of x                                                       while dp and dk are computed
                dv += p·do, ds of p and dp
                ds → shared memory → scratch                                 from which `backward_product` makes dq

Queries beyond the last are loaded as zeros, and so is their row state: p = 1, but do = 0, dp = 0 and δ = 0.
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
from regard._backends.gpu.attention.hopper.fragment import ROWS, zeros
from regard._backends.gpu.attention.hopper.ring import async_load, async_store, make_barriers

KEYS = ROWS  # of one warpgroup


class BackwardConfig(NamedTuple):
    """Compile-time constants of `backward_hopper`; F and FOLDED as in `tiles.Config`."""

    F: Any
    FOLDED: bool
    CAUSAL: bool
    D: int
    NUMBERS: int  # of a row's state: 2 or 3
    WARPGROUPS: int  # consumers: 2
    STAGES: int  # of the ring
    REGISTERS: int  # of a consumer's thread


class Ring(NamedTuple):
    """Shared-memory buffers and their barriers: copies complete `full`, consumers arrive at `free`."""

    k: Any  # [WARPGROUPS, 1, 1, 64, D]
    v: Any
    q: Any  # [STAGES, 1, 1, M, D]
    do: Any
    rows: Any  # [STAGES · NUMBERS, 1, M], the row state: shift, δ, 1/Z
    ds: Any  # [WARPGROUPS, 1, 64, M]
    k_full: Any
    full: Any
    free: Any


class Blocks(NamedTuple):
    """Tensor descriptors of everything that the kernel reads and writes."""

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


class Work(NamedTuple):
    """One block of keys, from j0 on, and the query tiles that see it, from `begin` on, in each head of the group."""

    b: Any
    g: Any
    j0: Any
    begin: Any
    tiles: Any


@gluon.jit
def get_work(opt, C: gl.constexpr):
    """The block of keys of this program."""
    blocks = gl.cdiv(opt.keys, C.WARPGROUPS * KEYS)
    block = gl.program_id(0)
    j0 = block % blocks * (C.WARPGROUPS * KEYS)  # the first keys have the most causal queries
    groups = opt.heads // opt.group
    begin = 0
    if C.CAUSAL:
        begin = j0 // ROWS
    count = gl.maximum(gl.cdiv(opt.queries, ROWS) - begin, 0)
    return Work(block // blocks // groups, (block // blocks) % groups, j0, begin, count)


@gluon.jit
def produce(blocks, ring, opt, C: gl.constexpr):
    """The producer warp: loads the block's keys and values, then every query tile."""
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    NUMBERS: gl.constexpr = C.NUMBERS
    work = get_work(opt, C)
    for group in gl.static_range(WARPGROUPS):
        j = work.j0 + group * KEYS
        mbarrier.expect(ring.k_full.index(group), 2 * KEYS * C.D * 2)
        async_load(blocks.k, [work.b, work.g, j, 0], ring.k_full.index(group), ring.k.index(group))
        async_load(blocks.v, [work.b, work.g, j, 0], ring.k_full.index(group), ring.v.index(group))
    for t in range(work.tiles * opt.group):
        stage = t % C.STAGES
        full = ring.full.index(stage)
        h = work.g * opt.group + t // work.tiles
        i = (work.begin + t % work.tiles) * ROWS
        mbarrier.wait(ring.free.index(stage), ((t // C.STAGES) & 1) ^ 1)
        mbarrier.expect(full, ROWS * (4 * C.D + 4 * NUMBERS))
        async_load(blocks.q, [work.b, h, i, 0], full, ring.q.index(stage))
        async_load(blocks.do, [work.b, h, i, 0], full, ring.do.index(stage))
        async_load(blocks.shift, [work.b * opt.heads + h, i], full, ring.rows.index(stage * NUMBERS))
        async_load(blocks.delta, [work.b * opt.heads + h, i], full, ring.rows.index(stage * NUMBERS + 1))
        if NUMBERS == 3:
            async_load(blocks.inverse, [work.b * opt.heads + h, i], full, ring.rows.index(stage * NUMBERS + 2))


@gluon.jit
def load_row_number(stage, at: gl.constexpr, ring, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Number `at` of the state of a tile's queries, [1, M]."""
    x = ring.rows.index(stage * C.NUMBERS + at).reshape([ROWS])
    return gl.expand_dims(x.load(gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def load_rows(stage, ring, opt, LAYOUT: gl.constexpr, C: gl.constexpr):
    """The row state that `weigh` reads."""
    shift = load_row_number(stage, 0, ring, LAYOUT, C)
    inverse = shift
    if C.NUMBERS == 3:
        inverse = load_row_number(stage, 2, ring, LAYOUT, C)
    return Rows(tiles.number(opt.scale, gl.float32), shift, inverse, shift, shift, shift, shift, shift, shift)


@gluon.jit
def load_delta(r, stage, ring, LAYOUT: gl.constexpr, C: gl.constexpr):
    """r with the δ that `slope_tile` reads, loaded late because registers are few."""
    delta = load_row_number(stage, 1, ring, LAYOUT, C)
    return Rows(r.a, r.shift, r.inverse, delta, r.first, r.last, delta, delta, delta)


@gluon.jit
def process_tile(
    t, pending, blocks, keys, values, ring, head, i0, j0, opt, group: gl.constexpr, C: gl.constexpr, EDGE: gl.constexpr
):
    """(dk, dv, t) after query tile t: adds p·do of this tile to dv and ds·q of the tile before to dk."""
    F: gl.constexpr = C.F
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16]), 2)
    dk, dv, last = pending
    stage = t % C.STAGES
    before = gl.where(last < 0, stage, last % C.STAGES)  # the first tile adds 0·q
    mbarrier.wait(ring.full.index(stage), (t // C.STAGES) & 1)
    q = ring.q.index(stage).reshape([ROWS, C.D])
    do = ring.do.index(stage).reshape([ROWS, C.D])
    ds_buffer = ring.ds.index(group).reshape([KEYS, ROWS])
    x = warpgroup_mma(keys, q.permute((1, 0)), zeros(ROWS, S), use_acc=False, is_async=True)
    dp = warpgroup_mma(values, do.permute((1, 0)), zeros(ROWS, S), use_acc=False, is_async=True)
    dk = warpgroup_mma(ds_buffer, ring.q.index(before).reshape([ROWS, C.D]), dk, is_async=True)
    r = load_rows(stage, ring, opt, S, C)
    visible = gl.full([KEYS, ROWS], 1, gl.int1, S)
    if EDGE:
        i = gl.expand_dims(i0 + gl.arange(0, ROWS, gl.SliceLayout(0, S)), 0)
        j = gl.expand_dims(j0 + gl.arange(0, KEYS, gl.SliceLayout(1, S)), 1)
        visible = j < opt.keys
        if C.CAUSAL:
            visible = visible & (j <= i)
    x = warpgroup_mma_wait(2, deps=[x])
    p, up, down, power = weigh(x, visible, r, tiles.number(opt.theta, gl.float32), F, C.FOLDED, False)
    u = gl.convert_layout(p.to(ring.k.dtype), OPERAND)
    r = load_delta(r, stage, ring, S, C)
    dp = warpgroup_mma_wait(1, deps=[dp])
    dv = warpgroup_mma(u, do, dv, is_async=True)
    # without gradients of statistics: their sums do not fit the registers
    ds = slope_tile(x, visible, dp, p, up, down, power, r, F, False).to(ring.k.dtype)
    dk = warpgroup_mma_wait(1, deps=[dk])
    if blocks.slopes is not None:
        tma.store_wait(0)
    ds_buffer.store(ds)
    fence_async_shared()  # before the arrival: ptxas 12.8 fails on the other order if nothing is stored
    mbarrier.arrive(ring.free.index(before), count=1, pred=last >= 0)
    if blocks.slopes is not None:
        async_store(blocks.slopes, [head, j0, i0], ring.ds.index(group))
    dv, _ = warpgroup_mma_wait(0, deps=[dv, u])
    return dk, dv, t


@gluon.jit
def consume(blocks, ring, opt, group: gl.constexpr, C: gl.constexpr):
    """One consumer warpgroup: dk and dv of its 64 keys."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    work = get_work(opt, C)
    j0 = work.j0 + group * KEYS
    keys = ring.k.index(group).reshape([KEYS, C.D])
    values = ring.v.index(group).reshape([KEYS, C.D])
    ds_buffer = ring.ds.index(group).reshape([KEYS, ROWS])
    ds_buffer.store(zeros(ROWS, S).to(ring.k.dtype))
    fence_async_shared()
    pending = (zeros(C.D, OUT), zeros(C.D, OUT), work.begin * 0 - 1)
    mbarrier.wait(ring.k_full.index(group), 0)
    for h in range(opt.group):
        head = (work.b * (opt.heads // opt.group) + work.g) * opt.group + h
        begin = h * work.tiles
        end = begin + work.tiles
        first = begin
        inner = begin
        if C.CAUSAL:  # earlier tiles do not see these keys; the first that does is masked
            first = gl.minimum(begin + group, end)
            inner = gl.minimum(first + 1, end)
            for t in range(begin, first):
                mbarrier.wait(ring.full.index(t % C.STAGES), (t // C.STAGES) & 1)
                mbarrier.arrive(ring.free.index(t % C.STAGES), count=1)
        if j0 + KEYS > opt.keys:
            inner = end
        i0 = (work.begin - begin) * ROWS
        for t in range(first, inner):
            pending = process_tile(t, pending, blocks, keys, values, ring, head, i0 + t * ROWS, j0, opt, group, C, True)
        for t in range(inner, end):
            pending = process_tile(
                t, pending, blocks, keys, values, ring, head, i0 + t * ROWS, j0, opt, group, C, False
            )
    dk, dv, last = pending
    if last >= 0:
        dk = warpgroup_mma(ds_buffer, ring.q.index(last % C.STAGES).reshape([ROWS, C.D]), dk, is_async=True)
        dk = warpgroup_mma_wait(0, deps=[dk])
    # the buffers of keys and values are free now
    keys.store((dk * tiles.number(opt.scale, gl.float32)).to(ring.k.dtype))
    values.store(dv.to(ring.k.dtype))
    fence_async_shared()
    async_store(blocks.dk, [work.b, work.g, j0, 0], ring.k.index(group))
    async_store(blocks.dv, [work.b, work.g, j0, 0], ring.v.index(group))
    tma.store_wait(0)


@gluon.jit
def backward_hopper(k, v, q, do, shift, delta, inverse, slopes, dk, dv, opt, C: gl.constexpr):
    """Computes dk, dv and, if `slopes` is not None, stores ds. The first ten arguments are tensor descriptors."""
    TYPE: gl.constexpr = q.dtype
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    STAGES: gl.constexpr = C.STAGES
    NUMBERS: gl.constexpr = C.NUMBERS
    blocks = Blocks(k, v, q, do, shift, delta, inverse, slopes, dk, dv)
    ring = Ring(
        gl.allocate_shared_memory(TYPE, [WARPGROUPS, 1, 1, KEYS, C.D], k.layout),
        gl.allocate_shared_memory(TYPE, [WARPGROUPS, 1, 1, KEYS, C.D], v.layout),
        gl.allocate_shared_memory(TYPE, [STAGES, 1, 1, ROWS, C.D], q.layout),
        gl.allocate_shared_memory(TYPE, [STAGES, 1, 1, ROWS, C.D], do.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES * NUMBERS, 1, ROWS], shift.layout),
        gl.allocate_shared_memory(TYPE, [WARPGROUPS, 1, KEYS, ROWS], gl.NVMMASharedLayout(128, 16, 3)),
        make_barriers(WARPGROUPS, 1),
        make_barriers(STAGES, 1),
        make_barriers(STAGES, WARPGROUPS),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (blocks, ring, opt, 0, C)),
            (consume, (blocks, ring, opt, 1, C)),
            (produce, (blocks, ring, opt, C)),
        ],
        [4, 1],
        [C.REGISTERS, 24],
    )
