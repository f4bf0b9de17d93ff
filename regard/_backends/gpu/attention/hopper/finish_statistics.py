"""The statistics of rows whose sums `forward_hopper` left, a thread to a row, and which of them are vague.

A row is vague, and `forward_lesser` sums it again, where the digits of what it lacks are lost beside what was summed:

    Σu − 1         beside 1: all but the maximum of a nearly one-hot row
    Σ(y − ȳ)²      beside n·ȳ², or, where the keys' forms gave Σy², beside |q|²·Σ|k|²
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard._backends.gpu.attention import statistics, tiles
from regard._backends.gpu.attention.online import find_shift, join_sink
from regard._backends.gpu.attention.statistics import Sums
from regard._backends.gpu.attention.tiles import LN2, LOG2E

ROWS = 128  # of a program


class Place(NamedTuple):
    """Which rows: what `join_sink` asks of a scene."""

    b: Any
    h: Any
    i: Any


@triton.jit
def forward_statistics(rough, stats, rows, opt, C: tl.constexpr, N: tl.constexpr):
    """rough [9, rows]: max y, Z, Σu·|i − j|, Σy, Σy², reach, Σu·log₂u, Σu², first y, in the shift of the maximum.

    It leaves of them what `forward_lesser` asks for: max y, or +inf if all is well, and Σy/n instead of Σy.
    """
    F: tl.constexpr = C.F
    row = tl.program_id(0) * tl.cast(N, tl.int64) + tl.arange(0, N)
    rows = tiles.wide(rows)
    inside = row < rows
    i = (row % opt.queries).to(tl.int32)
    head = (row // opt.queries).to(tl.int32)
    at = Place(head // opt.heads, head % opt.heads, i)
    n = tl.minimum(i + 1, opt.keys) if C.CAUSAL else i * 0 + opt.keys
    n = n.to(tl.float32)
    a = tiles.row_factor(at.b, at.h, i, opt, tl.float32, True)
    b2 = a * LOG2E
    top = tl.load(rough + row, mask=inside, other=0.0)
    z = tl.load(rough + rows + row, mask=inside, other=1.0)
    zero = z * 0.0
    one = zero + 1.0
    distance, mean, m2, reach, log_u, square, first_u = zero, zero, zero, zero, zero, zero, zero
    shift = find_shift(top, b2, F)
    if C.NEED.distance:
        distance = tl.load(rough + 2 * rows + row, mask=inside, other=0.0)
    if C.NEED.moments:
        mean = tl.load(rough + 3 * rows + row, mask=inside, other=0.0)
        m2 = tl.load(rough + 4 * rows + row, mask=inside, other=0.0)
        reach = tl.load(rough + 5 * rows + row, mask=inside, other=0.0)
    if C.NEED.log_u:
        log_u = tl.load(rough + 6 * rows + row, mask=inside, other=0.0)
    if C.NEED.square:
        square = statistics.at_least_0(tl.load(rough + 7 * rows + row, mask=inside, other=1.0) - 1.0)
    if C.NEED.first:
        first_u = tl.exp2(tl.load(rough + 8 * rows + row, mask=inside, other=0.0) * b2 - shift)
    su = z - 1.0
    r = Sums(
        top, shift, z, one, su, su, log_u, square, su, square, zero, distance, zero, zero, i, zero, zero, mean, m2
    )  # fmt: skip
    outer, rest, inverse, total = join_sink(r, at, inside, opt, C)
    lse = outer * LN2 + tl.log(total)
    statistics.finish(stats, row, inside, i < 0, r, a, n, one, one, one, one, first_u, rest, inverse, lse, opt, C, rows)
    vague = su < 0.0156 + 6e-4 * tl.abs(shift)  # as in forward_online.completed
    if C.NEED.moments:
        off = mean / n
        spread = m2 - mean * off
        sound = (mean * off <= 256.0 * spread) & (reach <= 8192.0 * spread)
        vague = vague | ((sound == 0) & (z == z))
        tl.store(rough + 3 * rows + row, off, mask=inside & vague)
    tl.store(rough + row, tl.where(vague, top, float("inf")), mask=inside)
