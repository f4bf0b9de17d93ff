"""ds = a·dp − b·δ for every family, then dq = ds·k and dk = dsᵀ·q, dv = pᵀ·do, each sum owned by one program.

`backward_dq` owns a block of queries, `backward_dkv` a block of keys and the query heads of its group, `backward_bias`
a tile of the bias and everything it is broadcast over: no atomics, so that equal inputs give equal bits. For the
threshold family δ = Σ g′dp / Σg′ is only known after the row's last key; dq = Σ g′dp·k − δ·Σ g′·k waits for it and
leaves δ to `backward_dkv`. Statistics' gradients come as a tilt: ds += p·(β·log2 e) + γ·y + ε per row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.kernels import tiles
from regard.kernels.tiles import LOG2E


class Rows(NamedTuple):
    """What backward knows of a query, each [M]: its state, its visible keys, what its statistics add."""

    a: Any  # s = a·y
    frame: Any  # log2 units (ratio), τ (threshold)
    inverse: Any  # 1/Z
    delta: Any
    first: Any
    last: Any
    beta: Any
    gamma: Any
    epsilon: Any


class State(NamedTuple):
    """Pointers to [B, H, M] rows: the forward's state, δ, and the tilt (None: no statistic has a gradient)."""

    frame: Any
    z: Any
    delta: Any
    beta: Any
    gamma: Any
    epsilon: Any


@triton.jit
def rows_at(state, b, h, i, n, opt, F: tl.constexpr, LINEAR: tl.constexpr, ACC: tl.constexpr):
    inside = i < opt.queries
    row = (tiles.wide(b) * opt.heads + h) * opt.queries + i
    first, last = tiles.interval(i, opt, n)
    frame = tl.load(state.frame + row, mask=inside, other=0.0)
    z = tl.load(state.z + row, mask=inside, other=0.0)
    inverse = tl.where(z > 0.0, 1.0 / tl.where(z > 0.0, z, 1.0), z)  # a NaN stays
    if F.family == "ratio":
        frame = frame * LOG2E
    delta = tl.load(state.delta + row, mask=inside, other=0.0)
    beta, gamma, epsilon = delta, delta, delta
    if state.beta is not None:
        beta = tl.load(state.beta + row, mask=inside, other=0.0)
        gamma = tl.load(state.gamma + row, mask=inside, other=0.0)
        epsilon = tl.load(state.epsilon + row, mask=inside, other=0.0)
    a = tiles.row_factor(b, h, i, opt, ACC, LINEAR)
    return Rows(a, frame, inverse, delta, first, last, beta, gamma, epsilon)


@triton.jit
def across(r, KEYS_FIRST: tl.constexpr):
    """The rows laid along a tile [M, N], or [N, M] where keys come first."""
    if KEYS_FIRST:
        laid = Rows(r.a[None, :], r.frame[None, :], r.inverse[None, :], r.delta[None, :], r.first[None, :],
                    r.last[None, :], r.beta[None, :], r.gamma[None, :], r.epsilon[None, :])  # fmt: skip
    else:
        laid = Rows(r.a[:, None], r.frame[:, None], r.inverse[:, None], r.delta[:, None], r.first[:, None],
                    r.last[:, None], r.beta[:, None], r.gamma[:, None], r.epsilon[:, None])  # fmt: skip
    return laid


@triton.jit
def weigh(y, seen, r, theta, F: tl.constexpr):
    """(p, a, b, log2 e): the weights again, and the two slopes of ds = a·dp − b·δ."""
    power = y * (r.a * LOG2E) - r.frame
    if F.family == "pointwise":
        p = tl.where(seen, F.weigh(y * r.a, theta), 0.0)
        up = tl.where(seen, F.slope(y * r.a, theta), 0.0)
        down = up * 0.0
    elif F.family == "threshold":
        t = tiles.positive_part(y * (r.a * F.gain(theta)) - r.frame)
        p = tl.where(seen, F.weigh(t, theta), 0.0)
        up = tl.where(seen, F.slope(t, theta), 0.0)
        down = up
    elif F.exponential:
        p = tl.where(seen, tl.exp2(power), 0.0) * r.inverse
        up = p
        down = p
    else:
        e = tl.exp2(power)
        c = tiles.unshift(r.frame)
        p = tl.where(seen, F.numerator(e, y * r.a, c) * r.inverse, 0.0)
        up = tl.where(seen, F.numerator_slope(e, y * r.a, c) * r.inverse, 0.0)
        down = tl.where(seen, F.denominator_slope(e, y * r.a, c) * r.inverse, 0.0)
    return p, up, down, power


@triton.jit
def slope_tile(y, seen, dp, p, up, down, power, r, TILTED: tl.constexpr, F: tl.constexpr):
    """ds of a tile, 0 where a key is not seen."""
    if F.family == "ratio" and F.exponential:
        ds = p * (dp - r.delta)
    else:
        ds = up * dp - down * r.delta
    if TILTED:
        ds += p * (r.beta * power) + (r.gamma * y + r.epsilon)
    return tl.where(seen, ds, 0.0)


@triton.jit
def backward_rows(o, do, delta, opt, ACC: tl.constexpr, BM: tl.constexpr, E: tl.constexpr, BE: tl.constexpr):
    """δ = Σ_e do·o = Σ_j p·dp per row."""
    blocks = tl.cdiv(opt.queries, BM)
    pid = tl.program_id(0)
    i0 = pid % blocks * BM
    h = (pid // blocks) % opt.heads
    b = pid // blocks // opt.heads
    out = tiles.block_of(o, b, h, i0, 0, opt.queries, BM, E, BE, False).to(ACC)
    d_out = tiles.block_of(do, b, h, i0, 0, opt.queries, BM, E, BE, False).to(ACC)
    i = i0 + tl.arange(0, BM)
    row = (tiles.wide(b) * opt.heads + h) * opt.queries + i
    tl.store(delta + row, tl.sum(out * d_out, 1), mask=i < opt.queries)


@triton.jit
def dq_tile(
    dq, dq1, sums, q_rows, d_out, k, v, b, h, i, start, lowest, highest, rows, theta, seed, opt,
    F: tl.constexpr, LINEAR: tl.constexpr, TILTED: tl.constexpr, HEAT: tl.constexpr, EDGE: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One key block: dq += ds·k. `sums` are (Σ g′dp, Σ ds·s, Σ g′·s), as far as they are needed."""
    ACC: tl.constexpr = dq.dtype
    g = h // opt.group
    j = (start + tl.arange(0, BN))[None, :]
    keys = tiles.block_of(k, b, g, start, lowest, highest, BN, D, BD, not EDGE)
    x = tl.dot(q_rows, tl.trans(keys), input_precision=PRECISION, out_dtype=ACC)
    r = across(rows, False)
    y, seen = tiles.scores(x, b, h, i[:, None], j, r.first, r.last, opt, LINEAR, EDGE)
    p, up, down, power = weigh(y, seen, r, theta, F)
    values = tiles.block_of(v, b, g, start, lowest, highest, BN, E, BE, not EDGE)
    dp = tl.dot(d_out, tl.trans(values), input_precision=PRECISION, out_dtype=ACC)
    if opt.seed is not None:
        dp = tl.where(tiles.keeps(b, h, i[:, None], j, opt, seed), dp * tiles.number(opt.kept, ACC), 0.0)
    if (opt.bias.ptr is not None) or (opt.mask.ptr is not None):
        keys = tl.where(tl.max(seen.to(tl.int32), 0)[:, None] != 0, keys, 0.0)
    s_dp, s_heat, s_heat1 = sums
    if F.family == "threshold":
        ds = tl.where(seen, up * dp, 0.0)
        s_dp += tl.sum(ds, 1)
        if HEAT:
            s_heat += tl.sum(ds * y, 1)
            s_heat1 += tl.sum(up * y, 1)
        if opt.cap is not None:
            bent = tiles.cap_slope(x, opt)
            ds = tl.where(seen, ds * bent, 0.0)
            up = tl.where(seen, up * bent, 0.0)
        dq1 = tl.dot(up.to(keys.dtype), keys, dq1, input_precision=PRECISION, out_dtype=ACC)
    else:
        ds = slope_tile(y, seen, dp, p, up, down, power, r, TILTED, F)
        if HEAT:
            s_heat += tl.sum(ds * y, 1)
        if opt.cap is not None:
            ds = tl.where(seen, ds * tiles.cap_slope(x, opt), 0.0)
    dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision=PRECISION, out_dtype=ACC)
    return dq, dq1, (s_dp, s_heat, s_heat1)


@triton.jit
def backward_dq(
    q, k, v, do, dq, heat, state, opt,
    F: tl.constexpr, LINEAR: tl.constexpr, TILTED: tl.constexpr, HEAT: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(opt.queries, BM)
    pid = tl.program_id(0)
    i0 = (blocks - 1 - pid % blocks) * BM
    h = (pid // blocks) % opt.heads
    b = pid // blocks // opt.heads
    i = i0 + tl.arange(0, BM)
    n = tiles.key_count(opt, b)
    rows = rows_at(state, b, h, i, n, opt, F, LINEAR, ACC)
    theta = tiles.number(opt.theta, ACC)
    seed = 0
    if opt.seed is not None:
        seed = tl.load(opt.seed)
    lowest, highest, begin, inner, outer = tiles.key_blocks(i0, opt, n, BM, BN)
    q_rows = tiles.block_of(q, b, h, i0, 0, opt.queries, BM, D, BD, False)
    d_out = tiles.block_of(do, b, h, i0, 0, opt.queries, BM, E, BE, False)
    acc = tl.zeros([BM, BD], ACC)
    acc1 = acc
    zero = tl.zeros([BM], ACC)
    sums = (zero, zero, zero)
    if opt.left is not None:
        for start in tl.range(begin, tl.minimum(inner, highest), BN):
            acc, acc1, sums = dq_tile(acc, acc1, sums, q_rows, d_out, k, v, b, h, i, start, lowest, highest, rows, theta, seed, opt, F, LINEAR, TILTED, HEAT, True, BN, D, E, BD, BE, PRECISION)  # fmt: skip
    for start in tl.range(inner, outer, BN):
        acc, acc1, sums = dq_tile(acc, acc1, sums, q_rows, d_out, k, v, b, h, i, start, lowest, highest, rows, theta, seed, opt, F, LINEAR, TILTED, HEAT, False, BN, D, E, BD, BE, PRECISION)  # fmt: skip
    for start in tl.range(tl.maximum(inner, outer), highest, BN):
        acc, acc1, sums = dq_tile(acc, acc1, sums, q_rows, d_out, k, v, b, h, i, start, lowest, highest, rows, theta, seed, opt, F, LINEAR, TILTED, HEAT, True, BN, D, E, BD, BE, PRECISION)  # fmt: skip
    inside = i < opt.queries
    row = (tiles.wide(b) * opt.heads + h) * opt.queries + i
    warmth = sums[1]
    if F.family == "threshold":
        delta = sums[0] * rows.inverse
        acc = acc - delta[:, None] * acc1
        warmth = warmth - delta * sums[2]
        tl.store(state.delta + row, delta, mask=inside)
    factor = rows.a
    if not LINEAR:
        factor = factor * tiles.number(opt.scale, ACC)
    tiles.store_block(dq, b, h, i0, opt.queries, acc * factor[:, None], BM, D, BD)
    if HEAT:
        t = tiles.rows_of(opt.temperature, b, h, i, inside, 1.0).to(ACC)
        tl.store(heat + row, -warmth * rows.a / t, mask=inside)


@triton.jit
def dkv_tile(
    dk, dv, keys, values, q, do, state, b, h, j, start, n, theta, seed, opt,
    F: tl.constexpr, LINEAR: tl.constexpr, TILTED: tl.constexpr, EDGE: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query block, keys first: dv += pᵀ·do, dk += dsᵀ·q."""
    i = start + tl.arange(0, BM)
    q_rows = tiles.block_of(q, b, h, start, 0, opt.queries, BM, D, BD, not EDGE)
    x = tl.dot(keys, tl.trans(q_rows), input_precision=PRECISION, out_dtype=ACC)  # [N, M]
    r = across(rows_at(state, b, h, i, n, opt, F, LINEAR, ACC), True)
    i = i[None, :]
    y, seen = tiles.scores(x, b, h, i, j, r.first, r.last, opt, LINEAR, EDGE)
    p, up, down, power = weigh(y, seen, r, theta, F)
    d_out = tiles.block_of(do, b, h, start, 0, opt.queries, BM, E, BE, not EDGE)
    dp = tl.dot(values, tl.trans(d_out), input_precision=PRECISION, out_dtype=ACC)
    passed = p
    if opt.seed is not None:
        kept = tl.where(tiles.keeps(b, h, i, j, opt, seed), tiles.number(opt.kept, ACC), 0.0)
        dp = tl.where(kept > 0.0, dp * kept, 0.0)
        passed = p * kept
    dv = tl.dot(passed.to(d_out.dtype), d_out, dv, input_precision=PRECISION, out_dtype=ACC)
    ds = slope_tile(y, seen, dp, p, up, down, power, r, TILTED, F)
    if opt.cap is not None:
        ds = tl.where(seen, ds * tiles.cap_slope(x, opt), 0.0)
    if opt.temperature.ptr is not None:
        ds = ds * r.a  # LINEAR carries the scale along
    dk = tl.dot(ds.to(q_rows.dtype), q_rows, dk, input_precision=PRECISION, out_dtype=ACC)
    return dk, dv


@triton.jit
def backward_dkv(
    q, k, v, do, dk, dv, state, opt,
    F: tl.constexpr, LINEAR: tl.constexpr, TILTED: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(opt.keys, BN)
    pid = tl.program_id(0)
    j0 = pid % blocks * BN  # the first keys have the most causal queries
    groups = opt.heads // opt.group
    g = (pid // blocks) % groups
    b = pid // blocks // groups
    j = (j0 + tl.arange(0, BN))[:, None]
    n = tiles.key_count(opt, b)
    theta = tiles.number(opt.theta, ACC)
    seed = 0
    if opt.seed is not None:
        seed = tl.load(opt.seed)
    begin, inner, outer, end = tiles.query_blocks(j0, opt, n, BM, BN)
    keys = tiles.block_of(k, b, g, j0, 0, n, BN, D, BD, False)
    values = tiles.block_of(v, b, g, j0, 0, n, BN, E, BE, False)
    acc_k = tl.zeros([BN, BD], ACC)
    acc_v = tl.zeros([BN, BE], ACC)
    for h in range(g * opt.group, (g + 1) * opt.group):
        if opt.right is not None:
            for start in tl.range(begin, tl.minimum(inner, end), BM):
                acc_k, acc_v = dkv_tile(acc_k, acc_v, keys, values, q, do, state, b, h, j, start, n, theta, seed, opt, F, LINEAR, TILTED, True, ACC, BM, D, E, BD, BE, PRECISION)  # fmt: skip
        for start in tl.range(inner, outer, BM):
            acc_k, acc_v = dkv_tile(acc_k, acc_v, keys, values, q, do, state, b, h, j, start, n, theta, seed, opt, F, LINEAR, TILTED, False, ACC, BM, D, E, BD, BE, PRECISION)  # fmt: skip
        for start in tl.range(tl.maximum(inner, outer), end, BM):
            acc_k, acc_v = dkv_tile(acc_k, acc_v, keys, values, q, do, state, b, h, j, start, n, theta, seed, opt, F, LINEAR, TILTED, True, ACC, BM, D, E, BD, BE, PRECISION)  # fmt: skip
    if not (LINEAR and opt.temperature.ptr is not None):
        acc_k = acc_k * tiles.number(opt.scale, ACC)
    tiles.store_block(dk, b, g, j0, opt.keys, acc_k, BN, D, BD)
    tiles.store_block(dv, b, g, j0, opt.keys, acc_v, BN, E, BE)


@triton.jit
def backward_bias(
    q, k, v, do, db, state, opt, over_b, over_h, over_m, over_n,
    F: tl.constexpr, LINEAR: tl.constexpr, TILTED: tl.constexpr, ACC: tl.constexpr,
    ONE_M: tl.constexpr, ONE_N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d bias = ds/T. The program owns one tile of the bias as it was given and sums over what it was broadcast to."""
    tiles_n = tl.cdiv(opt.keys, BN) // over_n
    tiles_m = tl.cdiv(opt.queries, BM) // over_m
    heads = opt.heads // over_h
    pid = tl.program_id(0)
    own_n = pid % tiles_n
    own_m = pid // tiles_n % tiles_m
    own_h = pid // tiles_n // tiles_m % heads
    own_b = pid // tiles_n // tiles_m // heads
    theta = tiles.number(opt.theta, ACC)
    seed = 0
    if opt.seed is not None:
        seed = tl.load(opt.seed)
    acc = tl.zeros([BM, BN], ACC)
    for at_b in range(over_b):
        b = own_b + at_b
        n = tiles.key_count(opt, b)
        for at_h in range(over_h):
            h = own_h + at_h
            g = h // opt.group
            for at_m in range(over_m):
                i0 = (own_m + at_m) * BM
                i = i0 + tl.arange(0, BM)
                q_rows = tiles.block_of(q, b, h, i0, 0, opt.queries, BM, D, BD, False)
                d_out = tiles.block_of(do, b, h, i0, 0, opt.queries, BM, E, BE, False)
                r = across(rows_at(state, b, h, i, n, opt, F, LINEAR, ACC), False)
                lowest, highest, _, _, _ = tiles.key_blocks(i0, opt, n, BM, BN)
                for at_n in range(over_n):
                    j0 = (own_n + at_n) * BN
                    if (j0 < highest) & (j0 + BN > lowest):
                        j = (j0 + tl.arange(0, BN))[None, :]
                        keys = tiles.block_of(k, b, g, j0, lowest, highest, BN, D, BD, False)
                        values = tiles.block_of(v, b, g, j0, lowest, highest, BN, E, BE, False)
                        x = tl.dot(q_rows, tl.trans(keys), input_precision=PRECISION, out_dtype=ACC)
                        dp = tl.dot(d_out, tl.trans(values), input_precision=PRECISION, out_dtype=ACC)
                        y, seen = tiles.scores(x, b, h, i[:, None], j, r.first, r.last, opt, LINEAR, True)
                        p, up, down, power = weigh(y, seen, r, theta, F)
                        if opt.seed is not None:
                            kept = tiles.keeps(b, h, i[:, None], j, opt, seed)
                            dp = tl.where(kept, dp * tiles.number(opt.kept, ACC), 0.0)
                        acc += slope_tile(y, seen, dp, p, up, down, power, r, TILTED, F) * r.a
    m = own_m * BM + tl.arange(0, BM)
    j = own_n * BN + tl.arange(0, BN)
    base = db.ptr + tiles.wide(own_b) * db.stride[0] + tiles.wide(own_h) * db.stride[1]
    if ONE_M and ONE_N:
        tl.store(base, tl.sum(tl.sum(acc, 1), 0).to(db.ptr.dtype.element_ty))
    elif ONE_M:
        tl.store(base + j * db.stride[3], tl.sum(acc, 0).to(db.ptr.dtype.element_ty), mask=j < opt.keys)
    elif ONE_N:
        tl.store(base + tiles.wide(m) * db.stride[2], tl.sum(acc, 1).to(db.ptr.dtype.element_ty), mask=m < opt.queries)
    else:
        where = base + tiles.wide(m)[:, None] * db.stride[2] + j[None, :] * db.stride[3]
        tl.store(where, acc.to(db.ptr.dtype.element_ty), mask=(m < opt.queries)[:, None] & (j < opt.keys)[None, :])
