"""Backward in two sweeps: dq = ds·k over the keys, then dk = dsᵀ·q and dv = pᵀ·do over the queries.

`backward_dq` owns a block of queries, `backward_dkv` a block of keys and the query heads of its group: no atomics, so
that equal inputs give equal bits. For the threshold family δ = Σ g′dp / Σg′ is only known after the row's last key;
dq = Σ g′dp·k − δ·Σ g′·k waits for it and leaves δ to `backward_dkv`. Gradients of statistics add
p·(β·log2 e) + γ·y + ε to ds, per row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, scores, tiles, visibility
from regard._backends.gpu.attention.backward.slopes import Rows, broadcast_rows, load_rows, slope_tile, weigh
from regard._backends.gpu.attention.sparse import gather, support
from regard._backends.gpu.attention.tiles import LOG2E


@triton.jit
def prepare_rows(o, shifts, sums, state, block, i0, d_out, opt, C: tl.constexpr):
    """Load forward's row state, compute δ, and store shift, 1/Z and δ for `backward_dkv`.

    δ = Σ_e do·o = Σ_j p·dp; a pointwise map has none, and a threshold map finds its own later.
    """
    inside = block.i < opt.queries
    row = (tiles.wide(block.b) * opt.heads + block.h) * opt.queries + block.i
    shift = tl.load(shifts + row, mask=inside, other=0.0)
    z = tl.load(sums + row, mask=inside, other=1.0)
    delta = shift * 0.0
    inverse = shift
    if C.F.family == "ratio":
        out = tiles.load_block(o, block.b, block.h, i0, 0, opt.queries, C.BM, C.E, C.BE, False)
        delta = tl.sum(out.to(C.ACC) * d_out.to(C.ACC), 1)
        shift = shift * LOG2E
    if C.Z_IN_SHIFT:
        shift = tl.where(z == 0.0, 2.0**100, shift + tl.log2(z))
    else:
        inverse = tl.where(z > 0.0, 1.0 / z, z)  # a NaN stays
    if state.inverse is not None:
        tl.store(state.inverse + row, inverse, mask=inside)
    if C.F.family != "threshold":  # whose shift is forward's
        tl.store(state.shift + row, shift, mask=inside)
        tl.store(state.delta + row, delta, mask=inside)
    return Rows(block.a, shift, inverse, delta, block.first, block.last, delta, delta, delta)


@triton.jit
def backward_rows(q, o, do, shifts, sums, state, opt, C: tl.constexpr):
    """Run `prepare_rows` alone, for calls that need δ before the first sweep."""
    block, i0 = key_loop.load_query_block(q, q, q, q, q, opt, C)
    d_out = tiles.load_block(do, block.b, block.h, i0, 0, opt.queries, C.BM, C.E, C.BE, False)
    prepare_rows(o, shifts, sums, state, block, i0, d_out, opt, C)


@triton.jit
def dq_tile(state, block, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Add one key block: dq += ds·k. `sums` are (Σ g′dp, Σ ds·y, Σ g′·y, Σ ds, Σ g′, Σh, Σ h·dp), as needed."""
    dq, dq1, sums, d_out, rows = state
    s_dp, s_ds_y, s_slope_y, s_ds, s_slope, s_theta, s_theta_dp = sums
    F: tl.constexpr = C.F
    keys, x, y, visible, j = key_loop.score_tile(block, start, opt, C, EDGE)
    place = key_loop.place_of(block, C)
    r, theta = broadcast_rows(rows, False), tiles.column(block.theta, opt)
    p, up, down, power = weigh(y, visible, r, theta, F, C.Z_IN_SHIFT, C.PRECISION != "ieee")
    own = p
    if C.THETA_GRAD:  # before dp takes registers
        own = tl.where(visible, F.parameter_slope(p, theta), 0.0)
    values = key_loop.load_values(block, start, visible, opt, C, EDGE)
    dp = tiles.dot(d_out, tl.trans(values), None, C)
    if opt.seed is not None:
        kept = tiles.dropout_mask(block.b, block.h, block.i[:, None], j, opt, block.seed)
        dp = tl.where(kept, dp * tiles.number(opt.keep_scale, C.ACC), 0.0)
    keys = key_loop.zero_hidden(keys, visible, opt, EDGE)
    if C.THETA_GRAD:
        s_theta += tl.sum(own, 1)
        s_theta_dp += tl.sum(tl.where(own == 0.0, 0.0, own * dp), 1)
    if F.family == "threshold":
        ds = tl.where(visible, up * dp, 0.0)
        s_dp += tl.sum(ds, 1)
        if C.TEMPERATURE_GRAD:
            s_ds_y += tl.sum(ds * y, 1)
            s_slope_y += tl.sum(up * y, 1)
        if C.ROW_BIAS_GRAD:
            s_slope += tl.sum(up, 1)
        ds = scores.bend(ds, x, visible, place, j, opt, C)
        up = scores.bend(up, x, visible, place, j, opt, C)
        dq1 = tiles.dot(up.to(keys.dtype), keys, dq1, C)
    else:
        ds = slope_tile(y, visible, dp, p, up, down, power, r, F, C.STATS_GRAD)
        if C.TEMPERATURE_GRAD:
            s_ds_y += tl.sum(ds * y, 1)
        if C.ROW_BIAS_GRAD:
            s_ds += tl.sum(ds, 1)
        ds = scores.bend(ds, x, visible, place, j, opt, C)
    dq = tiles.dot(ds.to(keys.dtype), keys, dq, C)
    return dq, dq1, (s_dp, s_ds_y, s_slope_y, s_ds, s_slope, s_theta, s_theta_dp), d_out, rows


@triton.jit
def backward_dq(
    q, k, v, k_blocks, v_blocks, o, do, dq, d_temperature, d_row_bias, d_theta, shifts, sums, state, failed, opt,
    C: tl.constexpr,
):  # fmt: skip
    """Compute dq, and the gradients of temperature, row bias and parameter, of one block of queries."""
    if opt.holes is not None:
        if tl.load(opt.holes) == 0:
            return
    if failed is not None:
        if support.are_queries_solved(failed, opt, C.BM, gather.ROWS):
            return
    block, i0 = key_loop.load_query_block(q, k, v, k_blocks, v_blocks, opt, C)
    b, h, i = block.b, block.h, block.i
    d_out = tiles.load_block(do, b, h, i0, 0, opt.queries, C.BM, C.E, C.BE, False)
    if C.STATS_GRAD:
        rows = load_rows(state, b, h, i, tiles.key_count(opt, b), opt, C, False)
    else:
        rows = prepare_rows(o, shifts, sums, state, block, i0, d_out, opt, C)
    acc = tiles.zeros(C.BM, C.BD, C.ACC)
    zero = tiles.full(C.BM, 0.0, C.ACC)
    state_0 = acc, acc, (zero, zero, zero, zero, zero, zero, zero), d_out, rows
    acc, acc1, sums, _, _ = key_loop.sweep(state_0, block, i0, opt, dq_tile, C)
    inside = i < opt.queries
    row = (tiles.wide(b) * opt.heads + h) * opt.queries + i
    s_temperature = sums[1]
    s_row = sums[3]
    s_theta = sums[6]
    if C.F.family == "threshold":
        delta = sums[0] * rows.inverse
        acc = acc - delta[:, None] * acc1
        s_temperature = s_temperature - delta * sums[2]
        s_row = sums[0] - delta * sums[4]
        s_theta = s_theta - delta * sums[5]
        tl.store(state.delta + row, delta, mask=inside)
    factor = rows.a
    if not C.LINEAR:
        factor = factor * tiles.number(opt.scale, C.ACC)
    tiles.store_block(dq, b, h, i0, opt.queries, acc * factor[:, None], C.BM, C.D, C.BD)
    if C.TEMPERATURE_GRAD:
        t = tiles.load_rows(opt.temperature, b, h, i, inside, 1.0).to(C.ACC)
        tl.store(d_temperature + row, -s_temperature * rows.a / t, mask=inside)
    if C.ROW_BIAS_GRAD:
        tl.store(d_row_bias + row, s_row * rows.a, mask=inside)
    if C.THETA_GRAD:
        tl.store(d_theta + row, s_theta, mask=inside)


@triton.jit
def weigh_queries(keys, q, q_blocks, state, b, h, j, j0, start, n, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Weigh one query block, keys first: (q, x = k·qᵀ [N, M], y, visible, rows, i, (p, a, b, log2 e), places)."""
    F: tl.constexpr = C.F  # Triton 3.6 passes on no part of a configuration that has no name
    i = start + tl.arange(0, C.BM)
    if C.BULK and not EDGE:
        q_rows = tiles.load_bulk_block(q_blocks, b, h, start, C.BM, C.BD)
    else:
        q_rows = tiles.load_block(q, b, h, start, 0, opt.queries, C.BM, C.D, C.BD, not EDGE)
    x = tiles.dot(keys, tl.trans(q_rows), None, C)  # [N, M]
    r = broadcast_rows(load_rows(state, b, h, i, n, opt, C, not EDGE), True)
    theta = tiles.load_theta(b, h, i, opt, C.ACC)
    if opt.thetas.ptr is not None:
        theta = theta[None, :]
    i = i[None, :]
    bias = scores.load_row_bias(b, h, i, opt, C.ACC)
    place = visibility.positions(b, h, i, opt), h
    bits = None
    if EDGE and opt.bits.words.ptr is not None:
        bits = scores.load_bits(b, h, i, j, j0, opt, C.BN)
    ahead = j0 - start
    y, visible = scores.compute_scores(x, b, h, i, j, ahead, r.first, r.last, bias, place, opt, C, EDGE, bits)
    weights = weigh(y, visible, r, theta, F, C.Z_IN_SHIFT, C.PRECISION != "ieee")
    return q_rows, x, y, visible, r, i, weights, place


@triton.jit
def dkv_tile(acc, inputs, b, h, j, j0, start, n, seed, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Add one query block, keys first: dv += pᵀ·do, dk += dsᵀ·q; ds is stored where `ds_blocks` is given."""
    dk, dv, db = acc
    keys, values, q, do, q_blocks, do_blocks, ds_blocks, state = inputs
    F: tl.constexpr = C.F
    if C.BULK and not EDGE:
        d_out = tiles.load_bulk_block(do_blocks, b, h, start, C.BM, C.BE)
    else:
        d_out = tiles.load_block(do, b, h, start, 0, opt.queries, C.BM, C.E, C.BE, not EDGE)
    q_rows, x, y, visible, r, i, weights, place = weigh_queries(
        keys, q, q_blocks, state, b, h, j, j0, start, n, opt, C, EDGE
    )
    p, up, down, power = weights
    dp = tiles.dot(values, tl.trans(d_out), None, C)
    passed = p
    if opt.seed is not None:
        kept = tl.where(tiles.dropout_mask(b, h, i, j, opt, seed), tiles.number(opt.keep_scale, C.ACC), 0.0)
        dp = tl.where(kept > 0.0, dp * kept, 0.0)
        passed = p * kept
    dv = tiles.dot(passed.to(d_out.dtype), d_out, dv, C)
    ds = slope_tile(y, visible, dp, p, up, down, power, r, F, C.STATS_GRAD)
    if C.KEY_BIAS_GRAD:
        db += tl.sum(ds * r.a, 1)
    ds = scores.bend(ds, x, visible, place, j, opt, C)
    if opt.temperature.ptr is not None:
        ds = ds * r.a  # LINEAR carries the scale along
    ds = ds.to(q_rows.dtype)
    if ds_blocks is not None:
        ds_blocks.store([b * opt.heads + h, j0, start], tl.reshape(ds, [1, C.BN, C.BM]))
    dk = tiles.dot(ds, q_rows, dk, C)
    return dk, dv, db


@triton.jit
def sweep_queries(acc, inputs, b, h, j, j0, n, queries, seed, opt, TILE: tl.constexpr, C: tl.constexpr):
    """Return acc after TILE(acc, …) of every query block of head h that sees a key of this block."""
    if opt.tiles.lists.ptr is not None:
        entries, full, partial, end = key_loop.find_lists(opt.tiles, b, h, j0 // C.BN)
        start = tl.load(entries)
        for at in tl.range(0, full):
            here = start
            start = tl.load(entries + at + 1)  # early: the next tile waits for it
            acc = TILE(acc, inputs, b, h, j, j0, here, n, seed, opt, C, False)
        for at in tl.range(partial, end):
            acc = TILE(acc, inputs, b, h, j, j0, tl.load(entries + at), n, seed, opt, C, True)
    else:
        begin, inner, outer, end = queries
        if opt.bias.ptr is not None:  # every block is masked: one loop does
            inner = begin
            outer = begin
        elif (opt.right is not None) or (opt.ranges.ptr is not None):
            for start in tl.range(begin, tl.minimum(inner, end), C.BM):
                acc = TILE(acc, inputs, b, h, j, j0, start, n, seed, opt, C, True)
        if opt.bias.ptr is None:
            for start in tl.range(inner, outer, C.BM):
                acc = TILE(acc, inputs, b, h, j, j0, start, n, seed, opt, C, False)
        for start in tl.range(tl.maximum(inner, outer), end, C.BM):
            acc = TILE(acc, inputs, b, h, j, j0, start, n, seed, opt, C, True)
    return acc


@triton.jit
def backward_dkv(
    q, k, v, do, q_blocks, do_blocks, ds_blocks, dk, dv, d_key_bias, state, failed, opt, C: tl.constexpr
):  # fmt: skip
    """Compute dk, dv and the key bias's gradient of one block of keys, and store ds where `ds_blocks` is given."""
    if opt.holes is not None:
        if tl.load(opt.holes) == 0:
            return
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
    queries = key_loop.find_query_range(j0, opt, n, C.BM, C.BN)
    keys = tiles.load_block(k, b, g, j0, 0, n, C.BN, C.D, C.BD, False)
    values = tiles.load_block(v, b, g, j0, 0, n, C.BN, C.E, C.BE, False)
    acc = tiles.zeros(C.BN, C.BD, C.ACC), tiles.zeros(C.BN, C.BE, C.ACC), tiles.full(C.BN, 0.0, C.ACC)
    inputs = keys, values, q, do, q_blocks, do_blocks, ds_blocks, state
    for h in range(g * opt.group, (g + 1) * opt.group):
        mine = key_loop.find_query_range_of_head(queries, b, h, j0, opt, C)
        acc = sweep_queries(acc, inputs, b, h, j, j0, n, mine, seed, opt, dkv_tile, C)
        if C.KEY_BIAS_GRAD:
            place = (tiles.wide(b) * opt.heads + h) * opt.keys + j0 + tl.arange(0, C.BN)
            tl.store(d_key_bias + place, acc[2], mask=j0 + tl.arange(0, C.BN) < opt.keys)
            acc = acc[0], acc[1], tiles.full(C.BN, 0.0, C.ACC)
    acc_k, acc_v, _ = acc
    if not (C.LINEAR and opt.temperature.ptr is not None):
        acc_k = acc_k * tiles.number(opt.scale, C.ACC)
    tiles.store_block(dk, b, g, j0, opt.keys, acc_k, C.BN, C.D, C.BD)
    tiles.store_block(dv, b, g, j0, opt.keys, acc_v, C.BN, C.E, C.BE)
