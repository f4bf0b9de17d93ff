"""d bias = Σ ds/T over everything that one entry of the bias was broadcast to: one program per entry, no atomics."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from regard._backends.gpu.attention import scores, tiles, visibility
from regard._backends.gpu.attention.backward import slopes
from regard._backends.gpu.attention.backward.call import BackwardCall
from regard._backends.gpu.attention.config import config_of, options, unexpanded_shape, view
from regard._backends.gpu.launcher import launch
from regard._core.problem import Problem


@triton.jit
def backward_bias(q, k, v, do, db, state, opt, over, C: tl.constexpr, ONE_M: tl.constexpr, ONE_N: tl.constexpr):
    """Compute one tile of d bias, in the shape before expansion, summed over what it was broadcast to."""
    over_b, over_h, over_m, over_n = over  # entries, heads, tiles of queries and of keys that share the bias
    tiles_n = tl.cdiv(opt.keys, C.BN) // over_n
    tiles_m = tl.cdiv(opt.queries, C.BM) // over_m
    heads = opt.heads // over_h
    pid = tl.program_id(0)
    own_n = pid % tiles_n
    own_m = pid // tiles_n % tiles_m
    own_h = pid // tiles_n // tiles_m % heads
    own_b = pid // tiles_n // tiles_m // heads
    acc = tiles.zeros(C.BM, C.BN, C.ACC)
    for at_b in range(over_b):
        for at_h in range(over_h):
            for at_m in range(over_m):
                for at_n in range(over_n):
                    i0 = (own_m + at_m) * C.BM
                    j0 = (own_n + at_n) * C.BN
                    acc = bias_tile(acc, q, k, v, do, state, own_b + at_b, own_h + at_h, i0, j0, opt, C)
    m = own_m * C.BM + tl.arange(0, C.BM)
    j = own_n * C.BN + tl.arange(0, C.BN)
    base = db.ptr + tiles.wide(own_b) * db.stride[0] + tiles.wide(own_h) * db.stride[1]
    kind = db.ptr.dtype.element_ty
    if ONE_M and ONE_N:
        tl.store(base, tl.sum(tl.sum(acc, 1), 0).to(kind))
    elif ONE_M:
        tl.store(base + tiles.wide(j) * db.stride[3], tl.sum(acc, 0).to(kind), mask=j < opt.keys)
    elif ONE_N:
        tl.store(base + tiles.wide(m) * db.stride[2], tl.sum(acc, 1).to(kind), mask=m < opt.queries)
    else:
        where = base + tiles.wide(m)[:, None] * db.stride[2] + tiles.wide(j)[None, :] * db.stride[3]
        tl.store(where, acc.to(kind), mask=(m < opt.queries)[:, None] & (j < opt.keys)[None, :])


@triton.jit
def bias_tile(acc, q, k, v, do, state, b, h, i0, j0, opt, C: tl.constexpr):
    """Add ds/T of one tile of scores."""
    F: tl.constexpr = C.F
    n = tiles.key_count(opt, b)
    i = i0 + tl.arange(0, C.BM)
    first, last = visibility.visible_range(b, h, i, opt, n)
    lowest, _, _, highest = visibility.block_range(first, last, b, h, i0, i, opt, n, C)
    if (j0 < highest) & (j0 + C.BN > lowest):
        j = (j0 + tl.arange(0, C.BN))[None, :]
        g = h // opt.group
        rows = tiles.load_block(q, b, h, i0, 0, opt.queries, C.BM, C.D, C.BD, False)
        d_out = tiles.load_block(do, b, h, i0, 0, opt.queries, C.BM, C.E, C.BE, False)
        keys = tiles.load_block(k, b, g, j0, lowest, highest, C.BN, C.D, C.BD, False)
        values = tiles.load_block(v, b, g, j0, lowest, highest, C.BN, C.E, C.BE, False)
        x = tiles.dot(rows, tl.trans(keys), None, C)
        dp = tiles.dot(d_out, tl.trans(values), None, C)
        r = slopes.broadcast_rows(slopes.load_rows(state, b, h, i, n, opt, C, False), False)
        bias = scores.load_row_bias(b, h, i[:, None], opt, C.ACC)
        place = visibility.positions(b, h, i[:, None], opt), h
        y, visible = scores.compute_scores(x, b, h, i[:, None], j, j0 - i0, r.first, r.last, bias, place, opt, C, True)
        theta = tiles.column(tiles.load_theta(b, h, i, opt, C.ACC), opt)
        p, up, down, power = slopes.weigh(y, visible, r, theta, F, C.Z_IN_SHIFT, C.PRECISION == "tf32x3")
        if opt.seed is not None:
            kept = tiles.dropout_mask(b, h, i[:, None], j, opt, tiles.load_seed(opt))
            dp = tl.where(kept, dp * tiles.number(opt.keep_scale, C.ACC), 0.0)
        acc += slopes.slope_tile(y, visible, dp, p, up, down, power, r, F, C.STATS_GRAD) * r.a
    return acc


def sum_key_gradient(p: Problem, d_key_bias: torch.Tensor) -> torch.Tensor:
    """Return d bias of a bias per key in the shape before expansion, from that of every head, [B, H, N]."""
    sizes = unexpanded_shape(p.bias)
    grad, over = d_key_bias.unsqueeze(2), [at for at in (0, 1, 3) if sizes[at] == 1]
    return (grad.sum(over, keepdim=True) if over else grad).to(p.bias.dtype)


def compute_bias_gradient(call: BackwardCall) -> torch.Tensor:
    """Return d bias in the shape that the bias had before it was expanded."""
    p = call.problem
    config, how = config_of(p, "backward_bias", **call.flags)
    sizes = unexpanded_shape(p.bias)
    grad = torch.empty(sizes, dtype=p.bias.dtype, device=p.bias.device)
    b, h, m, n = p.bias.shape
    counts = b, h, triton.cdiv(m, config.BM), triton.cdiv(n, config.BN)
    over = [count if size == 1 else 1 for count, size in zip(counts, sizes, strict=True)]
    programs = math.prod(count // many for count, many in zip(counts, over, strict=True))
    inputs = view(p.q), view(p.k), view(p.v), view(call.do)
    constants = config, sizes[2] == 1, sizes[3] == 1
    launch(None, backward_bias, programs, (*inputs, view(grad), call.rows, options(p), tuple(over)), constants, **how)
    return grad
