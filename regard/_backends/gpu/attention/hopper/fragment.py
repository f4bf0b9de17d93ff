"""Views of a tensor core's result [M, N] by the thread that holds each number.

A thread of a warpgroup holds two rows and, of every eight keys, two neighbours. `cells` shows that as [M, N/8, 4, 2],
octet · lane · pair: sums over octet and pair stay inside a thread, and octet and pair are constants in its
instructions.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # of a warpgroup


@gluon.jit
def zeros(N: gl.constexpr, LAYOUT: gl.constexpr):
    """Zeros [ROWS, N]."""
    return gl.zeros([ROWS, N], gl.float32, LAYOUT)


@gluon.jit
def cells(x):
    """x [M, N] as [M, N/8, 4, 2]."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def per_lane(x):
    """x [M, 4] as [M, 1, 4, 1]."""
    return gl.expand_dims(gl.expand_dims(x, 2), 1)


@gluon.jit
def per_row(x, like):
    """x [M] as [M, 1, 1, 1]."""
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, like.type.layout))))
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 1), 2), 3)


@gluon.jit
def octet_start(like, BASE: gl.constexpr = 0):
    """BASE + 0, 8, 16, …, the first key of each octet, as [1, N/8, 1, 1]."""
    x = gl.arange(0, like.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, like.type.layout))))
    return BASE + 8 * gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 2), 3)


@gluon.jit
def key_in_pair(like):
    """0, 1: the position of a key in its pair, as [1, 1, 1, 2]."""
    x = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, like.type.layout))))
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 1), 2)


@gluon.jit
def key_in_octet(like):
    """0 … 7: the position of a key in its octet, as [1, 1, 4, 2]."""
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, like.type.layout))))
    lane = gl.expand_dims(gl.expand_dims(gl.expand_dims(lane, 0), 1), 3)
    return 2 * lane + key_in_pair(like)


@gluon.jit
def first_octet(y):
    """The first octet of y [M, N/8, 4, 2], as [M, 4, 2]."""
    if y.shape[1] == 1:
        one = gl.reshape(y, [y.shape[0], 4, 2])
    else:
        half = gl.reshape(y, [y.shape[0], y.shape[1] // 2, 2, 4, 2])
        half, _ = gl.split(gl.permute(half, [0, 1, 3, 4, 2]))
        one = first_octet(half)
    return one


@gluon.jit
def split_keys(s, N: gl.constexpr):
    """The keys of a tile s [M, keys] in N equal parts, each as cells."""
    if N == 1:
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, s.shape[1], 16])
        parts = (cells(gl.convert_layout(s, LAYOUT)),)
    else:
        lower, upper = split_columns(s, 2)
        parts = split_keys(lower, N // 2) + split_keys(upper, N // 2)
    return parts


@gluon.jit
def split_columns(x, N: gl.constexpr):
    """The columns of x [M, columns] in N equal parts."""
    if N == 1:
        parts = (x,)
    else:
        half = gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2])
        lower, upper = gl.split(gl.permute(half, [0, 2, 1]))
        parts = split_columns(lower, N // 2) + split_columns(upper, N // 2)
    return parts


@gluon.jit
def accumulate(x, before, FIRST: gl.constexpr):
    """before + Σ over a thread's numbers of a row, [M, N/8, 4, 2] → [M, 4], in one chain of additions; at FIRST Σ."""
    if not FIRST:
        x = gl.where((octet_start(x) == 0) & (key_in_pair(x) == 0), x + per_lane(before), x)
    x = gl.reshape(gl.permute(x, [0, 2, 1, 3]), [x.shape[0], 4, x.shape[1] * 2])
    LAYOUT: gl.constexpr = before.type.layout
    return gl.convert_layout(gl.sum(x, 2), LAYOUT)
