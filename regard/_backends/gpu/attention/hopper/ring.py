"""The ring buffer between the producer warp and the consumer warpgroups, and the order of work, in Gluon for Hopper.

A block of queries visits its key tiles from the last to the first, so that the tile which causal rows see in part comes
first and alone carries masking code. Where every row sees every key, it begins with the tile on the diagonal, where
i − j changes its sign.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.hopper.biases import is_left_out
from regard._backends.gpu.attention.hopper.fragment import ROWS
from regard._backends.gpu.attention.hopper.spans import FIELDS, find_group

# Triton 3.9, 3.6
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


class ForwardConfig(NamedTuple):
    """Compile-time constants of `forward_hopper`; F, NEED, BM, BN and ACC as in `tiles.Config`."""

    F: Any
    NEED: Any
    CAUSAL: bool  # otherwise every query sees every key
    INTERVAL: bool  # or each query its own interval of keys, see `spans`
    KEY_BIAS: bool  # see `biases`
    RELATIVE: bool  # see `biases`
    PANEL: int  # columns of one buffer of q, k or o
    PANELS: int  # buffers of a tile of q or k
    LAST: int  # columns of the last of them that are multiplied
    E: int  # columns of v
    O_PANELS: int  # buffers of o
    BM: int
    BN: int
    WARPGROUPS: int  # consumers, 64 queries each
    STAGES: int  # of the ring
    REGISTERS: int  # of a consumer's thread
    SPLITS: int  # parts that a tile is weighed in: 1 or 4
    DIAGONAL_FIRST: bool  # full rows begin with the tile on the diagonal
    RAGGED: bool  # beside DIAGONAL_FIRST: the last tile has keys past the end
    PERSISTENT: bool  # a program takes many blocks and loads the next one's tiles while one ends
    EARLY: bool  # and computes the first scores of the next while one is stored
    SLACK: float  # powers of two by which a score may exceed the shift
    FIXED_SHIFT: bool  # the shift stays where the first tile puts it; rows that overflow get z = NaN
    ACC: Any


class Ring(NamedTuple):
    """Shared-memory buffers and their barriers: copies complete `full`, consumers arrive at `free`."""

    q: Any  # [WARPGROUPS·PANELS, 1, 1, 64, PANEL]; PERSISTENT: twice as many, for two blocks in turn
    k: Any  # [STAGES·PANELS, 1, 1, N, PANEL]
    v: Any  # [STAGES, 1, 1, N, E]
    q_full: Any
    q_free: Any
    k_full: Any
    v_full: Any
    free: Any  # at step t: keys of tile t and values of tile t − 1
    ones: Any  # [64, 16], columns beside q, and [STAGES, 1, 1, N, 16], beside k: the bias of each key
    bias: Any


class Work(NamedTuple):
    """One block of queries and the key tiles it visits, as steps base … end − 1 of the program."""

    round: Any
    b: Any
    h: Any
    i0: Any  # first query
    keys: Any  # of this batch entry; with intervals up to the last that a query sees
    lowest: Any  # first key that a query sees; with intervals only
    low: Any  # number of the first key tile
    count: Any  # key tiles
    base: Any
    end: Any


@gluon.jit
def make_barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N barriers that wait for COUNT arrivals each."""
    ring = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(N):
        mbarrier.init(ring.index(at), count=COUNT)
    return ring


@gluon.jit
def block_number(round, opt, C: gl.constexpr):
    """Number of the block of queries that this program takes in a round."""
    number = round * gl.num_programs(0) + gl.program_id(0)
    if C.PERSISTENT and C.CAUSAL:  # long and short rows alternate, over two heads at a time
        row = gl.cdiv(opt.queries, C.BM)
        pair = round // 2 * gl.num_programs(0) + gl.program_id(0)
        rank = gl.where(round % 2 == 0, pair % row, 2 * row - 1 - pair % row)
        number = (pair // row * 2 + rank % 2) * row + rank // 2
    if C.PERSISTENT and C.INTERVAL:  # back and forth, as neighbours have rows of like length
        number = round * gl.num_programs(0) + place_in_round(round)
    return number


@gluon.jit
def place_in_round(round):
    """Place of this program in a round, from the first program on or from the last."""
    return gl.where(round % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))


@gluon.jit
def count_rounds(blocks, C: gl.constexpr):
    """Number of blocks of queries that this program takes."""
    each = 2 if C.CAUSAL else 1
    blocks = blocks // each
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if C.INTERVAL:
        place = place_in_round(blocks // programs)
    return each * (blocks // programs + gl.where(place < blocks % programs, 1, 0))


@gluon.jit
def get_work(round, base, spans, bias, opt, C: gl.constexpr):
    """Work of this program in a round, whose first step is `base`."""
    row = gl.cdiv(opt.queries, C.BM)
    number = block_number(round, opt, C)
    i0 = (row - 1 - number % row) * C.BM  # the longest causal rows first
    head = number // row
    keys = tiles.key_count(opt, head // opt.heads)
    count = gl.cdiv(keys, C.BN)
    low = 0
    lowest = 0
    if C.CAUSAL:
        count = gl.minimum(count, gl.cdiv(i0 + C.BM, C.BN))
    if opt.left is not None:
        low = gl.maximum(i0 - opt.left, 0) // C.BN
    if (opt.left is not None) or (opt.lengths is not None):
        count = gl.maximum(count - low, 1)  # of rows without visible keys one tile is masked
    if C.INTERVAL:
        group = find_group(spans, head // opt.heads, head % opt.heads, i0)
        lowest, keys = gl.load(group), gl.load(group + 3)
        if C.WARPGROUPS == 2:
            lowest = gl.minimum(lowest, gl.load(group + FIELDS))
            keys = gl.maximum(keys, gl.load(group + FIELDS + 3))
        low = gl.minimum(lowest, keys) // C.BN
        count = gl.maximum(gl.cdiv(keys, C.BN) - low, 1)
    if C.KEY_BIAS or C.RELATIVE:
        count = gl.where(is_left_out(bias, head // opt.heads, head % opt.heads), 1, count)
    return Work(round, head // opt.heads, head % opt.heads, i0, keys, lowest, low, count, base, base + count)


@gluon.jit
def first_key(t, work, C: gl.constexpr):
    """First key of step t's tile: descending from the last tile, or from the diagonal one with wrap-around.

    With RAGGED the last tile, unless it is the diagonal one, comes second.
    """
    tile = work.low + work.end - 1 - t
    if C.DIAGONAL_FIRST:
        diagonal = gl.minimum(work.i0 // C.BN, work.count - 1)
        tile = diagonal + work.base - t
        tiles_in_order = work.count
        if C.RAGGED:
            second = gl.where(diagonal + 1 < work.count, 1, 0)
            tile = gl.where(t > work.base, tile + second, tile)
            tiles_in_order = work.count - second
        tile = gl.where(tile < 0, tile + tiles_in_order, tile)
        if C.RAGGED:
            tile = gl.where((second == 1) & (t == work.base + 1), work.count - 1, tile)
    return tile * C.BN


@gluon.jit
def divide_tiles(begin, r0, work, spans, C: gl.constexpr):
    """Steps at which the tiles of a warpgroup change their kind, from `begin` on: masked, bare, masked, bare, masked.

    Tiles that some row sees in part are masked, and with distances those with keys on both sides of a row's position.
    Without distances the second masked tiles are the last.
    """
    group = find_group(spans, work.b, work.h, r0)
    lowest = gl.cdiv(gl.load(group + 1), C.BN)  # bare tiles lie in lowest ≤ tile < highest
    highest = gl.load(group + 2) // C.BN
    if C.NEED.first:  # every row's first key lies in a masked tile
        lowest = gl.load(group + 1) // C.BN + 1
    middle = lowest
    after = lowest
    if C.NEED.distance:
        middle = gl.maximum((gl.load(group + 4) + 1) // C.BN, lowest)
        after = gl.maximum(gl.cdiv(gl.load(group + 5), C.BN), lowest)
    top = work.low + work.end
    upper = gl.minimum(gl.maximum(top - highest, begin), work.end)
    over = gl.minimum(gl.maximum(top - after, upper), work.end)
    under = work.end
    rest = work.end
    if C.NEED.distance:
        under = gl.minimum(gl.maximum(top - middle, over), work.end)
        rest = gl.minimum(gl.maximum(top - lowest, under), work.end)
    return upper, over, under, rest


@gluon.jit
def produce(q_blocks, k_blocks, v_blocks, bias_blocks, ring, spans, bias, opt, blocks, C: gl.constexpr):
    """The producer warp: loads every tile that the consumers of this program need."""
    if C.PERSISTENT:
        base = 0
        for round in range(count_rounds(blocks, C)):
            work = get_work(round, base, spans, bias, opt, C)
            load_block(q_blocks, k_blocks, v_blocks, bias_blocks, ring, work, bias, opt, C)
            base = work.end
    else:
        work = get_work(0, 0, spans, bias, opt, C)
        load_block(q_blocks, k_blocks, v_blocks, bias_blocks, ring, work, bias, opt, C)


@gluon.jit
def load_block(q_blocks, k_blocks, v_blocks, bias_blocks, ring, work, bias, opt, C: gl.constexpr):
    """Loads q, then k and v tile by tile, of one block; `bias_blocks` hold the keys' bias."""
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    PANELS: gl.constexpr = C.PANELS
    g = work.h // opt.group
    for group in gl.static_range(WARPGROUPS):
        at = work.round % 2 * WARPGROUPS + group
        if C.PERSISTENT:
            mbarrier.wait(ring.q_free.index(at), ((work.round // 2) & 1) ^ 1)
        full = ring.q_full.index(at)
        mbarrier.expect(full, ROWS * C.PANEL * PANELS * 2)
        for c in gl.static_range(PANELS):
            source = [work.b, work.h, work.i0 + group * ROWS, c * C.PANEL]
            async_load(q_blocks, source, full, ring.q.index(at * PANELS + c))
    for t in range(work.base, work.end):
        stage, next_stage = t % C.STAGES, (t + 1) % C.STAGES
        start = first_key(t, work, C)
        mbarrier.wait(ring.free.index(stage), ((t // C.STAGES) & 1) ^ 1)
        full = ring.k_full.index(stage)
        mbarrier.expect(full, C.BN * (C.PANEL * PANELS + (16 if C.KEY_BIAS else 0)) * 2)
        if C.KEY_BIAS:
            async_load(bias_blocks, [work.b * bias.b, work.h * bias.h, start, 0], full, ring.bias.index(stage))
        for c in gl.static_range(PANELS):
            async_load(k_blocks, [work.b, g, start, c * C.PANEL], full, ring.k.index(stage * PANELS + c))
        mbarrier.wait(ring.free.index(next_stage), (((t + 1) // C.STAGES) & 1) ^ 1)
        mbarrier.expect(ring.v_full.index(stage), C.BN * C.E * 2)
        async_load(v_blocks, [work.b, g, start, 0], ring.v_full.index(stage), ring.v.index(stage))


@gluon.jit
def wait_for_keys(t, ring, work, C: gl.constexpr):
    """Waits for the keys of step t, unless it is past the end."""
    mbarrier.wait(ring.k_full.index(t % C.STAGES), (t // C.STAGES) & 1, pred=t < work.end)


@gluon.jit
def release_queries(work, ring, group: gl.constexpr, C: gl.constexpr):
    """Hands the query buffer of the block before this one back, once its output was stored from there."""
    tma.store_wait(0)
    before = (work.round + 1) % 2 * C.WARPGROUPS + group
    mbarrier.arrive(ring.q_free.index(before), count=1, pred=work.round > 0)


@gluon.jit
def skip_tiles(begin, end, ring, C: gl.constexpr):
    """Releases tiles that only later warpgroups of the block see."""
    for t in range(begin, end):
        stage, phase = t % C.STAGES, (t // C.STAGES) & 1
        mbarrier.wait(ring.k_full.index(stage), phase)
        mbarrier.wait(ring.v_full.index(stage), phase)
        mbarrier.arrive(ring.free.index(stage), count=1)


@gluon.jit
def clear_hidden(values, start, work, opt, C: gl.constexpr):
    """Zeroes the values of keys that no row of the block sees, because 0·NaN is NaN.

    Both warpgroups may do so at once: they write the same numbers.
    """
    if C.INTERVAL:
        lowest, highest = work.lowest, work.keys
    else:
        lowest, _ = tiles.window_range(work.i0, opt, work.keys)
        _, highest = tiles.window_range(work.i0 + C.BM - 1, opt, work.keys)
    if (start < lowest) | (start + C.BN > highest):
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C.E, C.E // 8], [4, 1], [1, 0])
        STEPS: gl.constexpr = C.BN // 16
        for c in gl.static_range(STEPS):
            rows = values.slice(c * 16, 16)
            j = start + c * 16 + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
            visible = gl.expand_dims((j >= lowest) & (j < highest), 1)
            rows.store(gl.where(visible, rows.load(LAYOUT), 0.0))
        fence_async_shared()
