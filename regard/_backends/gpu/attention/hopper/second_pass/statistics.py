"""`forward_statistics`: finishes the raw sums of `forward_hopper`, one thread per row, and marks imprecise rows.

A row is imprecise, and `forward_imprecise` sums it again, if a difference has lost its digits:

    Σu − 1         of a nearly one-hot row: small beside 1
    Σ(y − ȳ)²      small beside n·ȳ² or, if Σy² came from `key_moments`, beside |q|²·Σ|k|²
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard._backends.gpu.attention import statistics, tiles
from regard._backends.gpu.attention.forward.online import find_shift, join_sink
from regard._backends.gpu.attention.hopper.spans import find_plane, find_row
from regard._backends.gpu.attention.statistics import Sums
from regard._backends.gpu.attention.tiles import LN2, LOG2E

ROWS = 128  # of a program


class RowIndex(NamedTuple):
    """Batch, head and position of rows: what `online.join_sink` reads."""

    b: Any
    h: Any
    i: Any


@triton.jit
def forward_statistics(raw_sums, stats, rows, spans, opt, C: tl.constexpr, N: tl.constexpr, SAME: tl.constexpr):
    """Stores the statistics of N rows per program.

    raw_sums [9, rows]: max y, Z, Σu·|i − j|, Σy, Σy², |q|²·Σ|k|², Σu·log₂u, Σu², first y, in the shift of the maximum.
    For `forward_imprecise`, max y becomes +inf in precise rows, and Σy becomes Σy/n in the others, in its units of y:
    the SAME, or y times the scale.
    """
    F: tl.constexpr = C.F
    row = tl.program_id(0) * tl.cast(N, tl.int64) + tl.arange(0, N)
    rows = tiles.wide(rows)
    inside = row < rows
    i = (row % opt.queries).to(tl.int32)
    head = (row // opt.queries).to(tl.int32)
    index = RowIndex(head // opt.heads, head % opt.heads, i)
    if spans is None:
        first, last = tiles.window_range(i, opt, tiles.key_count(opt, index.b))
    else:
        where = find_row(spans, index.b, index.h, i)
        first = tl.load(where, mask=inside, other=0)
        last = tl.load(where + find_plane(spans), mask=inside, other=0)
    n = tl.maximum(last - first, 0).to(tl.float32)
    empty = n == 0.0
    a = tiles.row_factor(index.b, index.h, i, opt, tl.float32, C.LINEAR)
    b2 = a * LOG2E
    top = tl.load(raw_sums + row, mask=inside, other=0.0)
    z = tl.load(raw_sums + rows + row, mask=inside, other=1.0)
    zero = z * 0.0
    one = zero + 1.0
    distance, mean, m2, magnitude, log_u, square, first_u = zero, zero, zero, zero, zero, zero, zero
    shift = find_shift(top, b2, F)
    if C.NEED.distance:
        distance = tl.load(raw_sums + 2 * rows + row, mask=inside, other=0.0)
    if C.NEED.moments:
        mean = tl.load(raw_sums + 3 * rows + row, mask=inside, other=0.0)
        m2 = tl.load(raw_sums + 4 * rows + row, mask=inside, other=0.0)
        magnitude = tl.load(raw_sums + 5 * rows + row, mask=inside, other=0.0)
    if C.NEED.log_u:
        log_u = tl.load(raw_sums + 6 * rows + row, mask=inside, other=0.0)
    if C.NEED.square:
        square = statistics.at_least_0(tl.load(raw_sums + 7 * rows + row, mask=inside, other=1.0) - 1.0)
    if C.NEED.first:
        first_u = tl.exp2((tl.load(raw_sums + 8 * rows + row, mask=inside, other=0.0) - top) * b2)
    su = z - 1.0
    r = Sums(
        top, shift, z, one, su, su, log_u, square, su, square, zero, distance, zero, zero, i, zero, zero, mean, m2
    )  # fmt: skip
    outer, rest, inverse, total = join_sink(r, index, inside, opt, C)
    lse = outer * LN2 + tl.log(total)
    statistics.finish(stats, row, inside, empty, r, a, n, one, one, one, one, first_u, rest, inverse, lse, opt, C, rows)
    imprecise = (empty == 0) & (su < 0.0156)
    if C.NEED.moments:
        mean_y = mean / tl.maximum(n, 1.0)
        spread = m2 - mean * mean_y
        precise = (mean * mean_y <= 256.0 * spread) & (magnitude <= 8192.0 * spread)
        imprecise = imprecise | ((precise == 0) & (empty == 0) & (z == z))
        if C.LINEAR and not SAME:
            mean_y = mean_y * tiles.number(opt.scale, tl.float32)
        tl.store(raw_sums + 3 * rows + row, mean_y, mask=inside & imprecise)
    if C.LINEAR and not SAME:
        top = top * tiles.number(opt.scale, tl.float32)
    tl.store(raw_sums + row, tl.where(imprecise, top, float("inf")), mask=inside)
