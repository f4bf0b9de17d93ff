"""What keys get: the weight that each key receives, summed over the queries, and the k keys of most weight of each row.

    sum_received    one block of keys: Σ_i p_ij over the query blocks that see it, keys first, as dk and dv are found
    find_top_keys   blocks of queries: a lower bound of the k-th largest score, then the list of what is not below it

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
from regard._backends.gpu.attention.backward.slopes import State, broadcast_rows, load_rows, weigh
from regard._backends.gpu.attention.backward.two_sweeps import sweep_queries, weigh_queries
from regard._backends.gpu.attention.config import config_of, count_blocks, describe_blocks, options, view
from regard._backends.gpu.attention.masks.dense import add_tile_map
from regard._backends.gpu.attention.masks.tables import add_key_index, add_query_ranges
from regard._backends.gpu.attention.tiles import HIDDEN, LOG2E
from regard._backends.gpu.attention.visibility import NOWHERE
from regard._backends.gpu.launcher import launch, on_device_of
from regard._call.problem import Forward, Problem
from regard._facts import sm_count

MOST = 32  # keys of a row that `find_top_keys` lists: at most the columns of a tile
PROGRAMS = 4  # of `find_top_keys`, per SM


def sum_over_queries(p: Problem, forward: Forward) -> torch.Tensor:
    """Σ_i p_ij of every key, [B, H, N]."""
    found = torch.empty(*p.q.shape[:2], p.k.shape[2], dtype=p.accumulator, device=p.q.device)
    config, how = config_of(p, "received")
    opt = add_query_ranges(p, config, add_tile_map(p, config, add_key_index(p, options(p)), keys_first=True))
    q_blocks = describe_blocks(p.q, config.BM, config.BD, config.BULK)
    programs = triton.cdiv(p.k.shape[2], config.BN) * p.q.shape[0] * p.q.shape[1]
    arguments = view(p.q), view(p.k), q_blocks, found, make_state(p, forward), opt
    with on_device_of(p.q):
        launch(None, sum_received, programs, arguments, (config,), **how)
    return found


def list_top_keys(p: Problem, forward: Forward, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(index, weight) of the `most` keys of most weight of every row, [B, H, M, most], −1 and 0 beyond the last."""
    config, how = config_of(p, "top_keys")
    opt = add_tile_map(p, config, add_key_index(p, options(p)))
    blocks, cap = count_blocks(p, config), max(32, 4 * triton.next_power_of_2(most))
    programs = min(blocks, PROGRAMS * sm_count(p.q.device)) if p.q.is_cuda else blocks
    like = dict(device=p.q.device)
    index = torch.empty(*p.q.shape[:3], most, dtype=torch.int32, **like)
    weight = torch.empty(index.shape, dtype=p.accumulator, **like)
    values = torch.empty(programs, config.BM, cap, dtype=p.accumulator, **like)
    places = torch.empty(values.shape, dtype=torch.int32, **like)
    counts = torch.empty(programs, config.BM, dtype=torch.int32, **like)
    k_blocks = describe_blocks(p.k, config.BN, config.BD, config.BULK)
    outputs = index, weight, values, places, counts, make_state(p, forward), blocks
    arguments = view(p.q), view(p.k), k_blocks, *outputs, opt
    with on_device_of(p.q):
        launch(None, find_top_keys, programs, arguments, (config, most, cap), **how)
    return index, weight


def make_state(p: Problem, forward: Forward) -> State:
    """The row state as `slopes.weigh` reads it: the shift in log2 units and 1/Z, of threshold maps τ."""
    shift, inverse = forward.shift, torch.where(forward.z > 0, 1.0 / forward.z, forward.z)
    shift = shift * LOG2E.value if p.choice.family == "ratio" else shift
    return State(shift, inverse, shift, None, None, None)


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
    later = visible & ((y < value[:, None]) | ((y == value[:, None]) & (j > place[:, None])))
    top = tl.max(tl.where(later, y, 2.0 * HIDDEN), 1)
    first = tl.min(tl.where(later & (y == top[:, None]), j, NOWHERE), 1)
    better = (top > found) | ((top == found) & (first < at))
    return tl.where(better, top, found), tl.where(better, first, at), value, place


@triton.jit
def find_bound(best, K: tl.constexpr, C: tl.constexpr):
    """Return a lower bound of the k-th largest score of each row: of equal maxima all count as one."""
    bound = tl.max(best, 1)
    for _ in range(1, K):
        best = tl.where(best >= bound[:, None], HIDDEN, best)
        bound = tl.max(best, 1)
    return bound


@triton.jit
def store_key(index, weight, row, at, value, place, rows, block, mine, opt, C: tl.constexpr, K: tl.constexpr):
    """Store one key of each row and its weight."""
    F: tl.constexpr = C.F  # Triton 3.6 passes on no part of a configuration that has no name
    theta = tiles.column(block.theta, opt)
    visible = (value > HIDDEN)[:, None]
    p, _, _, _ = weigh(value[:, None], visible, broadcast_rows(rows, False), theta, F, False, True)
    p = tl.sum(p, 1)
    tl.store(weight + row * K + at, p, mask=mine)
    tl.store(index + row * K + at, tl.where(p > 0.0, place, -1), mask=mine)


@triton.jit
def find_top_keys(
    q, k, k_blocks, index, weight, values, places, counts, state, blocks, opt, C: tl.constexpr, K: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """List the keys of most weight of every block of queries that this program takes."""
    own = tl.program_id(0)
    values += own * C.BM * CAP
    places += own * C.BM * CAP
    counts += own * C.BM
    line = tl.arange(0, C.BM)
    cap = tl.full([], CAP, tl.int32)
    entry = line[:, None] * CAP + tl.arange(0, CAP)[None, :]
    for number in range(own, blocks, tl.num_programs(0)):
        block, i0 = key_loop.load_query_block_at(number, q, k, k, k_blocks, k_blocks, opt, C)
        inside = block.i < opt.queries
        row = (tiles.wide(block.b) * opt.heads + block.h) * opt.queries + block.i
        rows = load_rows(state, block.b, block.h, block.i, tiles.key_count(opt, block.b), opt, C, False)
        tl.store(counts + line, line * 0)
        best = key_loop.sweep(tl.full([C.BM, C.BN], HIDDEN, C.ACC), block, i0, opt, group_tile, C)
        bound = find_bound(best, K, C)
        tl.debug_barrier()
        key_loop.sweep((bound, values, places, counts, cap), block, i0, opt, list_tile, C)
        tl.debug_barrier()
        count = tl.load(counts + line)
        there = tl.arange(0, CAP)[None, :] < count[:, None]
        y = tl.load(values + entry, mask=there, other=2.0 * HIDDEN)
        j = tl.load(places + entry, mask=there, other=NOWHERE)
        listed = inside & (count <= CAP)
        for at in range(K):
            value = tl.max(y, 1)
            place = tl.min(tl.where(y == value[:, None], j, NOWHERE), 1)
            y = tl.where((y == value[:, None]) & (j == place[:, None]), 2.0 * HIDDEN, y)
            store_key(index, weight, row, at, value, place, rows, block, listed, opt, C, K)
        if tl.max(tl.where(inside, count, 0), 0) > CAP:
            value = tl.full([C.BM], float("inf"), C.ACC)
            place = line * 0 - 1
            for at in range(K):
                nothing = tl.full([C.BM], 2.0 * HIDDEN, C.ACC), line * 0 + NOWHERE, value, place
                value, place, _, _ = key_loop.sweep(nothing, block, i0, opt, next_tile, C)
                store_key(index, weight, row, at, value, place, rows, block, inside & (count > CAP), opt, C, K)
        tl.debug_barrier()
