"""The end of a block of rows on Hopper: what the keys' forms say of it, o / Z, its state and its sums."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.hopper import warpgroup
from regard._backends.gpu.attention.hopper.ring import form_of
from regard._backends.gpu.attention.hopper.warpgroup import ROWS
from regard._backends.gpu.attention.online import find_shift, join_sink
from regard._backends.gpu.attention.tiles import LN2, LOG2E

MOST = gl.constexpr(2.0**40)  # that the weights of a row may sum to in a shift which stays

copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


class Place(NamedTuple):
    """Which rows: what `join_sink` asks of a scene."""

    b: Any
    h: Any
    i: Any


class Told(NamedTuple):
    """And what of its sums."""

    shift: Any
    z: Any


class Targets(NamedTuple):
    """Where results go."""

    o: Any
    shifts: Any
    sums: Any
    rough: Any  # [9, B, H, M]: `forward_statistics.Rough`
    forms: Any  # `moments.Forms`, to read


@gluon.jit
def form(q, ring, walk, targets, opt, C: gl.constexpr):
    """(Σy, Σy², |q|²·Σ|k|²) over the keys whose forms follow the tiles in the ring."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    turned = warpgroup.zeros(C.D, S)
    for c in gl.static_range(3):
        t = walk.end + c * C.D // C.BN
        stage = t % C.STAGES
        mbarrier.wait(ring.k_full.index(stage), (t // C.STAGES) & 1)
        keys = ring.k.index(stage).reshape([C.BN, C.D]).slice(c * C.D % C.BN, C.D).permute((1, 0))
        turned = warpgroup_mma(q, keys, turned, use_acc=c > 0, is_async=True)
        turned = warpgroup_mma_wait(0, deps=[turned])
        mbarrier.arrive(ring.free.index(stage), count=1, pred=(c + 1) * C.D % C.BN == 0 or c == 2)
    wide = q.load(S).to(gl.float32)
    head, part = form_of(walk, opt, C)
    at = head
    if C.SPAN > 0:
        at = head * (gl.cdiv(gl.minimum(opt.queries, opt.keys), C.SPAN) - 1) + part
    center = gl.load(targets.forms.sums + at * C.D + gl.arange(0, C.D, gl.SliceLayout(0, S)))
    one = gl.sum(wide * gl.expand_dims(center, 0), 1)
    two = gl.sum(wide * turned, 1)
    reach = gl.sum(wide * wide, 1) * gl.load(targets.forms.lengths + at)
    if C.SPAN > 0:
        some = walk.before > 0
        one, two, reach = gl.where(some, one, 0.0), gl.where(some, two, 0.0), gl.where(some, reach, 0.0)
    return one, two, reach


@gluon.jit
def finish(formed, o, r, q, i, a, targets, ring, walk, opt, blocks, part: gl.constexpr, C: gl.constexpr):
    """o / Z and the row's state; its sums for `forward_statistics`, whose code would not fit beside the loop's."""
    F: gl.constexpr = C.F
    NEED: gl.constexpr = C.NEED
    inside = i < opt.queries
    top = whole(gl.max(r.top, 1), i)
    behind = whole(gl.max(r.shift, 1), i)
    shift = behind
    if F.family == "ratio" and F.shift != "none" and not C.STILL:
        shift = find_shift(top, a * LOG2E, F)
    offset = behind - shift
    fade = gl.exp2(offset)
    bare = whole(gl.sum(r.z, 1), i)
    z = bare * fade
    outer, _, inverse, total = join_sink(Told(shift, z), Place(walk.b, walk.h, i), inside, opt, C)
    if C.STILL:
        total = gl.where(bare <= MOST, total, float("nan"))
    o = o * gl.expand_dims(gl.convert_layout(inverse * fade, gl.SliceLayout(1, o.type.layout)), 1)
    q.store(o.to(ring.v.dtype))  # q is not needed any more
    fence_async_shared()
    at = walk.round % 2 * C.PARTS + part
    copy_out(targets.o, [walk.b, walk.h, walk.i0 + part * ROWS, 0], ring.q.index(at))
    row = (tiles.wide(walk.b) * opt.heads + walk.h) * opt.queries + i
    natural = outer * LN2
    gl.store(targets.shifts + row, natural, mask=inside)
    gl.store(targets.sums + row, total * gl.exp2(outer - natural * LOG2E), mask=inside)
    if NEED.top:
        rows = blocks // gl.cdiv(opt.queries, C.BM) * tiles.wide(opt.queries)
        to = targets.rough + row
        gl.store(to, top, mask=inside)
        gl.store(to + rows, z, mask=inside)
        if NEED.distance:
            gl.store(to + 2 * rows, whole(gl.sum(r.distance, 1), i) * fade, mask=inside)
        if NEED.moments:
            gl.store(to + 3 * rows, whole(gl.sum(r.mean, 1), i) + whole(formed[0], i), mask=inside)
            gl.store(to + 4 * rows, whole(gl.sum(r.m2, 1), i) + whole(formed[1], i), mask=inside)
            gl.store(to + 5 * rows, whole(formed[2], i), mask=inside)
        if NEED.log_u:
            gl.store(to + 6 * rows, (whole(gl.sum(r.log_u, 1), i) + offset * bare) * fade, mask=inside)
        if NEED.square:
            gl.store(to + 7 * rows, whole(gl.sum(r.square, 1), i) * (fade * fade), mask=inside)
        if NEED.first:
            lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, r.first.type.layout)), 0)
            gl.store(to + 8 * rows, whole(gl.sum(gl.where(lane == 0, r.first, 0.0), 1), i), mask=inside)
    tma.store_wait(0)
    if C.AHEAD:
        mbarrier.arrive(ring.q_free.index(at), count=1)


@gluon.jit
def whole(x, i):
    """A number per row as i has them."""
    return gl.convert_layout(x, i.type.layout)
