"""A bias by relative position in units of y = q·k, so that a kernel adds one number to each score.

    y_ij = q·k + bias/scale = q·k + table[h, PADDING + M − 1 + j − i]

Positions of rows and keys that do not exist have entries as well, so that no kernel compares an index. A head with a
bias that is not finite, or too large to be added so, is flagged: `forward_hopper` skips it, and `forward_overflow`
computes it. `backward_hopper` takes it: −inf is HIDDEN in the table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.config import view
from regard._backends.gpu.attention.hopper.key_bias import LARGEST
from regard._backends.gpu.attention.tiles import HIDDEN, Options
from regard._backends.gpu.launcher import launch
from regard._core.problem import Problem

PADDING = tl.constexpr(256)  # entries before and after the table: the rows of a block and the keys of a tile
BLOCK = 1024


class RelativeBias(NamedTuple):
    """The table and the flags of its heads, in the form of `key_bias.KeyBias`."""

    flags: Any  # [H or 1] int32: 1 if the head is left to `forward_overflow`
    heads: Any  # heads that differ: H or 1
    b: Any  # 0: batch entries share the table
    h: Any  # 1 if heads differ, else 0
    table: Any  # [H or 1, width] float32
    width: Any


def make_relative_bias(p: Problem, options: Options) -> RelativeBias:
    """Pad and scale the table of a call."""
    assert p.relative is not None  # `supports` saw it
    heads = 1 if p.relative.stride(0) == 0 else p.relative.shape[0]
    width = p.relative.shape[1] + 2 * PADDING.value
    flags = torch.zeros(heads, dtype=torch.int32, device=p.q.device)
    table = torch.empty(heads, width, dtype=torch.float32, device=p.q.device)
    blocks = triton.cdiv(width, BLOCK)
    arguments = view(p.relative), table, flags, width, blocks, options
    launch(None, store_table, heads * blocks, arguments, (BLOCK,), num_warps=4)
    return RelativeBias(flags, heads, 0, int(heads > 1), table, width)


@triton.jit
def store_table(relative, table, flags, width, blocks, opt, N: tl.constexpr):
    """Stores N entries of one head."""
    head = tl.program_id(0) // blocks
    at = tl.program_id(0) % blocks * N + tl.arange(0, N)
    inside = (at >= PADDING) & (at < width - PADDING)
    where = relative.ptr + tiles.wide(head) * relative.stride[0] + tiles.wide(at - PADDING) * relative.stride[1]
    bias = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    x = bias / tiles.number(opt.scale, tl.float32)
    if tl.max(tl.where(tl.abs(x) < LARGEST, 0, 1), 0) > 0:  # a NaN too
        tl.store(flags + head, 1)
    x = tl.where(x < 0.5 * HIDDEN, 0.5 * HIDDEN, x)
    x = tl.where(bias == -float("inf"), HIDDEN, x)
    tl.store(table + tiles.wide(head) * width + at, x, mask=at < width)
