"""o_i = Σ p_ij·v_j, dq_i, dk_j and dv_j from the lists of `candidates.py`: each loads only the rows that are listed.

A program handles sixteen rows in step; a row whose list has ended loads nothing. With g′ = ∂p/∂s at fixed τ:

    δ_i = Σ_j g′·dp / Σ_j g′      dq_i = Σ_j g′·(dp − δ_i)·k_j      dk_j = Σ_i g′·(dp − δ_i)·q_i      dv_j = Σ_i p·do_i
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.tiles import HIDDEN

ROWS = tl.constexpr(16)  # per program


@triton.jit
def locate_rows(block0, opt, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """(b, h, i, slot) of this program's sixteen rows: queries, or keys and key heads."""
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
def load_rows(view, b, h, i, valid, DIM: tl.constexpr, PAD: tl.constexpr):
    """view[b, h, i] as [rows, PAD], where `valid`; h may be one number per row."""
    d = tl.arange(0, PAD)
    where = view.ptr + tiles.wide(b) * view.stride[0] + tiles.wide(h) * view.stride[1] + tiles.wide(i) * view.stride[2]
    return tl.load(where[:, None] + d[None, :] * view.stride[3], mask=valid[:, None] & (d[None, :] < DIM), other=0.0)


@triton.jit
def store_rows(view, b, h, i, valid, tile, DIM: tl.constexpr, PAD: tl.constexpr):
    """Stores tile [rows, PAD] to view[b, h, i], where `valid`."""
    d = tl.arange(0, PAD)
    where = view.ptr + tiles.wide(b) * view.stride[0] + tiles.wide(h) * view.stride[1] + tiles.wide(i) * view.stride[2]
    to = where[:, None] + d[None, :] * view.stride[3]
    tl.store(to, tile.to(view.ptr.dtype.element_ty), mask=valid[:, None] & (d[None, :] < DIM))


@triton.jit
def list_ends(counts, slot, valid):
    """Ends (e0, e1, e2, e3) of a row's four lists, counted as if they were one list."""
    e0 = tl.load(counts + slot * 4, mask=valid, other=0)
    e1 = e0 + tl.load(counts + slot * 4 + 1, mask=valid, other=0)
    e2 = e1 + tl.load(counts + slot * 4 + 2, mask=valid, other=0)
    return e0, e1, e2, e2 + tl.load(counts + slot * 4 + 3, mask=valid, other=0)


@triton.jit
def list_start(lists, slot, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Pointer to the first entry of each row's first list; a block's lists are [CAP, BLOCK, 4, 2]."""
    return lists + slot // BLOCK * (8 * CAP * BLOCK) + slot % BLOCK * 8


@triton.jit
def load_entry(where, ends, position, BLOCK: tl.constexpr):
    """(number, index, valid) at a position of each row's four lists, counted as one list."""
    e0, e1, e2, e3 = ends
    valid = position < e3
    quarter = tl.where(position < e0, 0, tl.where(position < e1, 1, tl.where(position < e2, 2, 3)))
    before = tl.where(position < e0, 0, tl.where(position < e1, e0, tl.where(position < e2, e1, e2)))
    where += (position - before) * (8 * BLOCK) + quarter * 2
    number = tl.load(where, mask=valid, other=HIDDEN)
    return number, tl.load(where + 1, mask=valid, other=0.0).to(tl.int32, bitcast=True), valid


@triton.jit
def gather_o(lists, supports, v, o, block0, opt, C: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Stores o_i = Σ p·v_j over the (p, j) of `solve_support`, which lie across the row's four lists."""
    b, h, i, slot = locate_rows(block0, opt, BLOCK, False)
    support = tl.load(supports + slot, mask=i < opt.queries, other=0)
    acc = tiles.zeros(ROWS, C.BE, C.ACC)
    where = list_start(lists, slot, CAP, BLOCK)
    for start in range(0, tl.max(support, 0), 4):
        for s in tl.static_range(4):
            valid = start + s < support
            p = tl.load(where + 2 * s, mask=valid, other=0.0)
            j = tl.load(where + 2 * s + 1, mask=valid, other=0.0).to(tl.int32, bitcast=True)
            acc += p[:, None] * load_rows(v, b, h // opt.group, j, valid, C.E, C.BE).to(C.ACC)
        where += 8 * BLOCK
    store_rows(o, b, h, i, i < opt.queries, acc, C.E, C.BE)


@triton.jit
def flag_overflow(counts, slot, i, failed, b, h, heads, size, FULL: tl.constexpr):
    """True if no list of these rows overflowed; stores the opposite in `failed`."""
    c = tl.arange(0, 4)
    count = tl.load(counts + slot[:, None] * 4 + c[None, :], mask=(i < size)[:, None], other=0)
    complete = tl.max(tl.max(count, 1), 0) < FULL
    start = tl.min(i, 0)
    group = (tiles.wide(b) * heads + h) * tl.cdiv(size, ROWS) + start // ROWS
    tl.store(failed + group, tl.where(complete, 0, 1), mask=start < size)
    return complete


@triton.jit
def gather_dq(
    lists, counts, k, v, do, dq, d_theta, shifts, delta, failed, block0, opt,
    C: tl.constexpr, CAP: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Stores dq_i, δ_i and the gradient of the parameter from the lists of y above τ."""
    b, h, i, slot = locate_rows(block0, opt, BLOCK, False)
    inside = i < opt.queries
    row = (tiles.wide(b) * opt.heads + h) * opt.queries + i
    if flag_overflow(counts, slot, i, failed, b, h, opt.heads, opt.queries, FULL):
        theta = tiles.load_theta(b, h, i, opt, C.ACC)
        a = tiles.row_factor(b, h, i, opt, C.ACC, C.LINEAR)
        gain = a * C.F.gain(theta)
        tau = tl.load(shifts + row, mask=inside, other=0.0)
        ends = list_ends(counts, slot, inside)
        where = list_start(lists, slot, CAP, BLOCK)
        d_out = load_rows(do, b, h, i, inside, C.E, C.BE).to(C.ACC)
        dq_products = tiles.zeros(ROWS, C.BD, C.ACC)
        dq_slopes = dq_products
        sum_products = tiles.full(ROWS, 0.0, C.ACC)
        sum_slopes = sum_products
        sum_theta = sum_products
        sum_theta_dp = sum_products
        for start in range(0, tl.max(ends[3], 0), STEP):
            for s in tl.static_range(STEP):
                y, j, valid = load_entry(where, ends, start + s, BLOCK)
                t = tiles.positive_part(y * gain - tau)
                valid = valid & (t > 0.0)
                weight, g = tiles.weigh_excess(t, theta, C)
                dp = tl.sum(d_out * load_rows(v, b, h // opt.group, j, valid, C.E, C.BE).to(C.ACC), 1)
                keys = load_rows(k, b, h // opt.group, j, valid, C.D, C.BD).to(C.ACC)
                sum_products += g * dp
                sum_slopes += g
                if C.THETA_GRAD:
                    own = tl.where(valid, C.F.parameter_slope(weight, theta), 0.0)
                    sum_theta += own
                    sum_theta_dp += own * dp
                dq_products += (g * dp)[:, None] * keys
                dq_slopes += g[:, None] * keys
        row_delta = sum_products / tl.where(sum_slopes > 0.0, sum_slopes, 1.0)
        store_rows(dq, b, h, i, inside, (dq_products - row_delta[:, None] * dq_slopes) * a[:, None], C.D, C.BD)
        tl.store(delta + row, row_delta, mask=inside)
        if C.THETA_GRAD:
            tl.store(d_theta + row, sum_theta_dp - row_delta * sum_theta, mask=inside)


@triton.jit
def gather_dkv(
    lists, counts, q, v, do, dk, dv, delta, failed, block0, opt,
    C: tl.constexpr, CAP: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Stores dk_j and dv_j from the lists of the queries that give key j weight; the lists hold y − τ."""
    b, g, j, slot = locate_rows(block0, opt, BLOCK, True)
    inside = j < opt.keys
    if flag_overflow(counts, slot, j, failed, b, g, opt.heads // opt.group, opt.keys, FULL):
        ends = list_ends(counts, slot, inside)
        where = list_start(lists, slot, CAP, BLOCK)
        values = load_rows(v, b, g, j, inside & (j < tiles.key_count(opt, b)), C.E, C.BE).to(C.ACC)
        acc_k = tiles.zeros(ROWS, C.BD, C.ACC)
        acc_v = tiles.zeros(ROWS, C.BE, C.ACC)
        for start in range(0, tl.max(ends[3], 0), STEP):
            for s in tl.static_range(STEP):
                y, position, valid = load_entry(where, ends, start + s, BLOCK)
                h = g + position * 0
                i = position
                if GROUPED:
                    h = g * opt.group + position // opt.queries
                    i = position % opt.queries
                a = tiles.row_factor(b, h, i, opt, C.ACC, C.LINEAR)
                theta = tiles.load_theta(b, h, i, opt, C.ACC)
                t = tiles.positive_part(y * (a * C.F.gain(theta)))
                p, slope = tiles.weigh_excess(t, theta, C)
                row_delta = tl.load(delta + (tiles.wide(b) * opt.heads + h) * opt.queries + i, mask=valid, other=0.0)
                d_out = load_rows(do, b, h, i, valid, C.E, C.BE).to(C.ACC)
                ds = slope * (tl.sum(d_out * values, 1) - row_delta) * a
                acc_v += p[:, None] * d_out
                acc_k += ds[:, None] * load_rows(q, b, h, i, valid, C.D, C.BD).to(C.ACC)
        store_rows(dk, b, g, j, inside, acc_k, C.D, C.BD)
        store_rows(dv, b, g, j, inside, acc_v, C.E, C.BE)
