"""o = Σ_j u_j·v_j / Z in Gluon for Hopper: consumer warpgroups of 64 queries each, and one producer warp.

While one warpgroup weighs its scores, the tensor cores multiply for another. Within a warpgroup q·kᵀ of one tile
overlaps with p·v of the tile before:

    producer    k, v → ring buffer
    consumer    s = q·kᵀ (tile t), o += p·v (tile t − 1)      p·v in SPLITS parts,
                u of s, sums                                  between which one split of s each is weighed
                o ·= factor, p = u                            after p·v has ended

The splits exist because a warpgroup stalls while it issues a product that the tensor cores cannot accept yet.
"""

from __future__ import annotations

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
from regard._backends.gpu.attention.hopper import ptx, row_sums
from regard._backends.gpu.attention.hopper.epilogue import Outputs, write_block
from regard._backends.gpu.attention.hopper.fragment import ROWS, split_keys, zeros
from regard._backends.gpu.attention.hopper.relative_scores import add_relative, find_table, prefetch_relative
from regard._backends.gpu.attention.hopper.ring import (
    Ring,
    clear_hidden,
    count_rounds,
    divide_tiles,
    first_key,
    get_work,
    make_barriers,
    produce,
    release_queries,
    skip_tiles,
    wait_for_keys,
)
from regard._backends.gpu.attention.hopper.spans import find_plane, find_row
from regard._backends.gpu.attention.tiles import LOG2E


@gluon.jit
def start_scores(t, at, ring, C: gl.constexpr):
    """Issues s = q·kᵀ of step t, panel by panel of their columns; `at` is the number of q's buffers."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BN, 16])
    PANELS: gl.constexpr = C.PANELS
    s = zeros(C.BN, S)
    for c in gl.static_range(PANELS):
        q = ring.q.index(at * PANELS + c).reshape([ROWS, C.PANEL])
        keys = ring.k.index(t % C.STAGES * PANELS + c).reshape([C.BN, C.PANEL])
        if c + 1 == PANELS and C.LAST < C.PANEL:
            q = q.slice(0, C.LAST, 1)
            keys = keys.slice(0, C.LAST, 1)
        s = warpgroup_mma(q, keys.permute((1, 0)), s, use_acc=c > 0, is_async=True)
    if C.KEY_BIAS:
        bias = ring.bias.index(t % C.STAGES).reshape([C.BN, 16])
        s = warpgroup_mma(ring.ones, bias.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def start_output(c: gl.constexpr, o, p, values, C: gl.constexpr):
    """Issues o + p·v of split c."""
    WIDTH: gl.constexpr = C.BN // C.SPLITS
    return warpgroup_mma(p[c], values.slice(c * WIDTH, WIDTH), o, is_async=True)


@gluon.jit
def process_tile(t, o, p, r, at, ring, work, rows, opt, group: gl.constexpr, C: gl.constexpr, EDGE: gl.constexpr):
    """(o, p, r) after step t: scores and weighs its tile while o takes the tile before."""
    F: gl.constexpr = C.F
    SPLITS: gl.constexpr = C.SPLITS
    i, first, last, a, theta, table = rows
    MOVES: gl.constexpr = F.family == "ratio" and F.shift != "none" and not C.FIXED_SHIFT
    CUTS: gl.constexpr = (opt.left is not None) or (opt.lengths is not None) or C.INTERVAL
    stage, before = t % C.STAGES, (t - 1) % C.STAGES
    if C.RELATIVE:
        prefetch_relative(table, work.i0 + group * ROWS, first_key(t + 1, work, C))
    values = ring.v.index(before).reshape([C.BN, C.E])
    if CUTS:  # before the scores: no branch while a product runs
        mbarrier.wait(ring.v_full.index(before), ((t - 1) // C.STAGES) & 1)
        clear_hidden(values, first_key(t - 1, work, C), work, opt, C)
    s = start_scores(t, at, ring, C)
    mbarrier.wait(ring.v_full.index(before), ((t - 1) // C.STAGES) & 1)
    o = start_output(0, o, p, values, C)
    s = warpgroup_mma_wait(1, deps=[s])
    start = first_key(t, work, C)
    s = row_sums.cap_scores(s, opt)
    if C.RELATIVE:
        s = add_relative(s, table, work.i0 + group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout)), start)
    if EDGE:
        s = row_sums.mask_keys(s, first, last, start, opt, C)
    factor, r = row_sums.update_shift(s, r, a * LOG2E, first, start, opt, C, C.FIXED_SHIFT, EDGE)
    method = row_sums.choose_method(s, r, a, theta, ring.v.dtype, C)
    y = split_keys(s, SPLITS)
    sums = row_sums.empty_tile(r)
    weights = ()
    for c in gl.static_range(SPLITS):
        if c + 1 < SPLITS:
            o = start_output(c + 1, o, p, values, C)
        if F.log_odds is not None and not EDGE:
            u, sums = row_sums.weigh_sigmoid(y[c], sums, a, theta, method, ring.v.dtype, C)
        else:
            u, sums = row_sums.weigh_split(
                y[c], r, sums, i, a, theta, start, work.i0 + group * ROWS, c * (C.BN // SPLITS), C, EDGE
            )
        weights = weights + (u,)  # noqa: RUF005 (Triton has no star)
    r = row_sums.add_tile(r, sums, i, start, work.i0 + group * ROWS, C, EDGE)
    wait_for_keys(t + 1, ring, work, C)  # its branches keep the compiler from moving the wait below
    if SPLITS == 1:
        o, _ = warpgroup_mma_wait(0, deps=[o, p[0]])
    else:
        o, _, _, _, _ = warpgroup_mma_wait(0, deps=[o, p[0], p[1], p[2], p[3]])
    p = ()
    for c in gl.static_range(SPLITS):
        p = p + (to_operand(weights[c], ring, C),)  # noqa: RUF005
    mbarrier.arrive(ring.free.index(stage), count=1)
    if MOVES:
        o = ptx.rescale(o, factor)
    return o, p, r


@gluon.jit
def to_operand(u, ring, C: gl.constexpr):
    """u in 16 bits, in the layout of a tensor core's first operand."""
    F: gl.constexpr = C.F
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.E, 16]), 2)
    return gl.convert_layout(ptx.round_weights(u, ring.v.dtype, F, C.WARPGROUPS == 3 and C.SPLITS == 1), LAYOUT)


@gluon.jit
def consume(outputs, ring, opt, blocks, group: gl.constexpr, C: gl.constexpr):
    """One consumer warpgroup: its 64 queries of every block that this program takes."""
    work = get_work(0, 0, outputs.spans, outputs.bias, opt, C)
    if C.EARLY:
        rounds = count_rounds(blocks, C)
        s = warpgroup_mma_wait(0, deps=[start_block(work, True, ring, group, C)])
        for _ in range(rounds):
            work, s = process_block(work, s, rounds, outputs, ring, opt, blocks, group, C)
    elif C.PERSISTENT:
        rounds = count_rounds(blocks, C)
        for _ in range(rounds):
            s = warpgroup_mma_wait(0, deps=[start_block(work, True, ring, group, C)])
            work, _ = process_block(work, s, rounds, outputs, ring, opt, blocks, group, C)
    else:
        s = warpgroup_mma_wait(0, deps=[start_block(work, True, ring, group, C)])
        process_block(work, s, 1, outputs, ring, opt, blocks, group, C)
    tma.store_wait(0)


@gluon.jit
def first_step(work, group: gl.constexpr, C: gl.constexpr):
    """The step of the first tile that this warpgroup's rows of a block see."""
    begin = work.base
    if C.CAUSAL and C.BM > C.BN:
        begin = work.base + gl.maximum(work.low + work.count - 1 - (work.i0 + group * ROWS) // C.BN, 0)
    return begin


@gluon.jit
def start_block(work, exists, ring, group: gl.constexpr, C: gl.constexpr):
    """Issues the scores of a block's first tile; those of a block that does not exist are never read."""
    at = work.round % 2 * C.WARPGROUPS + group
    begin = first_step(work, group, C)
    if C.CAUSAL and C.BM > C.BN:
        skip_tiles(work.base, gl.where(exists, begin, work.base), ring, C)
    mbarrier.wait(ring.q_full.index(at), (work.round // 2) & 1, pred=exists)
    mbarrier.wait(ring.k_full.index(begin % C.STAGES), (begin // C.STAGES) & 1, pred=exists)
    return start_scores(begin, at, ring, C)


@gluon.jit
def process_block(work, s, rounds, outputs, ring, opt, blocks, group: gl.constexpr, C: gl.constexpr):
    """Computes and stores one warpgroup's 64 rows of a block, whose first tile has the scores s.

    Returns the program's next block and, if EARLY, its first scores.
    """
    F: gl.constexpr = C.F
    SPLITS: gl.constexpr = C.SPLITS
    WIDTH: gl.constexpr = C.BN // C.SPLITS
    SPLIT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.E, 16])
    r0 = work.i0 + group * ROWS
    at = work.round % 2 * C.WARPGROUPS + group
    begin = first_step(work, group, C)
    mbarrier.arrive(ring.free.index(begin % C.STAGES), count=1)
    following = work
    if C.PERSISTENT:
        next_round = gl.minimum(work.round + 1, rounds - 1)
        following = get_work(next_round, work.end, outputs.spans, outputs.bias, opt, C)
    i = r0 + gl.arange(0, ROWS, gl.SliceLayout(1, SPLIT))
    first = i * 0
    last = i * 0 + work.keys
    if C.CAUSAL:
        last = gl.minimum(i + 1, last)
        if opt.left is not None:
            first = gl.maximum(i - opt.left, 0)
    place = i  # in the keys' order
    if C.INTERVAL:
        row, plane = find_row(outputs.spans, work.b, work.h, i), find_plane(outputs.spans)
        first, last = gl.load(row), gl.load(row + plane)
        if C.NEED.distance:
            place = gl.load(row + 2 * plane)
    a = gl.full([ROWS], 1.0, gl.float32, i.type.layout)
    if opt.temperature.ptr is not None:
        a = 1.0 / tiles.load_rows(opt.temperature, work.b, work.h, i, i < opt.queries, 1.0).to(gl.float32)
    if opt.cap is None:
        a = a * tiles.number(opt.scale, gl.float32)
    theta = tiles.number(opt.theta, gl.float32)
    r = row_sums.empty_rows(WIDTH, SPLIT, F)
    a_lanes = r.z + gl.expand_dims(gl.convert_layout(a, gl.SliceLayout(1, r.z.type.layout)), 1)
    table = i  # which nobody reads without a bias by relative position
    if C.RELATIVE:
        table = find_table(outputs.bias, work.h, opt)
    start = first_key(begin, work, C)
    s = row_sums.cap_scores(s, opt)
    if C.RELATIVE:
        s = add_relative(s, table, i, start)
    if not C.DIAGONAL_FIRST or C.RAGGED:
        s = row_sums.mask_keys(s, first, last, start, opt, C)
    _, r = row_sums.update_shift(s, r, a_lanes * LOG2E, first, start, opt, C, False, True)
    y = split_keys(s, SPLITS)
    sums = row_sums.empty_tile(r)
    p = ()
    for c in gl.static_range(SPLITS):
        u, sums = row_sums.weigh_split(y[c], r, sums, place, a_lanes, theta, start, r0, c * WIDTH, C, True)
        p = p + (to_operand(u, ring, C),)  # noqa: RUF005
    r = row_sums.add_tile(r, sums, place, start, r0, C, True)
    o = zeros(C.E, OUT)
    if C.PERSISTENT:
        release_queries(work, ring, group, C)
    wait_for_keys(begin + 1, ring, work, C)
    edge = work.end
    if opt.left is not None:  # the last tiles hold the first keys of this warpgroup's rows
        edge = work.end - (gl.maximum(r0 + ROWS - 1 - opt.left, 0) // C.BN + 1 - work.low)
        edge = gl.maximum(edge, begin + 1)
    rows = (place, first, last, a_lanes, theta, table)
    if C.INTERVAL:
        PARTS: gl.constexpr = 3 if C.NEED.distance else 2
        ends = divide_tiles(begin + 1, r0, work, outputs.spans, C)
        for part in range(PARTS):  # of each part the tiles that some row sees in part come first
            masked = gl.where(part == 0, begin + 1, gl.where(part == 1, ends[1], ends[3]))
            bare = gl.where(part == 0, ends[0], gl.where(part == 1, ends[2], work.end))
            for t in range(masked, bare):
                o, p, r = process_tile(t, o, p, r, at, ring, work, rows, opt, group, C, True)
            for t in range(bare, gl.where(part == 0, ends[1], gl.where(part == 1, ends[3], work.end))):
                o, p, r = process_tile(t, o, p, r, at, ring, work, rows, opt, group, C, False)
    else:
        bare = begin + 1
        if C.RAGGED:
            bare = gl.where(first_key(begin, work, C) // C.BN + 1 < work.count, begin + 2, begin + 1)
            for t in range(begin + 1, bare):
                o, p, r = process_tile(t, o, p, r, at, ring, work, rows, opt, group, C, True)
        for t in range(bare, edge):
            o, p, r = process_tile(t, o, p, r, at, ring, work, rows, opt, group, C, False)
        if opt.left is not None:
            for t in range(edge, work.end):
                o, p, r = process_tile(t, o, p, r, at, ring, work, rows, opt, group, C, True)
    end = work.end - 1
    mbarrier.wait(ring.v_full.index(end % C.STAGES), (end // C.STAGES) & 1)
    values = ring.v.index(end % C.STAGES).reshape([C.BN, C.E])
    if (opt.left is not None) or (opt.lengths is not None) or C.INTERVAL:
        clear_hidden(values, first_key(end, work, C), work, opt, C)
    for c in gl.static_range(SPLITS):
        o = start_output(c, o, p, values, C)
    if C.EARLY:
        PENDING: gl.constexpr = C.PANELS + 1 if C.KEY_BIAS else C.PANELS
        if C.CAUSAL and C.BM > C.BN:  # the next block may skip tiles, which releases the values that p·v still reads
            o = warpgroup_mma_wait(0, deps=[o])
        s = start_block(following, work.round + 1 < rounds, ring, group, C)
        o = warpgroup_mma_wait(PENDING, deps=[o])
        write_block(o, r, i, a, outputs, ring, work, opt, blocks, group, C)
        s = warpgroup_mma_wait(0, deps=[s])
    else:
        o = warpgroup_mma_wait(0, deps=[o])
        write_block(o, r, i, a, outputs, ring, work, opt, blocks, group, C)
    return following, s


@gluon.jit
def forward_hopper(
    q_blocks, k_blocks, v_blocks, o_blocks, bias_blocks, shifts, sums, raw_sums, spans, bias, opt, blocks,
    C: gl.constexpr,
):  # fmt: skip
    """Computes o, the row state and, for statistics, the raw sums that `forward_statistics` finishes."""
    TYPE: gl.constexpr = q_blocks.dtype
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    STAGES: gl.constexpr = C.STAGES
    PANELS: gl.constexpr = C.PANELS
    QUERIES: gl.constexpr = 2 * C.WARPGROUPS if C.PERSISTENT else C.WARPGROUPS
    ones = None
    columns = None
    if C.KEY_BIAS:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
        ones = gl.allocate_shared_memory(TYPE, [ROWS, 16], gl.NVMMASharedLayout(32, 16, 2))
        column = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, LAYOUT)), 0)
        ones.store(gl.where(column < 3, gl.full([ROWS, 16], 1.0, gl.float32, LAYOUT), 0.0).to(TYPE))
        columns = gl.allocate_shared_memory(TYPE, [STAGES, 1, 1, C.BN, 16], bias_blocks.layout)
    ring = Ring(
        gl.allocate_shared_memory(TYPE, [QUERIES * PANELS, 1, 1, ROWS, C.PANEL], q_blocks.layout),
        gl.allocate_shared_memory(TYPE, [STAGES * PANELS, 1, 1, C.BN, C.PANEL], k_blocks.layout),
        gl.allocate_shared_memory(TYPE, [STAGES, 1, 1, C.BN, C.E], v_blocks.layout),
        make_barriers(QUERIES, 1),
        make_barriers(QUERIES, 1),
        make_barriers(STAGES, 1),
        make_barriers(STAGES, 1),
        make_barriers(STAGES, WARPGROUPS),
        ones,
        columns,
    )
    fence_async_shared()
    outputs = Outputs(o_blocks, shifts, sums, raw_sums, spans, bias)
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (consume, (outputs, ring, opt, blocks, 0, C)),
                (produce, (q_blocks, k_blocks, v_blocks, bias_blocks, ring, spans, bias, opt, blocks, C)),
            ],
            [1],
            [24],
        )
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (outputs, ring, opt, blocks, 0, C)),
                (consume, (outputs, ring, opt, blocks, 1, C)),
                (produce, (q_blocks, k_blocks, v_blocks, bias_blocks, ring, spans, bias, opt, blocks, C)),
            ],
            [4, 1],
            [C.REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (outputs, ring, opt, blocks, 0, C)),
                (consume, (outputs, ring, opt, blocks, 1, C)),
                (consume, (outputs, ring, opt, blocks, 2, C)),
                (produce, (q_blocks, k_blocks, v_blocks, bias_blocks, ring, spans, bias, opt, blocks, C)),
            ],
            [4, 4, 1],
            [C.REGISTERS, C.REGISTERS, 24],
        )
