"""d relative[h, j − i + M − 1] = Σ ds/T along each diagonal: one program per diagonal of tiles, no atomics.

The tiles of one diagonal of tiles have the same relative positions at the same places, so that a program adds them up
over the sequence, and sums the diagonals of that one tile at its end. Two diagonals of tiles share each relative
position. ds is computed once more, or read where it was stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from regard._backends.gpu.attention import tiles, visibility
from regard._backends.gpu.attention.backward.bias import bias_tile
from regard._backends.gpu.attention.backward.call import BackwardCall
from regard._backends.gpu.attention.config import config_of, options, view
from regard._backends.gpu.attention.masks.tables import add_key_index
from regard._backends.gpu.attention.tiles import Options
from regard._backends.gpu.launcher import launch
from regard._core.problem import Problem

STORED = 64  # rows and columns of a tile of stored ds


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
