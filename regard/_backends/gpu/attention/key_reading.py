"""What keys get: the weight that each key receives, summed over the queries, and the k keys of most weight of each row.

    sum_received    one block of keys: Σ_i p_ij over the query blocks that see it, keys first, as dk and dv are found
    find_top_keys   blocks of queries: a lower bound of the k-th largest score, then the list of what is not below it;
                    on Hopper for the blocks alone that `sparse/top_keys.py` left

Both recompute q·kᵀ and take p from the row state that any forward left, so that no N × N tensor exists. Σ_i p_ij cannot
be added up in the forward itself: Z of a row is known only after its last key.

The bound is the k-th largest of BN maxima, of the keys at the same place of every tile. Few more than k scores lie at
or above it, unless many are equal; a row with more than CAP is swept k times instead, each time for the next key in
the order of falling scores and rising positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, tiles
from regard._backends.gpu.attention.backward.slopes import State
from regard._backends.gpu.attention.backward.two_sweeps import sweep_queries, weigh_queries
from regard._backends.gpu.attention.config import config_of, count_blocks, describe_blocks, options, view
from regard._backends.gpu.attention.masks.dense import add_tile_map
from regard._backends.gpu.attention.masks.tables import add_key_index, add_query_ranges
from regard._backends.gpu.attention.sparse import gather, support, top_keys
from regard._backends.gpu.attention.sparse.top_keys import find_bound, find_next, load_state, store_key
from regard._backends.gpu.attention.tiles import HIDDEN, LOG2E
from regard._backends.gpu.attention.visibility import NOWHERE
from regard._backends.gpu.launcher import launch, launch_key, on_device_of
from regard._call.problem import Forward, Problem
from regard._facts import sm_count

MOST = 32  # keys of a row that `find_top_keys` lists: at most the columns of a tile
PROGRAMS = 4  # of `find_top_keys`, per SM


def sum_over_queries(p: Problem, forward: Forward) -> torch.Tensor:
    """Σ_i p_ij of every key, [B, H, N]."""
    like = dict(dtype=p.accumulator, device=p.q.device)
    found = torch.empty(*p.q.shape[:2], p.k.shape[2], **like)
    folded = p.choice.family == "ratio" and p.choice.exponential and p.q.element_size() == 2
    config, how = config_of(p, "received", Z_IN_SHIFT=folded)
    opt = add_query_ranges(p, config, add_tile_map(p, config, add_key_index(p, options(p)), keys_first=True))
    shift = torch.empty(forward.shift.shape, **like)
    state = State(shift, None if folded else torch.empty(shift.shape, **like), shift, None, None, None)
    q_blocks = describe_blocks(p.q, config.BM, config.BD, config.BULK)
    programs = triton.cdiv(p.k.shape[2], config.BN) * p.q.shape[0] * p.q.shape[1]
    arguments, key, rows = (view(p.q), view(p.k), q_blocks, found, state, opt), launch_key(p), shift.numel()
    with on_device_of(p.q):
        given = forward.shift, forward.z, state, rows
        launch(key, store_state, triton.cdiv(rows, 1024), given, (config, 1024), num_warps=4)
        launch(key, sum_received, programs, arguments, (config,), **how)
    return found


def list_top_keys(p: Problem, forward: Forward, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(index, weight) of the `most` keys of most weight of every row, [B, H, M, most], −1 and 0 beyond the last."""
    config, how = config_of(p, "top_keys")
    opt, key, like = add_tile_map(p, config, add_key_index(p, options(p))), launch_key(p), dict(device=p.q.device)
    index = torch.empty(*p.q.shape[:3], most, dtype=torch.int64, **like)
    weight = torch.empty(index.shape, dtype=p.accumulator, **like)
    state = State(forward.shift, forward.z, forward.shift, None, None, None)
    with on_device_of(p.q):
        failed = top_keys.fill(p, key, index, weight, state, opt, config)
        blocks, cap = count_blocks(p, config), max(32, 4 * triton.next_power_of_2(most))
        programs = min(blocks, PROGRAMS * sm_count(p.q.device)) if p.q.is_cuda else blocks
        values = torch.empty(programs, config.BM, cap, dtype=p.accumulator, **like)
        places = torch.empty(values.shape, dtype=torch.int32, **like)
        counts = torch.empty(programs, config.BM, dtype=torch.int32, **like)
        k_blocks = describe_blocks(p.k, config.BN, config.BD, config.BULK)
        outputs = index, weight, values, places, counts, state, failed, blocks
        arguments = view(p.q), view(p.k), k_blocks, *outputs, opt
        launch(key, find_top_keys, programs, arguments, (config, most, cap), **how)
    return index, weight


@triton.jit
def store_state(shifts, sums, state, rows, C: tl.constexpr, SIZE: tl.constexpr):
    """Store the row state as `slopes.weigh` reads it: the shift in log2 units and 1/Z, of threshold maps τ."""
    row = tiles.wide(tl.program_id(0)) * SIZE + tl.arange(0, SIZE)
    shift = tl.load(shifts + row, mask=row < rows, other=0.0)
    z = tl.load(sums + row, mask=row < rows, other=1.0)
    if C.F.family == "ratio":
        shift = shift * LOG2E
    if C.Z_IN_SHIFT:
        shift = tl.where(z == 0.0, 2.0**100, shift + tl.log2(z))
    else:
        tl.store(state.inverse + row, tl.where(z > 0.0, 1.0 / z, z), mask=row < rows)  # a NaN stays
    tl.store(state.shift + row, shift, mask=row < rows)


@triton.jit
def received_tile(acc, inputs, b, h, j, j0, start, n, seed, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Add the weights of one query block, keys first."""
    keys, q, q_blocks, state = inputs
    _, _, _, _, _, _, weights, _ = weigh_queries(keys, q, q_blocks, state, b, h, j, j0, start, n, opt, C, EDGE)
    return acc + tiles.fold(weights[0], C)


@triton.jit
def sum_received(q, k, q_blocks, received, state, opt, C: tl.constexpr):
    """Sum the weights of one block of keys over the queries of one head."""
    blocks = tl.cdiv(opt.keys, C.BN)
    pid = tl.program_id(0)
    j0 = pid % blocks * C.BN
    h = (pid // blocks) % opt.heads
    b = pid // blocks // opt.heads
    at = j0 + tl.arange(0, C.BN)
    n = tiles.key_count(opt, b)
    keys = tiles.load_block(k, b, h // opt.group, j0, 0, n, C.BN, C.D, C.BD, False)
    queries = key_loop.find_query_range(j0, opt, n, C.BM, C.BN)
    queries = key_loop.find_query_range_of_head(queries, b, h, j0, opt, C)
    inputs = keys, q, q_blocks, state
    acc = tiles.zeros(C.BN, C.LANES, C.ACC)
    acc = sweep_queries(acc, inputs, b, h, at[:, None], j0, n, queries, 0, opt, received_tile, C)
    place = (tiles.wide(b) * opt.heads + h) * opt.keys + at
    tl.store(received + place, tl.sum(acc, 1), mask=at < opt.keys)


@triton.jit
def group_tile(best, block, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Raise the maximum of each group of keys, those at the same place of every tile."""
    _, _, y, _, _ = key_loop.score_tile(block, start, opt, C, EDGE)
    return tl.maximum(best, y)


@triton.jit
def list_tile(state, block, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Append a tile's keys at or above the bound to their rows' lists."""
    bound, values, places, counts, cap = state
    _, _, y, visible, j = key_loop.score_tile(block, start, opt, C, EDGE)
    hit = visible & (y >= bound[:, None])
    if tl.max(tl.max(tl.where(hit, 1, 0), 1), 0) > 0:
        rows = tl.arange(0, C.BM)[:, None]
        at = tl.atomic_add(counts + rows + j * 0, 1, mask=hit, sem="relaxed", scope="cta")
        fits = hit & (at < cap)
        tl.store(values + rows * cap + at, y, mask=fits)
        tl.store(places + rows * cap + at, j + rows * 0, mask=fits)
    return state


@triton.jit
def next_tile(state, block, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Find the first key after (value, place), in the order of falling scores and rising positions."""
    found, at, value, place = state
    _, _, y, visible, j = key_loop.score_tile(block, start, opt, C, EDGE)
    top, first = find_next(y, j, visible, value, place)
    better = (top > found) | ((top == found) & (first < at))
    return tl.where(better, top, found), tl.where(better, first, at), value, place


@triton.jit
def find_top_keys(
    q, k, k_blocks, index, weight, values, places, counts, state, failed, blocks, opt, C: tl.constexpr,
    K: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """List the keys of most weight of every block of queries that this program takes."""
    own = tl.program_id(0)
    scratch = values + own * C.BM * CAP, places + own * C.BM * CAP, counts + own * C.BM
    for number in range(own, blocks, tl.num_programs(0)):
        if failed is None:
            list_block(number, q, k, k_blocks, index, weight, scratch, state, opt, C, K, CAP)
        else:
            row_blocks = tl.cdiv(opt.queries, C.BM)
            start = (row_blocks - 1 - number % row_blocks) * C.BM
            if not support.are_solved(failed, number // row_blocks, start, opt.queries, C.BM, gather.ROWS):
                list_block(number, q, k, k_blocks, index, weight, scratch, state, opt, C, K, CAP)


@triton.jit
def list_block(
    number, q, k, k_blocks, index, weight, scratch, state, opt, C: tl.constexpr, K: tl.constexpr, CAP: tl.constexpr
):
    """List the keys of most weight of one block of queries."""
    values, places, counts = scratch
    line = tl.arange(0, C.BM)
    entry = line[:, None] * CAP + tl.arange(0, CAP)[None, :]
    block, i0 = key_loop.load_query_block_at(number, q, k, k, k_blocks, k_blocks, opt, C)
    inside = block.i < opt.queries
    row = (tiles.wide(block.b) * opt.heads + block.h) * opt.queries + block.i
    rows = load_state(state, block.b, block.h, block.i, opt, C)
    theta = tiles.column(block.theta, opt)
    tl.store(counts + line, line * 0)
    best = key_loop.sweep(tl.full([C.BM, C.BN], HIDDEN, C.ACC), block, i0, opt, group_tile, C)
    bound = find_bound(best, K, C)
    tl.debug_barrier()
    key_loop.sweep((bound, values, places, counts, tl.full([], CAP, tl.int32)), block, i0, opt, list_tile, C)
    tl.debug_barrier()
    count = tl.load(counts + line)
    there = tl.arange(0, CAP)[None, :] < count[:, None]
    y = tl.load(values + entry, mask=there, other=2.0 * HIDDEN)
    j = tl.load(places + entry, mask=there, other=NOWHERE)
    value = tl.full([C.BM], float("inf"), C.ACC)
    place = line * 0 - 1
    for at in range(K):
        value, place = find_next(y, j, there, value, place)
        store_key(index, weight, row, at, value, place, rows, theta, inside & (count <= CAP), C, K)
    if tl.max(tl.where(inside, count, 0), 0) > CAP:
        value = tl.full([C.BM], float("inf"), C.ACC)
        place = line * 0 - 1
        for at in range(K):
            nothing = tl.full([C.BM], 2.0 * HIDDEN, C.ACC), line * 0 + NOWHERE, value, place
            value, place, _, _ = key_loop.sweep(nothing, block, i0, opt, next_tile, C)
            store_key(index, weight, row, at, value, place, rows, theta, inside & (count > CAP), C, K)
    tl.debug_barrier()
