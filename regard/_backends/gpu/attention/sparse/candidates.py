"""{j : y_ij > bound_i}: one sweep over the products y = q·k that lists each row's candidate keys, in Gluon for Hopper.

A threshold map gives weight to few keys. The sweep lists those above a lower bound of τ; τ, o, the statistics and dq
are computed from the lists alone. With rows and columns exchanged the sweep lists the queries that give weight to each
key, for dk and dv.

Each of the four threads that hold a row of the tensor core's result appends to its own list, so that no thread waits
for another and every list is in the order of the keys.
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

from regard._backends.gpu.attention import tiles, visibility
from regard._backends.gpu.attention.hopper.ring import async_load
from regard._backends.gpu.attention.hopper.row_sums import cap_scores
from regard._backends.gpu.attention.tiles import LOG2E


@gluon.constexpr_function
def quarters_layout(warps):
    """Layout [16·warps, 4] of the threads that hold the quarters of a row of the tensor core's result."""
    higher = [[16 << bit, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], higher, [], [16 * warps, 4])


@gluon.jit
def visible_interval(b, h, i, opt, n, TRANSPOSED: gl.constexpr):
    """(first, last): query i sees keys first ≤ j < last; transposed, queries first ≤ j < last see key i."""
    if TRANSPOSED:
        first = i * 0
        last = i * 0 + opt.queries
        if opt.right is not None:
            first = gl.maximum(i - opt.right, 0)
        if opt.left is not None:
            last = gl.minimum(i + opt.left + 1, opt.queries)
        last = gl.where(i < n, last, 0)
    else:
        first, last = visibility.visible_range(b, h, i, opt, n)
        last = gl.where(i < opt.queries, last, 0)
    return first, last


@gluon.constexpr_function
def append_code(many, stride, threads, staged):
    """PTX that appends those of a thread's `many` scores of each of two rows that exceed the bound, or are NaN.

    For `staged` scores at a time, a pass without branches puts the candidates into shared memory and marks them in m; a
    loop over the marks stores (y, j). The keys of a thread's scores are j plus 0, 1, 8, 9, 16, …
    """
    parts = []
    for row in range(2):
        bound, low, high, j = (f"${2 * (many + 1 + n) + row}" for n in range(4))
        parts.append(f"mov.b32 end, {low};")
        for first in range(0, many, staged):
            parts.append("mov.b32 m, 0;")
            for k in range(staged):
                y = f"${2 * (first + k + 1) + row}"
                parts.append(f"setp.gtu.f32 p, {y}, {bound}; @p st.shared.f32 [mine+{4 * threads * k}], {y};")
                parts.append(f"@p or.b32 m, m, {1 << k};")
            parts.append(f"""
                NEXT{row}_{first}:
                setp.eq.b32 p, m, 0;
                @p bra DONE{row}_{first};
                brev.b32 at, m;
                clz.b32 at, at;
                and.b32 odd, at, 1;
                mad.lo.s32 key, at, 4, {j};
                mad.lo.s32 key, odd, -3, key;
                add.s32 key, key, {4 * first};
                mad.lo.s32 at, at, {4 * threads}, mine;
                ld.shared.b32 y, [at];
                mov.b64 a, {{end, {high}}};
                st.global.v2.b32 [a], {{y, key}};
                add.s32 end, end, {stride};
                sub.s32 at, m, 1;
                and.b32 m, m, at;
                bra NEXT{row}_{first};
                DONE{row}_{first}:""")
        parts.append(f"mov.b32 ${row}, end;")
    return (
        f"""{{
        .reg .pred p;
        .reg .b32 m, at, y, key, odd, end, mine;
        .reg .b64 a;
        .shared .align 4 .b32 buffer[{threads * staged}];
        mov.u32 mine, %tid.x;
        mov.b32 at, buffer;
        mad.lo.s32 mine, mine, 4, at;
        """
        + "\n".join(parts)
        + "}"
    )


@gluon.jit
def thread_scores(x, like, M: gl.constexpr, PARTS: gl.constexpr):
    """The numbers of x [M, PARTS, 8] that one thread holds of a row, each [M, 4], in the order of the keys."""
    if PARTS == 1:
        even, odd = gl.split(gl.reshape(x, [M, 4, 2]))
        even = gl.convert_layout(even, like.type.layout, assert_trivial=True)
        return even, gl.convert_layout(odd, like.type.layout, assert_trivial=True)
    else:
        a, b = gl.split(gl.permute(gl.reshape(x, [M, 2, PARTS // 2, 8]), [0, 2, 3, 1]))
        return thread_scores(a, like, M, PARTS // 2) + thread_scores(b, like, M, PARTS // 2)


@gluon.jit
def append_candidates(x, bounds, low, high, j, STRIDE: gl.constexpr, STAGED: gl.constexpr):
    """Appends the keys of a tile [M, N] above the bounds to the lists and returns the new ends."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    held = thread_scores(gl.reshape(x, [M, N // 8, 8]), low, M, N // 8)
    code: gl.constexpr = append_code(N // 4, STRIDE, 32 * gl.num_warps(), STAGED)
    constraints: gl.constexpr = "=r,=r," + "f," * (N // 2) + "f,f,r,r,r,r,r,r"
    bounds = gl.broadcast(bounds, low)[0]
    given = held + (bounds, low, high, j)  # noqa: RUF005
    return gl.inline_asm_elementwise(code, constraints, given, dtype=gl.int32, is_pure=False, pack=2)


@gluon.jit
def sum_quarters(x, lanes: gl.constexpr):
    """Σ over the numbers that one thread holds of a row: [M, N] → [M, 4]."""
    x = gl.sum(gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2]), 3), 1)
    return gl.convert_layout(x, lanes, assert_trivial=True)


@gluon.jit
def to_products(bound, opt):
    """The products q·k whose soft cap is `bound`; −∞ where every product's is above it."""
    cap, scale = tiles.number(opt.cap, gl.float32), tiles.number(opt.scale, gl.float32)
    share = gl.minimum(bound / cap, 0.9999995)
    product = gl.log2((1.0 + share) / (1.0 - share)) * (cap / (2.0 * LOG2E * scale))
    product = gl.where(share > -0.9999995, product, -float("inf"))
    return gl.where(bound < float("inf"), product, bound)


@gluon.jit
def list_candidates(
    rows, columns, bounds, slope, counts, lists, below, block0, opt,
    BM: gl.constexpr, BN: gl.constexpr, PANEL: gl.constexpr, PANELS: gl.constexpr, LAST: gl.constexpr,
    STAGES: gl.constexpr, CAP: gl.constexpr, FULL: gl.constexpr, STAGED: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Fills the lists (y, j) [CAP, BM, 4, 2] and counts [BM, 4] of block number block0 + program.

    bounds [B, H, M] hold a number per row or, transposed, per column; the lists then hold y − bound. A list that
    overflowed counts FULL entries or more. For statistics (`below` is not None) a row's quarters store [3, 4]:
    Σ(y − bound), Σ(y − bound)² over all keys, Σ 2^(slope·(y − bound)) over the keys that are not listed. A bound of +∞
    leaves the lists of its block empty. Beside a soft cap the lists hold products q·k in the place of y, and the bound
    is brought to their units. PANEL, PANELS and LAST as in the Hopper forward's `ForwardConfig`.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BN, 16]
    )
    lanes: gl.constexpr = quarters_layout(gl.num_warps())
    slot = gl.program_id(0)
    block = block0 + slot
    if TRANSPOSED:
        blocks = gl.cdiv(opt.keys, BM)
        i0 = block % blocks * BM  # the first keys have the most causal queries
        heads = opt.heads // opt.group
    else:
        blocks = gl.cdiv(opt.queries, BM)
        i0 = (blocks - 1 - block % blocks) * BM  # the longest causal rows first
        heads = opt.heads
    h = block // blocks % heads
    b = block // blocks // heads
    n = tiles.key_count(opt, b)
    i = i0 + gl.arange(0, BM, gl.SliceLayout(1, lanes))
    end_row = n if TRANSPOSED else opt.queries
    if opt.interval.ptr is not None:
        first, last = visible_interval(b, h, i, opt, n, TRANSPOSED)
        lowest = gl.min(gl.where(first < last, first, opt.keys), 0)
        highest = gl.max(gl.where(first < last, last, 0), 0)
        earliest = gl.max(gl.where(i < opt.queries, first, 0), 0)
        latest = gl.min(gl.where(i < opt.queries, last, opt.keys), 0)
    else:
        lowest, latest = visible_interval(b, h, i0, opt, n, TRANSPOSED)
        earliest, highest = visible_interval(b, h, gl.minimum(i0 + BM, end_row) - 1, opt, n, TRANSPOSED)
    if TRANSPOSED:
        over = opt.group
        top_head = h * opt.group
    else:
        over = 1
        top_head = h // opt.group
    start = lowest // BN
    per_head = gl.maximum(gl.cdiv(highest, BN) - start, 0)
    total = per_head * over
    if TRANSPOSED:
        total = gl.where(i0 < n, total, 0)

    quarter = gl.arange(0, 4, gl.SliceLayout(0, lanes))
    STRIDE: gl.constexpr = BM * 32  # bytes between the entries of a list: the block's lists are interleaved
    held = slot.to(gl.int64) * BM + (i - i0)
    address = lists.to(gl.int64) + slot.to(gl.int64) * (STRIDE * CAP)
    address += gl.expand_dims((i - i0) * 32, 1) + gl.expand_dims(quarter * 8, 0)
    begin = (address & 0xFFFFFFFF).to(gl.int32)  # a block's lists do not cross 4 GiB: only the low half changes
    high = (address >> 32).to(gl.int32)
    limit = begin + STRIDE * FULL
    end = begin
    if TRANSPOSED:
        bound = gl.zeros([BM, 1], gl.float32, lanes)
    else:
        row = (b * heads + h).to(gl.int64) * opt.queries + i
        bound = gl.load(bounds + row, mask=i < opt.queries, other=float("inf"))
        highest_bound = gl.max(gl.where(i < opt.queries, bound, -float("inf")), 0)
        total = gl.where(highest_bound == float("inf"), 0, total)
        if below is not None:
            row_slopes = gl.load(slope + row, mask=i < opt.queries, other=0.0)
            row_slopes = gl.expand_dims(gl.convert_layout(row_slopes, gl.SliceLayout(1, mma)), 1)
            row_bounds = gl.expand_dims(gl.convert_layout(bound, gl.SliceLayout(1, mma)), 1)
        if opt.cap is not None:
            bound = to_products(bound, opt)
        bound = gl.expand_dims(bound, 1)
    row_index = i0 + gl.arange(0, BM, gl.SliceLayout(1, mma))
    first, last = visible_interval(b, h, row_index, opt, n, TRANSPOSED)
    first, last = gl.expand_dims(first, 1), gl.expand_dims(last, 1)
    rows_s = gl.allocate_shared_memory(rows.dtype, [PANELS] + rows.block_type.shape, rows.layout)  # noqa: RUF005
    columns_s = gl.allocate_shared_memory(columns.dtype, [STAGES * PANELS] + columns.block_type.shape, columns.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES + 1):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    mbarrier.expect(full.index(STAGES), rows.block_type.nbytes * PANELS)
    for c in gl.static_range(PANELS):
        async_load(rows, [b, h, i0, c * PANEL], full.index(STAGES), rows_s.index(c))
    for s in gl.static_range(STAGES - 1):
        mbarrier.expect(full.index(s), columns.block_type.nbytes * PANELS, pred=s < total)
        j0 = (start + s % gl.maximum(per_head, 1)) * BN
        for c in gl.static_range(PANELS):
            source = [b, top_head + s // gl.maximum(per_head, 1), j0, c * PANEL]
            async_load(columns, source, full.index(s), columns_s.index(s * PANELS + c), pred=s < total)

    sum_y = gl.zeros([BM, 4], gl.float32, lanes)
    sum_y2 = sum_y
    sum_below = sum_y
    quarter = gl.expand_dims(quarter * 2, 0)
    zero = gl.zeros([BM, BN], gl.float32, mma)
    mbarrier.wait(full.index(STAGES), 0)
    for t in range(0, total):
        stage = t % STAGES
        head = t // per_head
        j0 = (start + t % per_head) * BN
        column_index = j0 + gl.arange(0, BN, gl.SliceLayout(0, mma))
        if TRANSPOSED:
            before = (b * opt.heads + top_head + head).to(gl.int64) * opt.queries
            column_bounds = gl.expand_dims(
                gl.load(bounds + before + column_index, mask=column_index < opt.queries, other=float("inf")), 0
            )
        if opt.key_bias.ptr is not None:
            at = opt.key_bias.ptr + tiles.wide(b) * opt.key_bias.stride[0] + tiles.wide(h) * opt.key_bias.stride[1]
            at += tiles.wide(column_index) * opt.key_bias.stride[2]
            bias = gl.expand_dims(gl.load(at, mask=column_index < opt.keys, other=0.0).to(gl.float32), 0)
        mbarrier.wait(full.index(stage), (t // STAGES) & 1)
        x = zero
        for c in gl.static_range(PANELS):
            row_panel = rows_s.index(c).reshape([BM, PANEL])
            column_panel = columns_s.index(stage * PANELS + c).reshape([BN, PANEL])
            if c + 1 == PANELS and LAST < PANEL:
                row_panel = row_panel.slice(0, LAST, 1)
                column_panel = column_panel.slice(0, LAST, 1)
            x = warpgroup_mma(row_panel, column_panel.permute((1, 0)), x, use_acc=c > 0, is_async=True)
        x = warpgroup_mma_wait(0, deps=[x])
        ahead = t + STAGES - 1
        free = ahead % STAGES
        mbarrier.expect(full.index(free), columns.block_type.nbytes * PANELS, pred=ahead < total)
        for c in gl.static_range(PANELS):
            source = [b, top_head + ahead // per_head, (start + ahead % per_head) * BN, c * PANEL]
            async_load(columns, source, full.index(free), columns_s.index(free * PANELS + c), pred=ahead < total)
        key = j0 + quarter
        is_edge = (j0 < earliest) | (j0 + BN > latest)
        if TRANSPOSED:
            x = x - column_bounds
            key += head * opt.queries
            is_edge = is_edge | (i0 + BM > n)
        if opt.key_bias.ptr is not None:
            x = x * tiles.number(opt.scale, gl.float32) + bias
        y = x
        if below is not None:
            y = cap_scores(x, opt)
            offset = y - row_bounds
        if is_edge:
            inside = (gl.expand_dims(column_index, 0) >= first) & (gl.expand_dims(column_index, 0) < last)
            x = gl.where(inside, x, float("-inf"))
            if below is not None:
                y = gl.where(inside, y, float("-inf"))
                offset = gl.where(inside, offset, 0.0)
        if below is not None:
            sum_y += sum_quarters(offset, lanes)
            sum_y2 += sum_quarters(offset * offset, lanes)
            sum_below += sum_quarters(gl.exp2(gl.minimum((y - row_bounds) * row_slopes, 0.0)), lanes)
        end = append_candidates(x, bound, gl.minimum(end, limit), high, key, STRIDE, STAGED)
    many = (end - begin) // STRIDE
    gl.store(counts + gl.expand_dims(held, 1) * 4 + quarter // 2, many)
    if below is not None:
        out = below + gl.expand_dims(held, 1) * 12 + quarter // 2
        gl.store(out, sum_y)
        gl.store(out + 4, sum_y2)
        gl.store(out + 8, sum_below - many.to(gl.float32))  # a listed key counted 1
