"""The end of one block of rows in `forward_hopper`: o / Z, row state and raw sums."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.forward.online import find_shift, join_sink
from regard._backends.gpu.attention.hopper.biases import is_left_out
from regard._backends.gpu.attention.hopper.fragment import ROWS, split_columns
from regard._backends.gpu.attention.hopper.ring import async_store
from regard._backends.gpu.attention.hopper.second_pass import RowIndex
from regard._backends.gpu.attention.hopper.spans import find_plane, find_row
from regard._backends.gpu.attention.tiles import LN2, LOG2E

MAX_SUM = gl.constexpr(2.0**40)  # of a row's weights in a fixed shift


class RowState(NamedTuple):
    """The sums that `online.join_sink` reads."""

    shift: Any
    z: Any


class Outputs(NamedTuple):
    """Where a block's results are stored, and what it reads of the call."""

    o: Any
    shifts: Any
    sums: Any
    raw_sums: Any  # [8, B, H, M], see `forward_statistics`
    spans: Any  # `spans.Spans`
    bias: Any  # `biases.KeyBias` or `biases.RelativeBias`


@gluon.jit
def write_block(o, r, i, a, outputs, ring, work, opt, blocks, group: gl.constexpr, C: gl.constexpr):
    """Stores o / Z, the row state and the raw sums.

    A kernel of its own (`forward_statistics`) finishes them because its code would not fit beside the loop.
    """
    F: gl.constexpr = C.F
    NEED: gl.constexpr = C.NEED
    inside = i < opt.queries
    top = to_rows(gl.max(r.top, 1), i)
    loop_shift = to_rows(gl.max(r.shift, 1), i)
    shift = loop_shift
    if F.family == "ratio" and F.shift != "none" and not C.FIXED_SHIFT:
        shift = find_shift(top, a * LOG2E, F)
    offset = loop_shift - shift
    factor = gl.exp2(offset)
    loop_z = to_rows(gl.sum(r.z, 1), i)
    z = loop_z * factor
    outer, _, inverse, total = join_sink(RowState(shift, z), RowIndex(work.b, work.h, i), inside, opt, C)
    if C.FIXED_SHIFT:
        total = gl.where(loop_z <= MAX_SUM, total, float("nan"))
    natural = outer * LN2
    if (opt.left is not None) or (opt.lengths is not None):
        first, last = tiles.window_range(i, opt, work.keys)
        empty = first >= last
        inverse, factor = gl.where(empty, 0.0, inverse), gl.where(empty, 0.0, factor)
        outer, natural = gl.where(empty, 0.0, outer), gl.where(empty, 0.0, natural)
        total = gl.where(empty, 0.0, total)
    if C.INTERVAL:
        empty = gl.load(find_row(outputs.spans, work.b, work.h, i) + find_plane(outputs.spans)) == 0
        inverse, factor = gl.where(empty, 0.0, inverse), gl.where(empty, 0.0, factor)
        outer, natural = gl.where(empty, 0.0, outer), gl.where(empty, 0.0, natural)
        total = gl.where(empty, 0.0, total)
    if C.KEY_BIAS or C.RELATIVE:
        total = gl.where(is_left_out(outputs.bias, work.b, work.h), float("nan"), total)
    o = o * gl.expand_dims(gl.convert_layout(inverse * factor, gl.SliceLayout(1, o.type.layout)), 1)
    at = work.round % 2 * C.WARPGROUPS + group
    parts = split_columns(o, C.E // C.PANEL)
    O_PANELS: gl.constexpr = C.O_PANELS
    for c in gl.static_range(O_PANELS):  # q is no longer needed
        ring.q.index(at * C.PANELS + c).reshape([ROWS, C.PANEL]).store(parts[c].to(ring.v.dtype))
    fence_async_shared()
    for c in gl.static_range(O_PANELS):
        target = [work.b, work.h, work.i0 + group * ROWS, c * C.PANEL]
        async_store(outputs.o, target, ring.q.index(at * C.PANELS + c))
    row = (tiles.wide(work.b) * opt.heads + work.h) * opt.queries + i
    gl.store(outputs.shifts + row, natural, mask=inside)
    gl.store(outputs.sums + row, total * gl.exp2(outer - natural * LOG2E), mask=inside)
    if NEED.top:
        rows = blocks // gl.cdiv(opt.queries, C.BM) * tiles.wide(opt.queries)
        to = outputs.raw_sums + row
        offset = gl.fma(-top, a * LOG2E, loop_shift)  # as the loop has it of the maximum, whose u becomes 1 exactly
        factor = gl.where(loop_z == 0.0, 0.0, gl.exp2(offset))
        gl.store(to, top, mask=inside)
        gl.store(to + rows, loop_z * factor, mask=inside)
        if NEED.distance:
            gl.store(to + 2 * rows, to_rows(gl.sum(r.distance, 1), i) * factor, mask=inside)
        if NEED.moments:
            gl.store(to + 3 * rows, to_rows(gl.sum(r.mean, 1), i), mask=inside)
            gl.store(to + 4 * rows, to_rows(gl.sum(r.m2, 1), i), mask=inside)
        if NEED.log_u:
            gl.store(to + 5 * rows, (to_rows(gl.sum(r.log_u, 1), i) + offset * loop_z) * factor, mask=inside)
        if NEED.square:
            gl.store(to + 6 * rows, to_rows(gl.sum(r.square, 1), i) * (factor * factor), mask=inside)
        if NEED.first:
            first_y = r.first
            if opt.left is None and not C.INTERVAL:
                lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, r.first.type.layout)), 0)
                first_y = gl.where(lane == 0, r.first, 0.0)
            gl.store(to + 7 * rows, to_rows(gl.sum(first_y, 1), i), mask=inside)


@gluon.jit
def to_rows(x, i):
    """One number per row in the layout of i."""
    return gl.convert_layout(x, i.type.layout)
