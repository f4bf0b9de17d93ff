"""ds = a·dp − b·δ for every family, then dq = ds·k and dk = dsᵀ·q, dv = pᵀ·do, each sum owned by one program.

`backward_dq` owns a block of queries, `backward_dkv` a block of keys and the query heads of its group: no atomics, so
that equal inputs give equal bits. For the threshold family δ = Σ g′dp / Σg′ is only known after the row's last key;
dq = Σ g′dp·k − δ·Σ g′·k waits for it and leaves δ to `backward_dkv`. Statistics' gradients come as a tilt:
ds += p·(β·log2 e) + γ·y + ε per row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, tiles
from regard._backends.gpu.attention.backward.slopes import Rows, across, rows_at, slope_tile, weigh
from regard._backends.gpu.attention.sparse import gather, support
from regard._backends.gpu.attention.tiles import LOG2E


@triton.jit
def told(o, shifts, sums, state, scene, i0, d_out, opt, C: tl.constexpr):
    """The rows of a block from what forward left of them; δ, shift and 1/Z go to `state`, where `backward_dkv` looks.

    δ = Σ_e do·o = Σ_j p·dp; a pointwise map has none, and a threshold map finds its own later.
    """
    inside = scene.i < opt.queries
    row = (tiles.wide(scene.b) * opt.heads + scene.h) * opt.queries + scene.i
    shift = tl.load(shifts + row, mask=inside, other=0.0)
    z = tl.load(sums + row, mask=inside, other=1.0)
    delta = shift * 0.0
    inverse = shift
    if C.F.family == "ratio":
        out = tiles.block_of(o, scene.b, scene.h, i0, 0, opt.queries, C.BM, C.E, C.BE, False)
        delta = tl.sum(out.to(C.ACC) * d_out.to(C.ACC), 1)
        shift = shift * LOG2E
    if C.FOLDED:
        shift = tl.where(z == 0.0, 2.0**100, shift + tl.log2(z))
    else:
        inverse = tl.where(z > 0.0, 1.0 / z, z)  # a NaN stays
    if state.inverse is not None:
        tl.store(state.inverse + row, inverse, mask=inside)
    if C.F.family != "threshold":  # whose shift is forward's
        tl.store(state.shift + row, shift, mask=inside)
        tl.store(state.delta + row, delta, mask=inside)
    return Rows(scene.a, shift, inverse, delta, scene.first, scene.last, delta, delta, delta)


@triton.jit
def backward_rows(q, o, do, shifts, sums, state, opt, C: tl.constexpr):
    """`told` alone, before statistics' gradients join δ."""
    scene, i0 = key_loop.scene_of(q, q, q, q, q, opt, C)
    d_out = tiles.block_of(do, scene.b, scene.h, i0, 0, opt.queries, C.BM, C.E, C.BE, False)
    told(o, shifts, sums, state, scene, i0, d_out, opt, C)


@triton.jit
def dq_tile(state, scene, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """One key block: dq += ds·k. `sums` are (Σ g′dp, Σ ds·y, Σ g′·y), as far as they are needed."""
    dq, dq1, sums, d_out, rows = state
    s_dp, s_heat, s_heat1 = sums
    F: tl.constexpr = C.F
    keys, x, y, seen, j = key_loop.look(scene, start, opt, C, EDGE)
    r = across(rows, False)
    p, up, down, power = weigh(y, seen, r, scene.theta, F, C.FOLDED, C.PRECISION == "tf32x3")
    values = key_loop.values_of(scene, start, seen, opt, C, EDGE)
    dp = tiles.dot(d_out, tl.trans(values), None, C)
    if opt.seed is not None:
        kept = tiles.keeps(scene.b, scene.h, scene.i[:, None], j, opt, scene.seed)
        dp = tl.where(kept, dp * tiles.number(opt.kept, C.ACC), 0.0)
    keys = key_loop.blank(keys, seen, opt)
    if F.family == "threshold":
        ds = tl.where(seen, up * dp, 0.0)
        s_dp += tl.sum(ds, 1)
        if C.HEAT:
            s_heat += tl.sum(ds * y, 1)
            s_heat1 += tl.sum(up * y, 1)
        if opt.cap is not None:
            bent = tiles.cap_slope(x, opt)
            ds = tl.where(seen, ds * bent, 0.0)
            up = tl.where(seen, up * bent, 0.0)
        dq1 = tiles.dot(up.to(keys.dtype), keys, dq1, C)
    else:
        ds = slope_tile(y, seen, dp, p, up, down, power, r, F, C.TILTED)
        if C.HEAT:
            s_heat += tl.sum(ds * y, 1)
        if opt.cap is not None:
            ds = tl.where(seen, ds * tiles.cap_slope(x, opt), 0.0)
    dq = tiles.dot(ds.to(keys.dtype), keys, dq, C)
    return dq, dq1, (s_dp, s_heat, s_heat1), d_out, rows


@triton.jit
def backward_dq(
    q, k, v, k_blocks, v_blocks, o, do, dq, heat, shifts, sums, state, failed, opt, C: tl.constexpr
):  # fmt: skip
    if failed is not None:
        if support.are_queries_solved(failed, opt, C.BM, gather.ROWS):
            return
    scene, i0 = key_loop.scene_of(q, k, v, k_blocks, v_blocks, opt, C)
    b, h, i = scene.b, scene.h, scene.i
    d_out = tiles.block_of(do, b, h, i0, 0, opt.queries, C.BM, C.E, C.BE, False)
    if C.TILTED:
        rows = rows_at(state, b, h, i, tiles.key_count(opt, b), opt, C, False)
    else:
        rows = told(o, shifts, sums, state, scene, i0, d_out, opt, C)
    acc = tiles.zeros(C.BM, C.BD, C.ACC)
    zero = tiles.full(C.BM, 0.0, C.ACC)
    acc, acc1, sums, _, _ = key_loop.sweep((acc, acc, (zero, zero, zero), d_out, rows), scene, i0, opt, dq_tile, C)
    inside = i < opt.queries
    row = (tiles.wide(b) * opt.heads + h) * opt.queries + i
    warmth = sums[1]
    if C.F.family == "threshold":
        delta = sums[0] * rows.inverse
        acc = acc - delta[:, None] * acc1
        warmth = warmth - delta * sums[2]
        tl.store(state.delta + row, delta, mask=inside)
    factor = rows.a
    if not C.LINEAR:
        factor = factor * tiles.number(opt.scale, C.ACC)
    tiles.store_block(dq, b, h, i0, opt.queries, acc * factor[:, None], C.BM, C.D, C.BD)
    if C.HEAT:
        t = tiles.rows_of(opt.temperature, b, h, i, inside, 1.0).to(C.ACC)
        tl.store(heat + row, -warmth * rows.a / t, mask=inside)


@triton.jit
def dkv_tile(
    dk, dv, keys, values, q, do, q_blocks, do_blocks, slopes, state, b, h, j, j0, start, n, seed, opt,
    C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """One query block, keys first: dv += pᵀ·do, dk += dsᵀ·q; where `slopes` is given, ds is left there."""
    F: tl.constexpr = C.F  # Triton 3.6 passes on no part of a configuration that has no name
    i = start + tl.arange(0, C.BM)
    if C.BULK and not EDGE:
        q_rows = tiles.bulk_of(q_blocks, b, h, start, C.BM, C.BD)
        d_out = tiles.bulk_of(do_blocks, b, h, start, C.BM, C.BE)
    else:
        q_rows = tiles.block_of(q, b, h, start, 0, opt.queries, C.BM, C.D, C.BD, not EDGE)
        d_out = tiles.block_of(do, b, h, start, 0, opt.queries, C.BM, C.E, C.BE, not EDGE)
    x = tiles.dot(keys, tl.trans(q_rows), None, C)  # [N, M]
    r = across(rows_at(state, b, h, i, n, opt, C, not EDGE), True)
    i = i[None, :]
    y, seen = tiles.scores(x, b, h, i, j, r.first, r.last, opt, C.LINEAR, EDGE)
    p, up, down, power = weigh(y, seen, r, tiles.number(opt.theta, C.ACC), F, C.FOLDED, C.PRECISION == "tf32x3")
    dp = tiles.dot(values, tl.trans(d_out), None, C)
    passed = p
    if opt.seed is not None:
        kept = tl.where(tiles.keeps(b, h, i, j, opt, seed), tiles.number(opt.kept, C.ACC), 0.0)
        dp = tl.where(kept > 0.0, dp * kept, 0.0)
        passed = p * kept
    dv = tiles.dot(passed.to(d_out.dtype), d_out, dv, C)
    ds = slope_tile(y, seen, dp, p, up, down, power, r, F, C.TILTED)
    if opt.cap is not None:
        ds = tl.where(seen, ds * tiles.cap_slope(x, opt), 0.0)
    if opt.temperature.ptr is not None:
        ds = ds * r.a  # LINEAR carries the scale along
    ds = ds.to(q_rows.dtype)
    if slopes is not None:
        slopes.store([b * opt.heads + h, j0, start], tl.reshape(ds, [1, C.BN, C.BM]))
    dk = tiles.dot(ds, q_rows, dk, C)
    return dk, dv


@triton.jit
def backward_dkv(
    q, k, v, do, q_blocks, do_blocks, slopes, dk, dv, state, failed, opt, C: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(opt.keys, C.BN)
    pid = tl.program_id(0)
    j0 = pid % blocks * C.BN  # the first keys have the most causal queries
    groups = opt.heads // opt.group
    g = (pid // blocks) % groups
    b = pid // blocks // groups
    if failed is not None:
        if support.are_solved(failed, b * groups + g, j0, opt.keys, C.BN, gather.ROWS):
            return
    j = (j0 + tl.arange(0, C.BN))[:, None]
    n = tiles.key_count(opt, b)
    seed = tiles.load_seed(opt)
    begin, inner, outer, end = key_loop.query_blocks(j0, opt, n, C.BM, C.BN)
    keys = tiles.block_of(k, b, g, j0, 0, n, C.BN, C.D, C.BD, False)
    values = tiles.block_of(v, b, g, j0, 0, n, C.BN, C.E, C.BE, False)
    DENSE: tl.constexpr = (opt.bias.ptr is not None) or (opt.mask.ptr is not None)
    acc_k = tiles.zeros(C.BN, C.BD, C.ACC)
    acc_v = tiles.zeros(C.BN, C.BE, C.ACC)
    for h in range(g * opt.group, (g + 1) * opt.group):
        if DENSE:  # every block is masked: one loop does
            inner = begin
            outer = begin
        elif opt.right is not None:
            for start in tl.range(begin, tl.minimum(inner, end), C.BM):
                acc_k, acc_v = dkv_tile(
                    acc_k, acc_v, keys, values, q, do, q_blocks, do_blocks, slopes, state, b, h, j, j0, start, n, seed,
                    opt, C, True,
                )  # fmt: skip
        if not DENSE:
            for start in tl.range(inner, outer, C.BM):
                acc_k, acc_v = dkv_tile(
                    acc_k, acc_v, keys, values, q, do, q_blocks, do_blocks, slopes, state, b, h, j, j0, start, n, seed,
                    opt, C, False,
                )  # fmt: skip
        for start in tl.range(tl.maximum(inner, outer), end, C.BM):
            acc_k, acc_v = dkv_tile(
                acc_k, acc_v, keys, values, q, do, q_blocks, do_blocks, slopes, state, b, h, j, j0, start, n, seed,
                opt, C, True,
            )  # fmt: skip
    if not (C.LINEAR and opt.temperature.ptr is not None):
        acc_k = acc_k * tiles.number(opt.scale, C.ACC)
    tiles.store_block(dk, b, g, j0, opt.keys, acc_k, C.BN, C.D, C.BD)
    tiles.store_block(dv, b, g, j0, opt.keys, acc_v, C.BN, C.E, C.BE)
