"""What every attention kernel is given, `Options` and `Config`, and its loads, stores and small tile functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-(2.0**100))  # score of a hidden key: finite, so that no difference is NaN
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class View(NamedTuple):
    """A tensor inside a kernel: its pointer (None: no such input) and its strides."""

    ptr: Any
    stride: Any


class Table(NamedTuple):
    """A contiguous array [heads that differ, …] that a small kernel fills for one call."""

    ptr: Any
    b: Any  # head (b·b + h·h)/2 of the array serves head h of batch entry b: Triton 3.6 loses a 1 in nested tuples
    h: Any


NO_TABLE = Table(None, 0, 0)  # kernels ask for `.ptr`: Triton 3.6 cannot compare a tuple with None


class TileMap(NamedTuple):
    """The tiles of a dense mask: which are full, which partial, per block of queries or of keys."""

    lists: Table  # [heads, blocks, tiles + 1]: full tiles from the front, partial ones from the back
    counts: Table  # [heads, blocks, 2]: full, partial
    blocks: Any  # twice their number, as in `Table`
    tiles: Any  # twice the number of a block
    rows: Table  # [heads, queries, 2]: first visible key, number of them; none where the blocks are of keys


class MaskBits(NamedTuple):
    """A dense mask in bits, 32 keys to a word: kernels load a few words per row where a tile is partial."""

    words: Table  # [heads, queries, words]; one query where all share a row
    size: Any  # words of a head
    step: Any  # words between two queries, 0 where they share a row


class KeyIndex(NamedTuple):
    """Which keys a bias per key leaves visible."""

    rank: Table  # [heads, keys + 1]: visible keys before each key
    keys: Table  # [heads, keys]: the visible keys in their order


class Options(NamedTuple):
    """The options of one call; absent ones are None and cost nothing, floats are pairs (float32, remainder)."""

    bias: View
    key_bias: View  # [B, H, N]: a bias that is the same for every query, beside no mask
    row_bias: View  # [B, H, M]
    relative: View  # [H, M + N − 1]
    score_params: View  # [P, H]
    interval: View  # [3, B, H, M]: lo, hi, position
    mask: View
    temperature: View
    sink: View
    thetas: View  # [B, H, M]: the normaliser's parameter of each row, in the place of `theta`
    lengths: Any
    seed: Any
    left: Any
    right: Any
    scale: tuple
    cap: Any
    theta: tuple
    drop_below: Any  # dropout keeps a key whose random word is at least this
    keep_scale: tuple  # 1 / (1 − dropout)
    heads: Any
    group: Any  # query heads per key head
    queries: Any
    keys: Any
    offset: Any = None  # causal offset, for distances of a part
    key_index: KeyIndex = KeyIndex(NO_TABLE, NO_TABLE)  # beside a key bias
    tiles: TileMap = TileMap(NO_TABLE, NO_TABLE, 0, 0, NO_TABLE)  # beside a mask
    bits: MaskBits = MaskBits(NO_TABLE, 0, 0)  # beside a tile map
    holes: Any = None  # a byte, beside a mask: 0 if its rows are intervals, whose own kernel has computed the call
    ranges: Table = NO_TABLE  # [heads, key blocks, 4]: the queries that see a key block, in dk and dv of ragged rows


class Config(NamedTuple):
    """The compile-time constants of a kernel."""

    F: Any  # the normaliser's tile functions
    SCORE: Any  # the score function's; without one its members are None
    NEED: Any
    SLOT: Any
    SPARSE: bool
    LINEAR: bool
    CAUSAL: bool  # no query sees a key after itself
    PACKED: bool  # the rows of a program belong to several heads
    RAGGED: bool  # the keys of a row are no function of its index: an interval or a row bias decides
    ACC: Any
    PRECISION: str
    WIDEN: bool  # the interpreter multiplies bfloat16 as bits: widen first
    D: int
    E: int
    BD: int
    BE: int
    BM: int
    BN: int
    BULK: bool  # whole blocks are loaded through tensor descriptors
    LANES: int  # partial sums per row, so that its threads need not reduce in every tile
    STATS_GRAD: bool = False  # statistics have gradients
    TEMPERATURE_GRAD: bool = False  # the temperature's gradient is wanted
    ROW_BIAS_GRAD: bool = False  # that of the bias per query
    KEY_BIAS_GRAD: bool = False  # that of the bias per key
    THETA_GRAD: bool = False  # that of the normaliser's parameter
    Z_IN_SHIFT: bool = False  # backward: 1/Z is part of the exponent


@triton.jit
def zeros(M: tl.constexpr, N: tl.constexpr, TYPE: tl.constexpr):
    """Return an [M, N] tile of zeros."""
    return tl.zeros([M, N], TYPE)


@triton.jit
def full(M: tl.constexpr, VALUE: tl.constexpr, TYPE: tl.constexpr):
    """Return a vector [M] of one value."""
    return tl.full([M], VALUE, TYPE)


@triton.jit
def dot(x, y, acc, C: tl.constexpr):
    """Return acc + x·y in the accumulator's precision."""
    if C.WIDEN:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, acc, input_precision=C.PRECISION, out_dtype=C.ACC)


@triton.jit
def fold(x, C: tl.constexpr):
    """Sum a tile over its keys, [M, N] → [M, LANES]."""
    if C.LANES == 1:
        folded = tl.sum(x, 1)[:, None]
    else:
        folded = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // C.LANES, C.LANES]), 1)
    return folded


@triton.jit
def fold_max(x, C: tl.constexpr):
    """Take the maximum of a tile over its keys, [M, N] → [M], laid out as the lanes are."""
    if C.LANES == 1:
        most = tl.max(x, 1)
    else:
        most = tl.max(tl.max(tl.reshape(x, [x.shape[0], x.shape[1] // C.LANES, C.LANES]), 1), 1)
    return most


@triton.jit
def wide(x):
    """Cast an index to 64 bits, as tensors may have more than 2³¹ elements."""
    return tl.cast(x, tl.int64)


@triton.jit
def number(pair, like):
    """Return a float that came as two float32 numbers, in the precision of `like`."""
    return tl.cast(pair[0], like) + tl.cast(pair[1], like)


@triton.jit
def key_count(opt, b):
    """Return the number of keys of batch entry b."""
    n = opt.keys
    if opt.lengths is not None:
        n = tl.maximum(tl.minimum(tl.load(opt.lengths + b).to(tl.int32), n), 0)
    return n


@triton.jit
def window_range(i, opt, n):
    """Return (first, last): query i sees keys first ≤ j < last by causal order, window and lengths."""
    first = i * 0
    last = i * 0 + n
    if opt.left is not None:
        first = tl.maximum(i - opt.left, 0)
    if opt.right is not None:
        last = tl.minimum(i + opt.right + 1, n)
    return first, last


@triton.jit
def load_rows(view, b, h, i, visible, other):
    """Load a number per row, view[b, h, i]."""
    where = view.ptr + wide(b) * view.stride[0] + wide(h) * view.stride[1]
    return tl.load(where + wide(i) * view.stride[2], mask=visible, other=other)


@triton.jit
def load_block(
    view, b, h, start, first, last, SIZE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, ALL: tl.constexpr
):
    """Load view[b, h, start : start + SIZE, :] as [SIZE, PAD]; rows outside [first, last) are 0 and never read."""
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
def load_bulk_block(blocks, b, h, start, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Load a whole block [SIZE, PAD] through a tensor descriptor."""
    return tl.reshape(blocks.load([tl.cast(b, tl.int32), tl.cast(h, tl.int32), start, 0]), [SIZE, PAD])


@triton.jit
def store_block(view, b, h, start, last, tile, SIZE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr):
    """Store a tile to view[b, h, start : start + SIZE, :], up to row `last`."""
    base = view.ptr + wide(b) * view.stride[0] + wide(h) * view.stride[1]
    base += wide(start) * view.stride[2]
    r = tl.arange(0, SIZE)
    d = tl.arange(0, PAD)
    where = base + r[:, None] * view.stride[2] + d[None, :] * view.stride[3]
    tl.store(where, tile.to(view.ptr.dtype.element_ty), mask=(start + r < last)[:, None] & (d[None, :] < DIM))


@triton.jit
def row_factor(b, h, i, opt, like, LINEAR: tl.constexpr):
    """Return a with s = a·y, scale/T or 1/T, as [rows]."""
    a = tl.full(i.shape, 1.0, like)
    if opt.temperature.ptr is not None:
        a = 1.0 / load_rows(opt.temperature, b, h, i, i < opt.queries, 1.0).to(like)
    if LINEAR:
        a = a * number(opt.scale, like)
    return a


@triton.jit
def load_theta(b, h, i, opt, like):
    """Return the normaliser's parameter: one number, or a number per row i where they differ."""
    theta = number(opt.theta, like)
    if opt.thetas.ptr is not None:
        theta = load_rows(opt.thetas, b, h, i, i < opt.queries, theta).to(like)
    return theta


@triton.jit
def load_head_theta(b, h, opt, like):
    """Return the normaliser's parameter of a head whose rows share it."""
    theta = number(opt.theta, like)
    if opt.thetas.ptr is not None:
        theta = tl.load(opt.thetas.ptr + wide(b) * opt.thetas.stride[0] + wide(h) * opt.thetas.stride[1]).to(like)
    return theta


@triton.jit
def column(theta, opt):
    """Return the parameter of rows as it broadcasts over a tile [M, N]."""
    if opt.thetas.ptr is not None:
        theta = theta[:, None]
    return theta


@triton.jit
def weigh_excess(t, theta, C: tl.constexpr):
    """Return (g, g′) of a threshold map at t ≥ 0: of a power g = g′·t, which spares a second logarithm and power."""
    slope = C.F.slope(t, theta)
    if C.F.order == 0:
        slope = tl.where(t > 0.0, slope, 0.0)
    if C.F.is_power and C.F.order == 0:
        weight = slope * t
    else:
        weight = C.F.weigh(t, theta)
    return weight, slope


@triton.jit
def dropout_mask(b, h, i, j, opt, seed):
    """Return which weights dropout keeps: philox(seed; key, row) starts with a word of at least opt.drop_below."""
    row = (wide(b) * opt.heads + h) * opt.queries + wide(i) + wide(j) * 0
    low = (row & 0xFFFFFFFF).to(tl.uint32)
    high = (row >> 32).to(tl.uint32)
    key = (j + i * 0).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, key, low, high, low * 0)
    return word >= wide(opt.drop_below).to(tl.uint32)


@triton.jit
def positive_part(x):
    """Return max(x, 0), with NaN kept."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def unshift(shift):
    """Return c = exp(−m); maps that use it have m ≥ 0, for the others it need only be finite."""
    return tl.exp2(tl.minimum(-shift, 64.0))


@triton.jit
def load_seed(opt):
    """Load the dropout seed, 0 without dropout."""
    seed = 0
    if opt.seed is not None:
        seed = tl.load(opt.seed)
    return seed
