"""s = (cap(scale·qkᵀ) + bias) / T of a tile over its visible keys, T the temperature; or a score function for the cap.

Kernels keep scores as y with s = a·y, a > 0 per row, so that exp(s − m) is exp2 of one multiply-add:

    linear (no cap, function, bias; scale > 0)  y = q·k                        a = scale / T
    otherwise                                   y = cap(scale · q·k) + bias    a = 1 / T

a is made by `tiles.row_factor`, and in the Gluon kernel by `hopper/forward.process_block`. A T that is one number for
all rows of linear scores is part of `scale` from `_core/prepare.py` on.

Index tiles i and j come expanded, ([M, 1], [1, N]) or transposed, so that one function serves both orientations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention.tiles import HIDDEN, load_rows, number, wide
from regard._call.score_function import tanh


@triton.jit
def dense_ptr(view, b, h, i, j):
    """Return pointers to view[b, h, i, j]."""
    where = view.ptr + wide(b) * view.stride[0] + wide(h) * view.stride[1]
    return where + wide(i) * view.stride[2] + wide(j) * view.stride[3]


@triton.jit
def load_params(h, like, opt, COUNT: tl.constexpr):
    """Load the parameters of the score function for head h, or for each of the heads h, as a tuple of tiles as `like`.

    They are tiles because the interpreter of Triton 3.9 cannot join comparisons of scalars by & and |.
    """
    params = ()
    for at in tl.static_range(COUNT):
        where = opt.score_params.ptr + at * opt.score_params.stride[0] + wide(h) * opt.score_params.stride[1]
        params = params + (tl.broadcast_to(tl.load(where).to(like.dtype), like.shape),)  # noqa: RUF005
    return params


@triton.jit
def call_score(FUNCTION: tl.constexpr, s, place, j, opt, COUNT: tl.constexpr):
    """Return FUNCTION(s, i, j, h, *params) of a tile of scores; place: positions of the queries, and their head."""
    i = tl.cast(place[0], s.dtype)
    h = tl.broadcast_to(tl.cast(place[1], s.dtype), i.shape)
    params = load_params(place[1], i, opt, COUNT)
    found = FUNCTION(s, i, tl.cast(j, s.dtype), h, *params)
    return tl.zeros(s.shape, s.dtype) + found


@triton.jit
def load_row_bias(b, h, i, opt, like):
    """Load the bias of rows i, 0 without one."""
    bias = 0.0
    if opt.row_bias.ptr is not None:
        bias = load_rows(opt.row_bias, b, h, i, i < opt.queries, 0.0).to(like)
    return bias


@triton.jit
def load_relative(h, i, j, ahead, opt, like):
    """Load relative[h, j − i + M − 1] of a tile, or of vectors i and j where `ahead` is None.

    A tile takes its numbers from one strip of the table. One load each would go through shared memory score by score,
    as Triton copies what a loop loads ahead of time.
    """
    table = opt.relative.ptr + wide(h) * opt.relative.stride[0]
    if ahead is None:
        i = tl.minimum(i, opt.queries - 1)
        j = tl.minimum(j, opt.keys - 1)
        bias = tl.load(table + (j - i + opt.queries - 1))
    else:
        M: tl.constexpr = i.shape[0] * i.shape[1]
        N: tl.constexpr = j.shape[0] * j.shape[1]
        at = ahead - M + opt.queries + tl.arange(0, triton.next_power_of_2(M + N))
        strip = tl.load(table + at, mask=(at >= 0) & (at < opt.queries + opt.keys - 1), other=0.0)
        place = tl.reshape(tl.arange(0, N), j.shape) - tl.reshape(tl.arange(0, M), i.shape) + (M - 1)
        bias = tl.reshape(tl.gather(strip, tl.reshape(place, [M * N]), 0), place.shape)
    return bias.to(like)


@triton.jit
def load_bits(b, h, i, j, start, opt, SIZE: tl.constexpr):
    """Load the words of the mask's rows i that hold keys start … start + SIZE, as they broadcast: bit j % 32 is key j.

    A number per row, because a tile of bytes would have a layout of its own, and every score be moved into it and back.
    """
    where = opt.bits.words.ptr + (wide(b) * opt.bits.words.b + wide(h) * opt.bits.words.h) // 2 * opt.bits.size
    where += wide(i) * opt.bits.step + start // 32
    bits = tl.load(where, mask=i < opt.queries, other=0)
    for c in tl.static_range(1, SIZE // 32):
        bits = tl.where(j - start < 32 * c, bits, tl.load(where + c, mask=i < opt.queries, other=0))
    return bits


@triton.jit
def compute_scores(
    x, b, h, i, j, ahead, first, last, row_bias, place, opt, C: tl.constexpr, EDGE: tl.constexpr, bits=None
):
    """Turn products x = q·k into (y, visible); y is HIDDEN where a key is not visible.

    A tile that is no EDGE lies inside every row's keys, also by the mask and by the key bias. place: (positions, head)
    as a score function takes them; ahead: the first key less the first query of a tile, None: i and j are vectors;
    bits: those of the mask, from `load_bits`.
    """
    S: tl.constexpr = C.SCORE
    y = x
    if not C.LINEAR:
        y = x * number(opt.scale, x.dtype)
        if opt.cap is not None:
            cap = number(opt.cap, x.dtype)
            y = cap * tanh(y / cap)
        if S.modify is not None:
            y = call_score(S.modify, y, place, j, opt, S.count)
    if opt.row_bias.ptr is not None:
        y = y + row_bias
    if opt.key_bias.ptr is not None:
        bias = load_rows(opt.key_bias, b, h, j, j < opt.keys, 0.0).to(x.dtype)  # a vector
        y = y + bias
        if EDGE:
            y = tl.where(bias == -float("inf"), HIDDEN, y)
    if opt.relative.ptr is not None:
        bias = load_relative(h, i, j, ahead, opt, x.dtype)
        y = tl.where(bias == -float("inf"), HIDDEN, y + bias)
    if opt.bias.ptr is not None:
        bias = tl.load(dense_ptr(opt.bias, b, h, i, j), mask=(i < opt.queries) & (j < opt.keys), other=0.0).to(x.dtype)
        y = tl.where(bias == -float("inf"), HIDDEN, y + bias)
    if bits is not None:
        y = tl.where(((bits >> (j & 31)) & 1) == 0, HIDDEN, y)
    elif (opt.mask.ptr is not None) and EDGE:
        shown = tl.load(dense_ptr(opt.mask, b, h, i, j), mask=(i < opt.queries) & (j < opt.keys), other=0).to(tl.int32)
        y = tl.where(shown == 0, HIDDEN, y)
    if EDGE:
        y = tl.where(j < first, HIDDEN, y)
        y = tl.where(j < tl.where(i < opt.queries, last, 0), y, HIDDEN)
    if EDGE or (opt.bias.ptr is not None) or (opt.relative.ptr is not None):
        visible = y != HIDDEN
    else:
        visible = tl.full(x.shape, 1, tl.int1)
    return y, visible


@triton.jit
def bend(ds, x, visible, place, j, opt, C: tl.constexpr):
    """Return ds · ∂y/∂(scale·x) of the soft cap, 1 − tanh², or of the score function; without one ds itself."""
    S: tl.constexpr = C.SCORE
    if opt.cap is not None:
        t = tanh(x * number(opt.scale, x.dtype) / number(opt.cap, x.dtype))
        ds = tl.where(visible, ds * (1.0 - t * t), 0.0)
    if S.modify is not None:
        slope = call_score(S.slope, x * number(opt.scale, x.dtype), place, j, opt, S.count)
        ds = tl.where(visible, ds * slope, 0.0)
    return ds
