"""d relative[h, j − i + M − 1] = Σ ds/T along each diagonal: one program per diagonal of tiles, no atomics.

The tiles of one diagonal of tiles have the same relative positions at the same places, so that a program adds them up
over the batch and the sequence, and sums the diagonals of that one tile at its end. Two diagonals of tiles share each
relative position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.backward.bias import bias_tile
from regard._backends.gpu.attention.backward.call import BackwardCall
from regard._backends.gpu.attention.config import config_of, options, view
from regard._backends.gpu.attention.tables import add_key_index
from regard._backends.gpu.launcher import launch


@triton.jit
def backward_relative(q, k, v, do, parts, state, opt, batch, C: tl.constexpr):
    """Sum the diagonals of one diagonal of tiles: parts[h, diagonal, e] is that of column − row = e − BM."""
    tiles_m = tl.cdiv(opt.queries, C.BM)
    tiles_n = tl.cdiv(opt.keys, C.BM)
    diagonals = tiles_m + tiles_n - 1
    pid = tl.program_id(0)
    h = pid // diagonals
    ahead = pid % diagonals - (tiles_m - 1)  # tiles of keys before the tile of queries: negative
    acc = tiles.zeros(C.BM, C.BM, C.ACC)
    for b in range(batch):
        for tile in range(tl.maximum(-ahead, 0), tl.minimum(tiles_m, tiles_n - ahead)):
            acc = bias_tile(acc, q, k, v, do, state, b, h, tile * C.BM, (tile + ahead) * C.BM, opt, C)
    row = tl.arange(0, C.BM)[:, None]
    e = tl.arange(0, 2 * C.BM)
    column = e[None, :] - C.BM + row  # [BM, 2·BM]
    inside = (column >= 0) & (column < C.BM)
    along = tl.gather(acc, tl.where(inside, column, 0), 1)
    tl.store(parts + tiles.wide(pid) * (2 * C.BM) + e, tl.sum(tl.where(inside, along, 0.0), 0))


def compute_relative_gradient(call: BackwardCall) -> torch.Tensor:
    """Return d relative, [H, M + N − 1]."""
    p = call.problem
    config, how = config_of(p, "backward_bias", **call.flags)
    size = min(config.BM, config.BN)
    config = config._replace(BM=size, BN=size)
    (batch, heads, m, _), n = p.q.shape, p.k.shape[2]
    rows, columns = triton.cdiv(m, size), triton.cdiv(n, size)
    parts = torch.empty(heads, rows + columns - 1, 2 * size, dtype=p.accumulator, device=p.q.device)
    inputs = view(p.q), view(p.k), view(p.v), view(call.do)
    arguments = *inputs, parts, call.rows, add_key_index(p, options(p)), batch
    launch(None, backward_relative, heads * (rows + columns - 1), arguments, (config,), **how)
    below, above = torch.nn.functional.pad(parts, (0, 0, 0, 1)), torch.nn.functional.pad(parts, (0, 0, 1, 0))
    joined = below[..., :size] + above[..., size:]  # tile diagonal t − 1's upper half beside t's lower one
    first = rows * size - m  # joined begins at relative position −rows · size
    return joined.flatten(1)[:, first + 1 : first + m + n].to(p.relative.dtype)
