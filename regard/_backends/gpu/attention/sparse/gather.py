"""Attention on lists: o_i = Σ p_ij·v_j, dq_i, and dk_j, dv_j, each row of a matrix fetched for the few keys of a list.

The lists come from `candidates.py`. Sixteen rows walk theirs in step, and a row whose list has ended fetches nothing.
With g′ = ∂p/∂s at fixed τ:

    δ_i = Σ_j g′·dp / Σ_j g′      dq_i = Σ_j g′·(dp − δ_i)·k_j      dk_j = Σ_i g′·(dp − δ_i)·q_i      dv_j = Σ_i p·do_i
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.tiles import HIDDEN

ROWS = tl.constexpr(16)  # per program


@triton.jit
def place_of(block0, opt, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """(b, h, i, slot) of this program's sixteen rows: queries, or keys with their own heads."""
    pid = tl.program_id(0)
    block = block0 + pid * ROWS // BLOCK
    if KEYS:
        blocks = tl.cdiv(opt.keys, BLOCK)
        heads = opt.heads // opt.group
        start = block % blocks * BLOCK
    else:
        blocks = tl.cdiv(opt.queries, BLOCK)
        heads = opt.heads
        start = (blocks - 1 - block % blocks) * BLOCK
    r = tl.arange(0, ROWS)
    i = start + pid * ROWS % BLOCK + r
    return block // blocks // heads, block // blocks % heads, i, tiles.wide(pid) * ROWS + r


@triton.jit
def rows_at(view, b, h, i, on, DIM: tl.constexpr, PAD: tl.constexpr):
    """view[b, h, i] as [rows, PAD]; h may be a number per row."""
    d = tl.arange(0, PAD)
    where = view.ptr + tiles.wide(b) * view.stride[0] + tiles.wide(h) * view.stride[1] + tiles.wide(i) * view.stride[2]
    return tl.load(where[:, None] + d[None, :] * view.stride[3], mask=on[:, None] & (d[None, :] < DIM), other=0.0)


@triton.jit
def put_rows(view, b, h, i, on, tile, DIM: tl.constexpr, PAD: tl.constexpr):
    d = tl.arange(0, PAD)
    where = view.ptr + tiles.wide(b) * view.stride[0] + tiles.wide(h) * view.stride[1] + tiles.wide(i) * view.stride[2]
    to = where[:, None] + d[None, :] * view.stride[3]
    tl.store(to, tile.to(view.ptr.dtype.element_ty), mask=on[:, None] & (d[None, :] < DIM))


@triton.jit
def ends_of(counts, slot, on):
    """Where each of a row's four lists ends, were they one: (e0, e1, e2, all)."""
    e0 = tl.load(counts + slot * 4, mask=on, other=0)
    e1 = e0 + tl.load(counts + slot * 4 + 1, mask=on, other=0)
    e2 = e1 + tl.load(counts + slot * 4 + 2, mask=on, other=0)
    return e0, e1, e2, e2 + tl.load(counts + slot * 4 + 3, mask=on, other=0)


@triton.jit
def list_at(lists, slot, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """The first entry of each row's first list: a block's lists are [CAP, BLOCK, 4, 2]."""
    return lists + slot // BLOCK * (8 * CAP * BLOCK) + slot % BLOCK * 8


@triton.jit
def entry(where, ends, at, BLOCK: tl.constexpr):
    """(number, index, is there one?) at a place of each row's four lists, one after another."""
    e0, e1, e2, e3 = ends
    on = at < e3
    quarter = tl.where(at < e0, 0, tl.where(at < e1, 1, tl.where(at < e2, 2, 3)))
    before = tl.where(at < e0, 0, tl.where(at < e1, e0, tl.where(at < e2, e1, e2)))
    where += (at - before) * (8 * BLOCK) + quarter * 2
    number = tl.load(where, mask=on, other=HIDDEN)
    return number, tl.load(where + 1, mask=on, other=0.0).to(tl.int32, bitcast=True), on


@triton.jit
def gather_o(lists, found, v, o, block0, opt, C: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """o_i = Σ p·v_j over the (p, j) that `settle` left, four of them across the row's four lists."""
    b, h, i, slot = place_of(block0, opt, BLOCK, False)
    many = tl.load(found + slot, mask=i < opt.queries, other=0)
    acc = tiles.zeros(ROWS, C.BE, C.ACC)
    where = list_at(lists, slot, CAP, BLOCK)
    for start in range(0, tl.max(many, 0), 4):
        for s in tl.static_range(4):
            on = start + s < many
            p = tl.load(where + 2 * s, mask=on, other=0.0)
            j = tl.load(where + 2 * s + 1, mask=on, other=0.0).to(tl.int32, bitcast=True)
            acc += p[:, None] * rows_at(v, b, h // opt.group, j, on, C.E, C.BE).to(C.ACC)
        where += 8 * BLOCK
    put_rows(o, b, h, i, i < opt.queries, acc, C.E, C.BE)


@triton.jit
def flag(counts, slot, i, failed, b, h, heads, size, FULL: tl.constexpr):
    """Are these rows' lists whole? The answer goes into `failed` too."""
    c = tl.arange(0, 4)
    count = tl.load(counts + slot[:, None] * 4 + c[None, :], mask=(i < size)[:, None], other=0)
    whole = tl.max(tl.max(count, 1), 0) < FULL
    start = tl.min(i, 0)
    group = (tiles.wide(b) * heads + h) * tl.cdiv(size, ROWS) + start // ROWS
    tl.store(failed + group, tl.where(whole, 0, 1), mask=start < size)
    return whole


@triton.jit
def gather_dq(
    lists, counts, k, v, do, dq, shifts, delta, failed, block0, opt,
    C: tl.constexpr, CAP: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """dq_i and δ_i from the lists of y above τ."""
    b, h, i, slot = place_of(block0, opt, BLOCK, False)
    inside = i < opt.queries
    row = (tiles.wide(b) * opt.heads + h) * opt.queries + i
    if flag(counts, slot, i, failed, b, h, opt.heads, opt.queries, FULL):
        theta = tiles.number(opt.theta, C.ACC)
        a = tiles.row_factor(b, h, i, opt, C.ACC, C.LINEAR)
        gain = a * C.F.gain(theta)
        tau = tl.load(shifts + row, mask=inside, other=0.0)
        ends = ends_of(counts, slot, inside)
        where = list_at(lists, slot, CAP, BLOCK)
        d_out = rows_at(do, b, h, i, inside, C.E, C.BE).to(C.ACC)
        hot = tiles.zeros(ROWS, C.BD, C.ACC)
        cold = hot
        pull = tiles.full(ROWS, 0.0, C.ACC)
        whole = pull
        for start in range(0, tl.max(ends[3], 0), STEP):
            for s in tl.static_range(STEP):
                y, j, on = entry(where, ends, start + s, BLOCK)
                t = tiles.positive_part(y * gain - tau)
                on = on & (t > 0.0)
                g = C.F.slope(t, theta)
                dp = tl.sum(d_out * rows_at(v, b, h // opt.group, j, on, C.E, C.BE).to(C.ACC), 1)
                keys = rows_at(k, b, h // opt.group, j, on, C.D, C.BD).to(C.ACC)
                pull += g * dp
                whole += g
                hot += (g * dp)[:, None] * keys
                cold += g[:, None] * keys
        mean = pull / tl.where(whole > 0.0, whole, 1.0)
        put_rows(dq, b, h, i, inside, (hot - mean[:, None] * cold) * a[:, None], C.D, C.BD)
        tl.store(delta + row, mean, mask=inside)


@triton.jit
def gather_dkv(
    lists, counts, q, v, do, dk, dv, delta, failed, block0, opt,
    C: tl.constexpr, CAP: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """dk_j and dv_j from the lists of the queries that give key j weight; the lists hold y above τ's own y."""
    b, g, j, slot = place_of(block0, opt, BLOCK, True)
    inside = j < opt.keys
    if flag(counts, slot, j, failed, b, g, opt.heads // opt.group, opt.keys, FULL):
        theta = tiles.number(opt.theta, C.ACC)
        ends = ends_of(counts, slot, inside)
        where = list_at(lists, slot, CAP, BLOCK)
        values = rows_at(v, b, g, j, inside & (j < tiles.key_count(opt, b)), C.E, C.BE).to(C.ACC)
        acc_k = tiles.zeros(ROWS, C.BD, C.ACC)
        acc_v = tiles.zeros(ROWS, C.BE, C.ACC)
        for start in range(0, tl.max(ends[3], 0), STEP):
            for s in tl.static_range(STEP):
                y, at, on = entry(where, ends, start + s, BLOCK)
                h = g + at * 0
                i = at
                if GROUPED:
                    h = g * opt.group + at // opt.queries
                    i = at % opt.queries
                a = tiles.row_factor(b, h, i, opt, C.ACC, C.LINEAR)
                t = tiles.positive_part(y * (a * C.F.gain(theta)))
                p = C.F.weigh(t, theta)
                slope = C.F.slope(t, theta)
                mean = tl.load(delta + (tiles.wide(b) * opt.heads + h) * opt.queries + i, mask=on, other=0.0)
                d_out = rows_at(do, b, h, i, on, C.E, C.BE).to(C.ACC)
                ds = slope * (tl.sum(d_out * values, 1) - mean) * a
                acc_v += p[:, None] * d_out
                acc_k += ds[:, None] * rows_at(q, b, h, i, on, C.D, C.BD).to(C.ACC)
        put_rows(dk, b, g, j, inside, acc_k, C.D, C.BD)
        put_rows(dv, b, g, j, inside, acc_v, C.E, C.BE)
