"""{j : y_ij > level_i}: the keys of each row above a level, gathered as lists by one sweep over the products y = q·k.

A threshold map gives weight to few keys. One sweep writes down those above a lower bound of τ; everything after it
(τ, o, the statistics, in backward dq) touches the lists alone. With rows and columns exchanged the same sweep lists the
queries that give weight to each key, for dk and dv.

Each of the four threads that hold a row of the tensor core's result appends to a list of its own, so that no thread
waits for another and the order of a list is the order of the keys. Gluon, Hopper and 16-bit types only.
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

fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # Triton 3.9, 3.6

LISTS = 4  # per row


class Reach(NamedTuple):
    """Who sees whom, and how many there are."""

    lengths: Any
    left: Any
    right: Any
    heads: Any
    group: Any  # query heads per key head
    queries: Any
    keys: Any


@gluon.constexpr_function
def four_to_a_row(warps):
    """[16·warps, 4]: which thread holds which quarter of a row of the tensor core's result."""
    higher = [[16 << bit, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], higher, [], [16 * warps, 4])


@gluon.jit
def interval(i, reach, n, TRANSPOSED: gl.constexpr):
    """Row i sees columns first ≤ j < last; transposed, key i is seen by queries first ≤ j < last."""
    first = i * 0
    if TRANSPOSED:
        last = i * 0 + reach.queries
        if reach.right is not None:
            first = gl.maximum(i - reach.right, 0)
        if reach.left is not None:
            last = gl.minimum(i + reach.left + 1, reach.queries)
        last = gl.where(i < n, last, 0)
    else:
        last = i * 0 + n
        if reach.left is not None:
            first = gl.maximum(i - reach.left, 0)
        if reach.right is not None:
            last = gl.minimum(i + reach.right + 1, n)
        last = gl.where(i < reach.queries, last, 0)
    return first, last


@gluon.constexpr_function
def append_code(many, stride, threads, held):
    """PTX: of a thread's `many` scores in each of two rows, those above the level (or NaN) onto the rows' lists.

    `held` scores at a time, a pass without a branch puts the chosen aside in shared memory and marks them; a loop over
    the marks, as short as they are few, stores (y, j). A score's key is j plus 0, 1, 8, 9, 16, …
    """
    parts = []
    for row in range(2):
        level, low, high, j = (f"${2 * (many + 1 + n) + row}" for n in range(4))
        parts.append(f"mov.b32 end, {low};")
        for first in range(0, many, held):
            parts.append("mov.b32 m, 0;")
            for k in range(held):
                y = f"${2 * (first + k + 1) + row}"
                parts.append(f"setp.gtu.f32 p, {y}, {level}; @p st.shared.f32 [mine+{4 * threads * k}], {y};")
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
        .shared .align 4 .b32 aside[{threads * held}];
        mov.u32 mine, %tid.x;
        mov.b32 at, aside;
        mad.lo.s32 mine, mine, 4, at;
        """
        + "\n".join(parts)
        + "}"
    )


@gluon.jit
def pieces(x, like, M: gl.constexpr, PARTS: gl.constexpr):
    """A tile [M, PARTS, 8] as the numbers that one thread holds of a row, each [M, 4], in the order of the keys."""
    if PARTS == 1:
        even, odd = gl.split(gl.reshape(x, [M, 4, 2]))
        even = gl.convert_layout(even, like.type.layout, assert_trivial=True)
        return even, gl.convert_layout(odd, like.type.layout, assert_trivial=True)
    else:
        a, b = gl.split(gl.permute(gl.reshape(x, [M, 2, PARTS // 2, 8]), [0, 2, 3, 1]))
        return pieces(a, like, M, PARTS // 2) + pieces(b, like, M, PARTS // 2)


@gluon.jit
def append(x, level, low, high, j, STRIDE: gl.constexpr, ASIDE: gl.constexpr):
    """The keys of a tile [M, N] above the level onto the lists; their new ends."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    held = pieces(gl.reshape(x, [M, N // 8, 8]), low, M, N // 8)
    code: gl.constexpr = append_code(N // 4, STRIDE, 32 * gl.num_warps(), ASIDE)
    constraints: gl.constexpr = "=r,=r," + "f," * (N // 2) + "f,f,r,r,r,r,r,r"
    level = gl.broadcast(level, low)[0]
    given = held + (level, low, high, j)  # noqa: RUF005
    return gl.inline_asm_elementwise(code, constraints, given, dtype=gl.int32, is_pure=False, pack=2)


@gluon.jit
def in_quarters(x, lanes: gl.constexpr):
    """Σ over what one thread holds of a row: [M, N] → [M, 4]."""
    x = gl.sum(gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2]), 3), 1)
    return gl.convert_layout(x, lanes, assert_trivial=True)


@gluon.jit
def candidates(
    rows, columns, level, slope, counts, lists, below, block0, reach,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAP: gl.constexpr,
    FULL: gl.constexpr, ASIDE: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Lists of block number block0 + program: (y, j) [CAP, BM, 4, 2] and counts [BM, 4] in its slot of the chunk.

    level belongs to the queries, [B, H, M]: a number per row or, transposed, per column; the lists then hold y − level.
    A list that is not whole counts FULL entries or more. Where statistics are wanted (`below` is not None), a row's
    quarters leave [3, 4]: Σ(y − level), Σ(y − level)² over all keys, Σ 2^(slope·(y − level)) over those not listed.
    A level of +∞ in a block leaves its lists empty.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BN, 16]
    )
    lanes: gl.constexpr = four_to_a_row(gl.num_warps())
    slot = gl.program_id(0)
    block = block0 + slot
    if TRANSPOSED:
        blocks = gl.cdiv(reach.keys, BM)
        i0 = block % blocks * BM  # the first keys have the most causal queries
        heads = reach.heads // reach.group
    else:
        blocks = gl.cdiv(reach.queries, BM)
        i0 = (blocks - 1 - block % blocks) * BM  # the longest causal rows first
        heads = reach.heads
    h = block // blocks % heads
    b = block // blocks // heads
    n = reach.keys
    if reach.lengths is not None:
        n = gl.maximum(gl.minimum(gl.load(reach.lengths + b).to(gl.int32), n), 0)
    lowest, latest = interval(i0, reach, n, TRANSPOSED)
    if TRANSPOSED:
        earliest, highest = interval(gl.minimum(i0 + BM, n) - 1, reach, n, TRANSPOSED)
        over = reach.group
        top_head = h * reach.group
    else:
        earliest, highest = interval(gl.minimum(i0 + BM, reach.queries) - 1, reach, n, TRANSPOSED)
        over = 1
        top_head = h // reach.group
    start = lowest // BN
    per_head = gl.maximum(gl.cdiv(highest, BN) - start, 0)
    total = per_head * over
    if TRANSPOSED:
        total = gl.where(i0 < n, total, 0)

    i = i0 + gl.arange(0, BM, gl.SliceLayout(1, lanes))
    quarter = gl.arange(0, 4, gl.SliceLayout(0, lanes))
    STRIDE: gl.constexpr = BM * 32  # bytes from one entry of a list to the next: those of all lists lie between
    held = slot.to(gl.int64) * BM + (i - i0)
    address = lists.to(gl.int64) + slot.to(gl.int64) * (STRIDE * CAP)
    address += gl.expand_dims((i - i0) * 32, 1) + gl.expand_dims(quarter * 8, 0)
    begin = (address & 0xFFFFFFFF).to(gl.int32)  # a block's lists lie inside one page of 4 GiB: the high half stays
    high = (address >> 32).to(gl.int32)
    limit = begin + STRIDE * FULL
    end = begin
    if TRANSPOSED:
        bound = gl.zeros([BM, 1], gl.float32, lanes)
    else:
        row = (b * heads + h).to(gl.int64) * reach.queries + i
        bound = gl.load(level + row, mask=i < reach.queries, other=float("inf"))
        highest_level = gl.max(gl.where(i < reach.queries, bound, -float("inf")), 0)
        total = gl.where(highest_level == float("inf"), 0, total)
        if below is not None:
            steep = gl.load(slope + row, mask=i < reach.queries, other=0.0)
            steep = gl.expand_dims(gl.convert_layout(steep, gl.SliceLayout(1, mma)), 1)
            across_rows = gl.expand_dims(gl.convert_layout(bound, gl.SliceLayout(1, mma)), 1)
        bound = gl.expand_dims(bound, 1)
    ii = gl.expand_dims(i0 + gl.arange(0, BM, gl.SliceLayout(1, mma)), 1)
    first, last = interval(ii, reach, n, TRANSPOSED)
    rows_s = gl.allocate_shared_memory(rows.dtype, rows.block_type.shape, rows.layout)
    columns_s = gl.allocate_shared_memory(columns.dtype, [STAGES] + columns.block_type.shape, columns.layout)  # noqa: RUF005
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES + 1):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    mbarrier.expect(ready.index(STAGES), rows.block_type.nbytes)
    fetch(rows, [b, h, i0, 0], ready.index(STAGES), rows_s)
    for s in gl.static_range(STAGES - 1):
        mbarrier.expect(ready.index(s), columns.block_type.nbytes, pred=s < total)
        source = [b, top_head + s // gl.maximum(per_head, 1), (start + s % gl.maximum(per_head, 1)) * BN, 0]
        fetch(columns, source, ready.index(s), columns_s.index(s), pred=s < total)

    one = gl.zeros([BM, 4], gl.float32, lanes)
    two = one
    lesser = one
    quarter = gl.expand_dims(quarter * 2, 0)
    zero = gl.zeros([BM, BN], gl.float32, mma)
    mbarrier.wait(ready.index(STAGES), 0)
    for t in range(0, total):
        stage = t % STAGES
        head = t // per_head
        j0 = (start + t % per_head) * BN
        jj = j0 + gl.arange(0, BN, gl.SliceLayout(0, mma))
        if TRANSPOSED:
            before = (b * reach.heads + top_head + head).to(gl.int64) * reach.queries
            passed = gl.expand_dims(gl.load(level + before + jj, mask=jj < reach.queries, other=float("inf")), 0)
        mbarrier.wait(ready.index(stage), (t // STAGES) & 1)
        across = columns_s.index(stage).reshape([BN, D]).permute((1, 0))
        x = warpgroup_mma(rows_s.reshape([BM, D]), across, zero, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(0, deps=[x])
        ahead = t + STAGES - 1
        free = ahead % STAGES
        mbarrier.expect(ready.index(free), columns.block_type.nbytes, pred=ahead < total)
        source = [b, top_head + ahead // per_head, (start + ahead % per_head) * BN, 0]
        fetch(columns, source, ready.index(free), columns_s.index(free), pred=ahead < total)
        name = j0 + quarter
        cut = (j0 < earliest) | (j0 + BN > latest)
        if TRANSPOSED:
            x = x - passed
            name += head * reach.queries
            cut = cut | (i0 + BM > n)
        if below is not None:
            off = x - across_rows
        if cut:
            inside = (gl.expand_dims(jj, 0) >= first) & (gl.expand_dims(jj, 0) < last)
            x = gl.where(inside, x, float("-inf"))
            if below is not None:
                off = gl.where(inside, off, 0.0)
        if below is not None:
            one += in_quarters(off, lanes)
            two += in_quarters(off * off, lanes)
            lesser += in_quarters(gl.exp2(gl.minimum((x - across_rows) * steep, 0.0)), lanes)
        end = append(x, bound, gl.minimum(end, limit), high, name, STRIDE, ASIDE)
    many = (end - begin) // STRIDE
    gl.store(counts + gl.expand_dims(held, 1) * 4 + quarter // 2, many)
    if below is not None:
        out = below + gl.expand_dims(held, 1) * 12 + quarter // 2
        gl.store(out, one)
        gl.store(out + 4, two)
        gl.store(out + 8, lesser - many.to(gl.float32))  # a key above the level counted 1
