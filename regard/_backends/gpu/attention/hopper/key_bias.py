"""A bias per key as sixteen more columns of q and k, so that the tensor cores add it to the scores.

    y = q·k + bias/scale = (q, 1, 1, 1, 0, …)·(k, high, middle, low, 0, …)      high + middle + low = bias/scale

Three bfloat16 numbers hold what float32 does. A head with a bias that is not finite, or too large to be added so, is
flagged: the kernel skips it, and `forward_overflow` computes it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.config import unexpanded_shape, view
from regard._backends.gpu.attention.tiles import Options
from regard._backends.gpu.launcher import launch
from regard._core.problem import Problem

COLUMNS = 16  # that one product of the tensor cores takes
LARGEST = tl.constexpr(2.0**60)  # bias/scale


class KeyBias(NamedTuple):
    """Flags of the heads, and their index: heads that share a bias share a flag."""

    flags: Any  # [B or 1, H or 1] int32: 1 if the head is left to `forward_overflow`
    heads: Any  # heads of a batch entry that differ: H or 1
    b: Any  # 1 if batch entries differ, else 0
    h: Any  # 1 if heads differ, else 0


def is_key_bias(p: Problem) -> bool:
    """True if the call has a bias that is the same for every query."""
    return p.bias is not None and p.bias.stride(2) == 0


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
    if tl.max(tl.where(tl.abs(x) < LARGEST, 0, 1), 0) > 0:  # a NaN too
        tl.store(flags + head, 1)
    x = tl.where(tl.abs(x) < LARGEST, x, 0.0)
    high = x.to(tl.bfloat16).to(tl.float32)
    middle = (x - high).to(tl.bfloat16).to(tl.float32)
    low = x - high - middle
    c = tl.arange(0, WIDTH)[None, :]
    piece = tl.where(c == 0, high[:, None], tl.where(c == 1, middle[:, None], tl.where(c == 2, low[:, None], 0.0)))
    to = columns + (tiles.wide(head) * opt.keys + j)[:, None] * WIDTH + c
    tl.store(to, piece.to(columns.dtype.element_ty), mask=j[:, None] < opt.keys)


@triton.jit
def is_left_out(key_bias, b, h):
    """True if the head is flagged."""
    return tl.load(key_bias.flags + b * key_bias.b * key_bias.heads + h * key_bias.h) != 0
