"""dk = Σ dsᵀ·q and dv = Σ pᵀ·do in Gluon for Hopper: two consumer warpgroups of 64 keys each, one producer warp.

    producer    q, do and their row state → ring buffer
    consumer    x = k·qᵀ, dp = v·doᵀ (tile t), dk += ds·q (tile t − 1)      keys are the rows of a tile
                p of x                                                       while dp and dk are computed
                dv += p·do, ds of p and dp
                ds → shared memory → scratch                                 from which `backward_product` makes dq

Queries beyond the last are loaded as zeros, and so is their row state: p = 1, but do = 0, dp = 0 and δ = 0. With a bias
per key, whose p may be infinite, `spans` hide them; a bias by relative position has to leave exp(bias) finite.

With intervals of keys (`spans`) a block of keys visits the query tiles from the first to the last that see one of them,
and masks all but one run of tiles that see every key of the block.
"""

from __future__ import annotations

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
from regard._backends.gpu.attention.backward.slopes import slope_tile, weigh
from regard._backends.gpu.attention.hopper.backward.ring import (
    KEYS,
    Blocks,
    Ring,
    get_work,
    load_bias,
    load_delta,
    load_rows,
    produce,
)
from regard._backends.gpu.attention.hopper.fragment import ROWS, zeros
from regard._backends.gpu.attention.hopper.relative_scores import find_table, load_relative, prefetch_relative
from regard._backends.gpu.attention.hopper.ring import async_store, make_barriers
from regard._backends.gpu.attention.hopper.row_sums import cap_scores
from regard._backends.gpu.attention.hopper.spans import find_plane, find_row
from regard._backends.gpu.attention.tiles import HIDDEN


@gluon.jit
def process_tile(
    t, pending, blocks, keys, values, ring, head, i0, j0, bias, table, opt, group: gl.constexpr, C: gl.constexpr,
    EDGE: gl.constexpr,
):  # fmt: skip
    """(dk, dv, d_bias, t) after query tile t: adds p·do of this tile to dv and ds·q of the tile before to dk."""
    F: gl.constexpr = C.F
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16]), 2)
    dk, dv, d_bias, last = pending
    stage = t % C.STAGES
    before = gl.where(last < 0, stage, last % C.STAGES)  # the first tile adds 0·q
    x = zeros(ROWS, S)
    if C.RELATIVE:  # the product is added to the bias, which takes no registers of its own
        x = load_relative(x, table, j0 + gl.arange(0, KEYS, gl.SliceLayout(1, S)), i0)
        prefetch_relative(table, i0 + ROWS, j0)
    mbarrier.wait(ring.full.index(stage), (t // C.STAGES) & 1)
    q = ring.q.index(stage).reshape([ROWS, C.D])
    do = ring.do.index(stage).reshape([ROWS, C.D])
    ds_buffer = ring.ds.index(group).reshape([KEYS, ROWS])
    x = warpgroup_mma(keys, q.permute((1, 0)), x, use_acc=C.RELATIVE, is_async=True)
    dp = warpgroup_mma(values, do.permute((1, 0)), zeros(ROWS, S), use_acc=False, is_async=True)
    dk = warpgroup_mma(ds_buffer, ring.q.index(before).reshape([ROWS, C.D]), dk, is_async=True)
    r = load_rows(stage, ring, opt, S, C)
    theta = tiles.load_head_theta(head // opt.heads, head % opt.heads, opt, gl.float32)
    visible = gl.full([KEYS, ROWS], 1, gl.int1, S)
    seen = visible
    if EDGE and C.INTERVAL:
        row = find_row(blocks.spans, head // opt.heads, head % opt.heads, i0 + gl.arange(0, ROWS, gl.SliceLayout(0, S)))
        j = gl.expand_dims(j0 + gl.arange(0, KEYS, gl.SliceLayout(1, S)), 1)
        seen = j >= gl.expand_dims(gl.load(row), 0)
        seen = seen & (j < gl.expand_dims(gl.load(row + find_plane(blocks.spans)), 0))
    elif EDGE:
        i = gl.expand_dims(i0 + gl.arange(0, ROWS, gl.SliceLayout(0, S)), 0)
        j = gl.expand_dims(j0 + gl.arange(0, KEYS, gl.SliceLayout(1, S)), 1)
        visible = j < opt.keys
        if C.CAUSAL:
            visible = visible & (j <= i)
    x = warpgroup_mma_wait(2, deps=[x])
    x = cap_scores(x, opt)
    y = x
    if bias is not None:  # one number per key, in units of y
        y = x + gl.expand_dims(bias, 1)
        y = gl.where(gl.expand_dims(bias, 1) == HIDDEN, HIDDEN, y)
    if EDGE and C.INTERVAL:
        y = gl.where(seen, y, HIDDEN)
    p, up, down, power = weigh(y, visible, r, theta, F, C.FOLDED, False)
    if opt.cap is not None:
        tangent = x * (1.0 / tiles.number(opt.cap, gl.float32))
        up = p * (1.0 - tangent * tangent)
    u = gl.convert_layout(p.to(ring.k.dtype), OPERAND)
    r = load_delta(r, stage, ring, S, C)
    dp = warpgroup_mma_wait(1, deps=[dp])
    dv = warpgroup_mma(u, do, dv, is_async=True)
    # without gradients of statistics: their sums do not fit the registers
    ds = slope_tile(y, visible, dp, p, up, down, power, r, F, False)
    if (C.INTERVAL and (EDGE or C.RELATIVE)) or bias is not None:  # hidden keys may hold NaN
        ds = gl.where(up == 0.0, 0.0, ds)
    if blocks.d_bias is not None:
        d_bias += gl.sum(ds, 1)
    ds = ds.to(ring.k.dtype)
    dk = warpgroup_mma_wait(1, deps=[dk])
    if blocks.slopes is not None:
        tma.store_wait(0)
    ds_buffer.store(ds)
    fence_async_shared()  # before the arrival: ptxas 12.8 fails on the other order if nothing is stored
    mbarrier.arrive(ring.free.index(before), count=1, pred=last >= 0)
    if blocks.slopes is not None:
        column = i0
        if blocks.band is not None:
            column = i0 - (j0 - group * KEYS) + blocks.band
        async_store(blocks.slopes, [head, j0, column], ring.ds.index(group))
    dv, _ = warpgroup_mma_wait(0, deps=[dv, u])
    return dk, dv, d_bias, t


@gluon.jit
def consume(blocks, ring, opt, group: gl.constexpr, C: gl.constexpr):
    """One consumer warpgroup: dk and dv of its 64 keys."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    work = get_work(blocks.ranges, opt, C)
    j0 = work.j0 + group * KEYS
    keys = ring.k.index(group).reshape([KEYS, C.D])
    values = ring.v.index(group).reshape([KEYS, C.D])
    ds_buffer = ring.ds.index(group).reshape([KEYS, ROWS])
    ds_buffer.store(zeros(ROWS, S).to(ring.k.dtype))
    fence_async_shared()
    none = gl.zeros([KEYS], gl.float32, gl.SliceLayout(1, S))
    pending = (zeros(C.D, OUT), zeros(C.D, OUT), none, work.begin * 0 - 1)
    mbarrier.wait(ring.k_full.index(group), 0)
    for h in range(opt.group):
        head = (work.b * (opt.heads // opt.group) + work.g) * opt.group + h
        begin = h * work.tiles
        end = begin + work.tiles
        first = begin
        inner = begin
        bias = load_bias(work.b, work.g * opt.group + h, j0, opt, C)
        table = None
        if C.RELATIVE:
            table = find_table(blocks.relative, work.g * opt.group + h, opt)
        if C.CAUSAL:  # earlier tiles do not see these keys; the first that does is masked
            first = gl.minimum(begin + group, end)
            inner = gl.minimum(first + 1, end)
            for t in range(begin, first):
                mbarrier.wait(ring.full.index(t % C.STAGES), (t // C.STAGES) & 1)
                mbarrier.arrive(ring.free.index(t % C.STAGES), count=1)
        if j0 + KEYS > opt.keys:
            inner = end
        i0 = (work.begin - begin) * ROWS
        outer = end
        if C.INTERVAL:  # no tile is whole if the keys end within the block
            inner, outer = begin + work.inner, begin + work.outer
        # three loops: Triton 3.6 miscompiles these products inside a branch
        for t in range(first, inner):
            pending = process_tile(
                t, pending, blocks, keys, values, ring, head, i0 + t * ROWS, j0, bias, table, opt, group, C, True
            )
        for t in range(inner, outer):
            pending = process_tile(
                t, pending, blocks, keys, values, ring, head, i0 + t * ROWS, j0, bias, table, opt, group, C, False
            )
        if C.INTERVAL:
            for t in range(outer, end):
                pending = process_tile(
                    t, pending, blocks, keys, values, ring, head, i0 + t * ROWS, j0, bias, table, opt, group, C, True
                )
        if blocks.d_bias is not None:
            dk, dv, d_bias, last = pending
            j = j0 + gl.arange(0, KEYS, gl.SliceLayout(1, S))
            gl.store(blocks.d_bias + tiles.wide(head) * opt.keys + j, d_bias, mask=j < opt.keys)
            pending = (dk, dv, none, last)
    dk, dv, _, last = pending
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
def backward_hopper(
    k, v, q, do, shift, delta, inverse, slopes, band, dk, dv, spans, ranges, d_bias, relative, opt, C: gl.constexpr
):  # fmt: skip
    """Computes dk, dv and, if `slopes` is not None, stores ds. All up to dv but `band` are descriptors."""
    TYPE: gl.constexpr = q.dtype
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    STAGES: gl.constexpr = C.STAGES
    NUMBERS: gl.constexpr = C.NUMBERS
    blocks = Blocks(k, v, q, do, shift, delta, inverse, slopes, band, dk, dv, spans, ranges, d_bias, relative)
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
