"""Biases in units of y = q·k, as `forward_hopper` and `backward_hopper` add them to the scores.

A bias per key comes as sixteen more columns of q and k, so that the tensor cores add it; three bfloat16 numbers hold
what float32 does:

    y = q·k + bias/scale = (q, 1, 1, 1, 0, …)·(k, high, middle, low, 0, …)      high + middle + low = bias/scale

A bias by relative position is one number more for each score (`relative_scores.py`). Positions of rows and keys that do
not exist have entries as well, so that no kernel compares an index:

    y_ij = q·k + bias/scale = q·k + table[h, PADDING + M − 1 + j − i]

A head with a bias that is not finite, or too large to be added so, is flagged: `forward_hopper` skips it, and
`forward_overflow` computes it. `backward_hopper` takes it: −inf is HIDDEN in the table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.config import unexpanded_shape, view
from regard._backends.gpu.attention.tiles import HIDDEN, Options
from regard._backends.gpu.launcher import launch
from regard._call.problem import Problem

COLUMNS = 16  # that one product of the tensor cores takes
LARGEST = tl.constexpr(2.0**60)  # bias/scale
PADDING = tl.constexpr(256)  # entries before and after the table: the rows of a block and the keys of a tile
BLOCK = 1024  # entries of the table that a program stores


class KeyBias(NamedTuple):
    """Flags of the heads, and their index: heads that share a bias share a flag."""

    flags: Any  # [B or 1, H or 1] int32: 1 if the head is left to `forward_overflow`
    heads: Any  # heads of a batch entry that differ: H or 1
    b: Any  # 1 if batch entries differ, else 0
    h: Any  # 1 if heads differ, else 0


def make_key_bias(p: Problem, options: Options) -> tuple[KeyBias, torch.Tensor]:
    """The flags, and the columns beside k, [B or 1, H or 1, N, 16]."""
    assert p.bias is not None  # `hopper.supports` saw it
    batch, heads = unexpanded_shape(p.bias)[:2]
    keys = p.k.shape[-2]
    flags = torch.zeros(batch, heads, dtype=torch.int32, device=p.q.device)
    columns = torch.empty(batch, heads, keys, COLUMNS, dtype=p.q.dtype, device=p.q.device)
    blocks = triton.cdiv(keys, 128)
    arguments = view(p.bias), columns, flags, heads, blocks, options
    launch(None, store_columns, batch * heads * blocks, arguments, (128, COLUMNS), num_warps=4)
    return KeyBias(flags, heads, int(batch > 1), int(heads > 1)), columns


@triton.jit
def store_columns(bias, columns, flags, heads, blocks, opt, N: tl.constexpr, WIDTH: tl.constexpr):
    """Stores the columns of N keys of one head."""
    head = tl.program_id(0) // blocks
    j = tl.program_id(0) % blocks * N + tl.arange(0, N)
    at = bias.ptr + tiles.wide(head // heads) * bias.stride[0] + tiles.wide(head % heads) * bias.stride[1]
    x = tl.load(at + tiles.wide(j) * bias.stride[3], mask=j < opt.keys, other=0.0).to(tl.float32)
    x = x / tiles.number(opt.scale, tl.float32)
    flag_large(x, flags, head)
    x = tl.where(tl.abs(x) < LARGEST, x, 0.0)
    high = x.to(tl.bfloat16).to(tl.float32)
    middle = (x - high).to(tl.bfloat16).to(tl.float32)
    low = x - high - middle
    c = tl.arange(0, WIDTH)[None, :]
    piece = tl.where(c == 0, high[:, None], tl.where(c == 1, middle[:, None], tl.where(c == 2, low[:, None], 0.0)))
    to = columns + (tiles.wide(head) * opt.keys + j)[:, None] * WIDTH + c
    tl.store(to, piece.to(columns.dtype.element_ty), mask=j[:, None] < opt.keys)


class RelativeBias(NamedTuple):
    """The table and the flags of its heads, in the form of `KeyBias`."""

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
    flag_large(x, flags, head)
    x = tl.where(x < 0.5 * HIDDEN, 0.5 * HIDDEN, x)
    x = tl.where(bias == -float("inf"), HIDDEN, x)
    tl.store(table + tiles.wide(head) * width + at, x, mask=at < width)


@triton.jit
def flag_large(x, flags, head):
    """Flags a head if one of its numbers is too large to be added to the products, infinite or NaN."""
    if tl.max(tl.where(tl.abs(x) < LARGEST, 0, 1), 0) > 0:
        tl.store(flags + head, 1)


@triton.jit
def is_left_out(bias, b, h):
    """True if the head is flagged."""
    return tl.load(bias.flags + b * bias.b * bias.heads + h * bias.h) != 0
