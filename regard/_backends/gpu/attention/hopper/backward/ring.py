"""What the programs of `backward_hopper` share: its constants, ring buffer, order of work and producer warp."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.backward.slopes import Rows
from regard._backends.gpu.attention.hopper.fragment import ROWS
from regard._backends.gpu.attention.hopper.ring import async_load
from regard._backends.gpu.attention.tiles import HIDDEN

KEYS = ROWS  # of one warpgroup


class BackwardConfig(NamedTuple):
    """Compile-time constants of `backward_hopper`; F and FOLDED as in `tiles.Config`."""

    F: Any
    FOLDED: bool
    CAUSAL: bool
    INTERVAL: bool  # of keys, per query; exponential maps only
    RELATIVE: bool  # see `biases`; exponential maps only
    D: int
    NUMBERS: int  # of a row's state: 2 or 3
    WARPGROUPS: int  # consumers: 2
    STAGES: int  # of the ring
    REGISTERS: int  # of a consumer's thread


class Ring(NamedTuple):
    """Shared-memory buffers and their barriers: copies complete `full`, consumers arrive at `free`."""

    k: Any  # [WARPGROUPS, 1, 1, 64, D]
    v: Any
    q: Any  # [STAGES, 1, 1, M, D]
    do: Any
    rows: Any  # [STAGES · NUMBERS, 1, M], the row state: shift, δ, 1/Z
    ds: Any  # [WARPGROUPS, 1, 64, M]
    k_full: Any
    full: Any
    free: Any


class Blocks(NamedTuple):
    """Tensor descriptors of everything that the kernel reads and writes."""

    k: Any  # [B, G, N, D] by [1, 1, 64, D], and so v, dk and dv
    v: Any
    q: Any  # [B, H, M, D] by [1, 1, 64, D], and so do
    do: Any
    shift: Any  # [B · H, M] by [1, 64], and so δ and 1/Z
    delta: Any
    inverse: Any
    slopes: Any  # ds, [B · H, N, M] by [1, 64, 64], or a band of it
    band: Any  # None, or the column of the query whose number is that of a block's first key: see `dkv.find_band`
    dk: Any
    dv: Any
    spans: Any  # `spans.Spans`, and what `spans.find_query_ranges` gives; no descriptors
    ranges: Any
    d_bias: Any  # [B, H, N], the gradient of a bias per key; no descriptor
    relative: Any  # `biases.RelativeBias`


class Work(NamedTuple):
    """One block of keys, from j0 on, and the query tiles that see it, from `begin` on, in each head of the group."""

    b: Any
    g: Any
    j0: Any
    begin: Any
    tiles: Any
    inner: Any  # with intervals: tiles inner … outer − 1 of them see all of its keys
    outer: Any


@gluon.jit
def get_work(ranges, opt, C: gl.constexpr):
    """The block of keys of this program."""
    blocks = gl.cdiv(opt.keys, C.WARPGROUPS * KEYS)
    block = gl.program_id(0)
    j0 = block % blocks * (C.WARPGROUPS * KEYS)  # the first keys have the most causal queries
    groups = opt.heads // opt.group
    begin = 0
    if C.CAUSAL:
        begin = j0 // ROWS
    count = gl.maximum(gl.cdiv(opt.queries, ROWS) - begin, 0)
    inner, outer = count, count
    if C.INTERVAL:
        begin, count = gl.load(ranges + 4 * block), gl.load(ranges + 4 * block + 1)
        inner, outer = gl.load(ranges + 4 * block + 2), gl.load(ranges + 4 * block + 3)
    return Work(block // blocks // groups, (block // blocks) % groups, j0, begin, count, inner, outer)


@gluon.jit
def produce(blocks, ring, opt, C: gl.constexpr):
    """The producer warp: loads the block's keys and values, then every query tile."""
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    NUMBERS: gl.constexpr = C.NUMBERS
    work = get_work(blocks.ranges, opt, C)
    for group in gl.static_range(WARPGROUPS):
        j = work.j0 + group * KEYS
        mbarrier.expect(ring.k_full.index(group), 2 * KEYS * C.D * 2)
        async_load(blocks.k, [work.b, work.g, j, 0], ring.k_full.index(group), ring.k.index(group))
        async_load(blocks.v, [work.b, work.g, j, 0], ring.k_full.index(group), ring.v.index(group))
    for t in range(work.tiles * opt.group):
        stage = t % C.STAGES
        full = ring.full.index(stage)
        h = work.g * opt.group + t // work.tiles
        i = (work.begin + t % work.tiles) * ROWS
        mbarrier.wait(ring.free.index(stage), ((t // C.STAGES) & 1) ^ 1)
        mbarrier.expect(full, ROWS * (4 * C.D + 4 * NUMBERS))
        async_load(blocks.q, [work.b, h, i, 0], full, ring.q.index(stage))
        async_load(blocks.do, [work.b, h, i, 0], full, ring.do.index(stage))
        async_load(blocks.shift, [work.b * opt.heads + h, i], full, ring.rows.index(stage * NUMBERS))
        async_load(blocks.delta, [work.b * opt.heads + h, i], full, ring.rows.index(stage * NUMBERS + 1))
        if NUMBERS == 3:
            async_load(blocks.inverse, [work.b * opt.heads + h, i], full, ring.rows.index(stage * NUMBERS + 2))


@gluon.jit
def load_row_number(stage, at: gl.constexpr, ring, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Number `at` of the state of a tile's queries, [1, M]."""
    x = ring.rows.index(stage * C.NUMBERS + at).reshape([ROWS])
    return gl.expand_dims(x.load(gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def load_rows(stage, ring, opt, LAYOUT: gl.constexpr, C: gl.constexpr):
    """The row state that `weigh` reads; s = a·y, and y is the capped score where there is a cap."""
    shift = load_row_number(stage, 0, ring, LAYOUT, C)
    inverse = shift
    if C.NUMBERS == 3:
        inverse = load_row_number(stage, 2, ring, LAYOUT, C)
    a = tiles.number(opt.scale, gl.float32)
    if opt.cap is not None:
        a = a * 0.0 + 1.0
    return Rows(a, shift, inverse, shift, shift, shift, shift, shift, shift)


@gluon.jit
def load_delta(r, stage, ring, LAYOUT: gl.constexpr, C: gl.constexpr):
    """r with the δ that `slope_tile` reads, loaded late because registers are few."""
    delta = load_row_number(stage, 1, ring, LAYOUT, C)
    return Rows(r.a, r.shift, r.inverse, delta, r.first, r.last, delta, delta, delta)


@gluon.jit
def load_bias(b, h, j0, opt, C: gl.constexpr):
    """The bias of a warpgroup's keys in units of y, HIDDEN for −inf, or None."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    bias = None
    if opt.bias.ptr is not None:
        j = j0 + gl.arange(0, KEYS, gl.SliceLayout(1, S))
        where = opt.bias.ptr + tiles.wide(b) * opt.bias.stride[0] + tiles.wide(h) * opt.bias.stride[1]
        bias = gl.load(where + tiles.wide(j) * opt.bias.stride[3], mask=j < opt.keys, other=0.0).to(gl.float32)
        scaled = bias / tiles.number(opt.scale, gl.float32)
        bias = gl.where(bias == -float("inf"), HIDDEN, gl.maximum(scaled, 0.5 * HIDDEN))
    return bias
