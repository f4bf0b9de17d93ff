"""What every attention kernel does with a tile of scores: s = (cap(scale·qkᵀ) + bias) / T over the visible keys.

Kernels keep scores as y with s = a·y, a > 0 per row, so that exp(s − m) is exp2 of one multiply-add:

    linear (no soft cap, no bias, scale > 0)    y = q·k                        a = scale / T
    otherwise                                   y = cap(scale · q·k) + bias    a = 1 / T

Index tiles i and j come expanded, ([M, 1], [1, N]) or transposed, so that one function serves both orientations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-(2.0**100))  # the score of a key that a row does not see: finite, so that no difference is NaN
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class View(NamedTuple):
    """A tensor inside a kernel: its pointer (None: there is no such input) and its strides."""

    ptr: Any
    stride: tuple


class Options(NamedTuple):
    """The options of one call. Absent ones are None and cost nothing; numbers are pairs (float32, remainder)."""

    bias: View
    mask: View
    temperature: View
    sink: View
    lengths: Any
    seed: Any
    left: Any
    right: Any
    scale: tuple
    cap: Any
    theta: tuple
    dropped: Any  # keep a key where its random word is at least this
    kept: tuple  # 1 / (1 − dropout), what kept weights are multiplied by
    heads: Any
    group: Any  # query heads per key head
    queries: Any
    keys: Any
    ahead: Any = None  # how far the first query stands beyond the first key, for distances of a part


class Config(NamedTuple):
    """What a kernel is compiled for."""

    F: Any  # the normaliser's tile functions
    NEED: Any
    SLOT: Any
    SPARSE: bool
    LINEAR: bool
    BEHIND: bool  # no query sees a key after itself
    TILTED: bool  # statistics have gradients
    HEAT: bool  # the temperature's gradient is wanted
    FOLDED: bool  # backward: 1/Z is part of the exponent
    ACC: Any
    PRECISION: str
    WIDEN: bool  # the interpreter multiplies bfloat16 as bits: widen first
    D: int
    E: int
    BD: int
    BE: int
    BM: int
    BN: int
    BULK: bool  # whole blocks come by the bulk copy engine, through tensor descriptors
    LANES: int  # partial sums per row, so that threads of a row need not meet in every tile


@triton.jit
def zeros(M: tl.constexpr, N: tl.constexpr, TYPE: tl.constexpr):
    return tl.zeros([M, N], TYPE)


@triton.jit
def full(M: tl.constexpr, VALUE: tl.constexpr, TYPE: tl.constexpr):
    return tl.full([M], VALUE, TYPE)


@triton.jit
def dot(x, y, acc, C: tl.constexpr):
    """acc + x·y, in the accumulator's precision."""
    if C.WIDEN:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, acc, input_precision=C.PRECISION, out_dtype=C.ACC)


@triton.jit
def fold(x, C: tl.constexpr):
    """Σ over the tile's keys, [M, N] → [M, LANES]."""
    return fold_to(x, x.shape[0], x.shape[1] // C.LANES, C.LANES)


@triton.jit
def fold_to(x, M: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr):
    if LANES == 1:
        folded = tl.sum(x, 1)[:, None]
    else:
        folded = tl.sum(tl.reshape(x, [M, PARTS, LANES]), 1)
    return folded


@triton.jit
def highest(x, C: tl.constexpr):
    """max over the tile's keys, [M, N] → [M], laid out as the lanes are."""
    return highest_to(x, x.shape[0], x.shape[1] // C.LANES, C.LANES)


@triton.jit
def highest_to(x, M: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr):
    if LANES == 1:
        most = tl.max(x, 1)
    else:
        most = tl.max(tl.max(tl.reshape(x, [M, PARTS, LANES]), 1), 1)
    return most


@triton.jit
def wide(x):
    """An index in 64 bits: more than 2³¹ elements are allowed."""
    return tl.cast(x, tl.int64)


@triton.jit
def number(pair, like):
    """A Python float that came as two float32 numbers, in the precision of `like`."""
    return tl.cast(pair[0], like) + tl.cast(pair[1], like)


@triton.jit
def key_count(opt, b):
    n = opt.keys
    if opt.lengths is not None:
        n = tl.maximum(tl.minimum(tl.load(opt.lengths + b).to(tl.int32), n), 0)
    return n


@triton.jit
def interval(i, opt, n):
    """Query i sees keys first ≤ j < last, as far as causal order, window and lengths decide."""
    first = i * 0
    last = i * 0 + n
    if opt.left is not None:
        first = tl.maximum(i - opt.left, 0)
    if opt.right is not None:
        last = tl.minimum(i + opt.right + 1, n)
    return first, last


@triton.jit
def rows_of(view, b, h, i, seen, other):
    """A number per row, view[b, h, i]."""
    where = view.ptr + wide(b) * view.stride[0] + wide(h) * view.stride[1]
    return tl.load(where + wide(i) * view.stride[2], mask=seen, other=other)


@triton.jit
def block_of(
    view, b, h, start, first, last, SIZE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, ALL: tl.constexpr
):
    """view[b, h, start : start + SIZE, :] as [SIZE, PAD]; rows outside [first, last) are 0 and never read."""
    base = view.ptr + wide(b) * view.stride[0] + wide(h) * view.stride[1]
    base += wide(start) * view.stride[2]
    r = tl.arange(0, SIZE)
    d = tl.arange(0, PAD)
    where = base + r[:, None] * view.stride[2] + d[None, :] * view.stride[3]
    inside = (start + r >= first) & (start + r < last)
    if ALL:
        if DIM == PAD:
            tile = tl.load(where)
        else:
            tile = tl.load(where, mask=d[None, :] < DIM, other=0.0)
    else:
        tile = tl.load(where, mask=inside[:, None] & (d[None, :] < DIM), other=0.0)
    return tile


@triton.jit
def bulk_of(blocks, b, h, start, SIZE: tl.constexpr, PAD: tl.constexpr):
    """The same block, whole, through a tensor descriptor."""
    return tl.reshape(blocks.load([tl.cast(b, tl.int32), tl.cast(h, tl.int32), start, 0]), [SIZE, PAD])


@triton.jit
def store_block(view, b, h, start, last, tile, SIZE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr):
    base = view.ptr + wide(b) * view.stride[0] + wide(h) * view.stride[1]
    base += wide(start) * view.stride[2]
    r = tl.arange(0, SIZE)
    d = tl.arange(0, PAD)
    where = base + r[:, None] * view.stride[2] + d[None, :] * view.stride[3]
    tl.store(where, tile.to(view.ptr.dtype.element_ty), mask=(start + r < last)[:, None] & (d[None, :] < DIM))


@triton.jit
def dense_at(view, b, h, i, j):
    where = view.ptr + wide(b) * view.stride[0] + wide(h) * view.stride[1]
    return where + wide(i) * view.stride[2] + wide(j) * view.stride[3]


@triton.jit
def tanh(x):
    """(1 − e)/(1 + e), e = exp(−2|x|); near 0, where that cancels, a convergent of x/(1 + x²/(3 + x²/(5 + …)))."""
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    near = tl.minimum(size, 0.25)
    square = near * near
    above = tl.where(size < 0.25, near * (10395.0 + square * (1260.0 + square * 21.0)), 1.0 - e)
    below = tl.where(size < 0.25, 10395.0 + square * (4725.0 + square * (210.0 + square)), 1.0 + e)
    t = above / below
    return tl.where(x < 0.0, -t, t)


@triton.jit
def scores(x, b, h, i, j, first, last, opt, LINEAR: tl.constexpr, EDGE: tl.constexpr):
    """(y, seen) of a tile of products x = q·k; y is HIDDEN where a key is not seen."""
    y = x
    if not LINEAR:
        y = x * number(opt.scale, x.dtype)
        if opt.cap is not None:
            cap = number(opt.cap, x.dtype)
            y = cap * tanh(y / cap)
    if opt.bias.ptr is not None:
        bias = tl.load(dense_at(opt.bias, b, h, i, j), mask=(i < opt.queries) & (j < opt.keys), other=0.0).to(x.dtype)
        y = tl.where(bias == -float("inf"), HIDDEN, y + bias)
    if opt.mask.ptr is not None:
        shown = tl.load(dense_at(opt.mask, b, h, i, j), mask=(i < opt.queries) & (j < opt.keys), other=0).to(tl.int32)
        y = tl.where(shown == 0, HIDDEN, y)
    if EDGE:
        y = tl.where(j < first, HIDDEN, y)
        y = tl.where(j < tl.where(i < opt.queries, last, 0), y, HIDDEN)
    if EDGE or (opt.bias.ptr is not None) or (opt.mask.ptr is not None):
        seen = y != HIDDEN
    else:
        seen = tl.full(x.shape, 1, tl.int1)
    return y, seen


@triton.jit
def cap_slope(x, opt):
    """∂ cap(scale·x) / ∂(scale·x) = 1 − tanh²."""
    t = tanh(x * number(opt.scale, x.dtype) / number(opt.cap, x.dtype))
    return 1.0 - t * t


@triton.jit
def row_factor(b, h, i, opt, like, LINEAR: tl.constexpr):
    """a with s = a·y: scale/T or 1/T, as [rows]."""
    a = tl.full(i.shape, 1.0, like)
    if opt.temperature.ptr is not None:
        a = 1.0 / rows_of(opt.temperature, b, h, i, i < opt.queries, 1.0).to(like)
    if LINEAR:
        a = a * number(opt.scale, like)
    return a


@triton.jit
def keeps(b, h, i, j, opt, seed):
    """Which weights dropout keeps: the first word of philox(seed; key, row) is at least opt.dropped."""
    row = (wide(b) * opt.heads + h) * opt.queries + wide(i) + wide(j) * 0
    low = (row & 0xFFFFFFFF).to(tl.uint32)
    high = (row >> 32).to(tl.uint32)
    key = (j + i * 0).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, key, low, high, low * 0)
    return word >= wide(opt.dropped).to(tl.uint32)


@triton.jit
def positive_part(x):
    """max(x, 0) that lets NaN through."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def unshift(shift):
    """c = exp(−m); maps that use it have m ≥ 0, for the others it need only be finite."""
    return tl.exp2(tl.minimum(-shift, 64.0))


@triton.jit
def load_seed(opt):
    seed = 0
    if opt.seed is not None:
        seed = tl.load(opt.seed)
    return seed
