"""Adds a bias by relative position to scores in the registers of a warpgroup, in Gluon for Hopper.

A thread reads the numbers of its own scores from two addresses, one for each of its rows; all other distances are
constants in its instructions. The numbers of a tile lie side by side and stay in the L1 cache.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.hopper.biases import PADDING
from regard._backends.gpu.attention.hopper.fragment import ROWS, cells, key_in_octet, key_in_pair, octet_start, per_row


@gluon.jit
def find_table(bias, h, opt):
    """Pointer into the table of head h: the bias of query i and key j lies at pointer + j − i."""
    return bias.table + tiles.wide(h * bias.h) * bias.width + (PADDING + opt.queries - 1)


@gluon.jit
def add_relative(s, table, i, start):
    """Scores s [M, keys] of queries i, from key `start` on, with their bias."""
    y = cells(s)
    lane = key_in_octet(y) - key_in_pair(y)
    row = table + start + (lane - per_row(i, y))  # two addresses in a thread
    bias = gl.load(row + (octet_start(y) + key_in_pair(y)))
    return gl.convert_layout(gl.reshape(y + bias, s.shape), s.type.layout)


@gluon.jit
def load_relative(like, table, j, start):
    """The bias of keys j and the queries from `start` on, [N, queries]."""
    y = cells(like)
    lane = key_in_octet(y) - key_in_pair(y)
    row = table - start + (per_row(j, y) - lane)
    bias = gl.load(row - (octet_start(y) + key_in_pair(y)))
    return gl.convert_layout(gl.reshape(bias, like.shape), like.type.layout)


@gluon.jit
def prefetch_relative(table, r0, start):
    """Brings the bias of 64 queries from r0 on and 128 keys from `start` on into the L1 cache, two numbers a thread."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    near = table + (start - (r0 + ROWS - 1)) + 2 * gl.arange(0, 128, LAYOUT)
    gl.inline_asm_elementwise("prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [near], gl.int32, False, 1)
