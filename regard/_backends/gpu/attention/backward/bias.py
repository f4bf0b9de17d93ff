"""Gradients of a bias, without atomics: a program sums ds/T over everything that one of its tiles was broadcast to.

    d bias                        over batch entries, heads, queries or keys that share an entry
    d relative[h, j − i + M − 1]  along each diagonal: one program per diagonal of tiles

The tiles of one diagonal of tiles have the same relative positions at the same places, so that a program adds them up
over the sequence, and sums the diagonals of that one tile at its end. Two diagonals of tiles share each relative
position. ds is computed once more, or read where it was stored.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from regard._backends.gpu.attention import scores, tiles, visibility
from regard._backends.gpu.attention.backward import slopes
from regard._backends.gpu.attention.backward.call import BackwardCall
from regard._backends.gpu.attention.config import config_of, options, unexpanded_shape, view
from regard._backends.gpu.attention.masks.tables import add_key_index
from regard._backends.gpu.attention.tiles import Options
from regard._backends.gpu.launcher import launch
from regard._call.problem import Problem

STORED = 64  # rows and columns of a tile of stored ds


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
        p, up, down, power = slopes.weigh(y, visible, r, theta, F, C.Z_IN_SHIFT, C.PRECISION != "ieee")
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


@triton.jit
def find_diagonal(opt, SIZE: tl.constexpr):
    """Return (b, h, tiles of keys ahead of the tile of queries, first and last + 1 tile of queries) of this program."""
    tiles_m = tl.cdiv(opt.queries, SIZE)
    tiles_n = tl.cdiv(opt.keys, SIZE)
    diagonals = tiles_m + tiles_n - 1
    head = tl.program_id(0) // diagonals
    ahead = tl.program_id(0) % diagonals - (tiles_m - 1)
    return head // opt.heads, head % opt.heads, ahead, tl.maximum(-ahead, 0), tl.minimum(tiles_m, tiles_n - ahead)


@triton.jit
def store_diagonals(acc, parts, SIZE: tl.constexpr):
    """Sum the diagonals of acc [queries, keys]: parts[program, e] is that of column − row = e − SIZE."""
    row = tl.arange(0, SIZE)[:, None]
    e = tl.arange(0, 2 * SIZE)
    column = e[None, :] - SIZE + row  # [SIZE, 2·SIZE]
    inside = (column >= 0) & (column < SIZE)
    along = tl.gather(acc, tl.where(inside, column, 0), 1)
    tl.store(parts + tiles.wide(tl.program_id(0)) * (2 * SIZE) + e, tl.sum(tl.where(inside, along, 0.0), 0))


@triton.jit
def backward_relative(q, k, v, do, parts, state, opt, C: tl.constexpr):
    """Compute ds of one diagonal of tiles and sum its diagonals."""
    b, h, ahead, first, last = find_diagonal(opt, C.BM)
    acc = tiles.zeros(C.BM, C.BM, C.ACC)
    for tile in range(first, last):
        acc = bias_tile(acc, q, k, v, do, state, b, h, tile * C.BM, (tile + ahead) * C.BM, opt, C)
    store_diagonals(acc, parts, C.BM)


@triton.jit
def sum_stored_diagonals(ds, parts, opt, SIZE: tl.constexpr):
    """Sum the diagonals of one diagonal of tiles of stored ds [heads, keys, queries], over the keys that are seen."""
    b, h, ahead, first, last = find_diagonal(opt, SIZE)
    n = tiles.key_count(opt, b)
    at = tl.arange(0, SIZE)
    acc = tiles.zeros(SIZE, SIZE, tl.float32)
    base = ds.ptr + (tiles.wide(b) * opt.heads + h) * ds.stride[0]
    for tile in range(first, last):
        i, j = tile * SIZE + at, (tile + ahead) * SIZE + at
        lowest, highest = visibility.visible_range(b, h, i, opt, n)
        highest = tl.where(i < opt.queries, highest, 0)
        seen = (j[:, None] >= lowest[None, :]) & (j[:, None] < highest[None, :])
        where = base + tiles.wide(j)[:, None] * ds.stride[1] + i[None, :]
        acc += tl.load(where, mask=seen, other=0.0).to(tl.float32)
    store_diagonals(tl.trans(acc), parts, SIZE)


def compute_relative_gradient(call: BackwardCall) -> torch.Tensor:
    """Return d relative, [H, M + N − 1], with ds computed once more."""
    p = call.problem
    config, how = config_of(p, "backward_bias", **call.flags)
    size = min(config.BM, config.BN)
    config, parts = config._replace(BM=size, BN=size), make_parts(p, size)
    inputs = view(p.q), view(p.k), view(p.v), view(call.do)
    arguments = *inputs, parts, call.rows, add_key_index(p, options(p))
    launch(None, backward_relative, parts[..., 0].numel(), arguments, (config,), **how)
    return join_parts(p, parts)


def make_parts(p: Problem, size: int) -> torch.Tensor:
    """Return room for the sums of every diagonal of tiles of `size` rows, [B, H, diagonals, 2 · size]."""
    (batch, heads, m, _), n = p.q.shape, p.k.shape[2]
    diagonals = triton.cdiv(m, size) + triton.cdiv(n, size) - 1
    return torch.empty(batch, heads, diagonals, 2 * size, dtype=p.accumulator, device=p.q.device)


def sum_stored(scratch: torch.Tensor, parts: torch.Tensor, opt: Options) -> None:
    """Fill the parts of some batch entries or heads, which lie side by side, from their ds [heads, keys, queries]."""
    programs = parts[..., 0].numel()
    launch(None, sum_stored_diagonals, programs, (view(scratch), parts, opt), (STORED,), num_warps=4)


def join_parts(p: Problem, parts: torch.Tensor) -> torch.Tensor:
    """Return d relative from `make_parts`, filled."""
    m, n, size = p.q.shape[2], p.k.shape[2], parts.shape[-1] // 2
    parts = parts.sum(0)
    below, above = torch.nn.functional.pad(parts, (0, 0, 0, 1)), torch.nn.functional.pad(parts, (0, 0, 1, 0))
    joined = below[..., :size] + above[..., size:]  # tile diagonal t − 1's upper half beside t's lower one
    first = triton.cdiv(m, size) * size - m  # joined begins at relative position −rows · size
    return joined.flatten(1)[:, first + 1 : first + m + n].to(p.relative.dtype)
