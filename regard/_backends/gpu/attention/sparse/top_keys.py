"""The k keys of most weight of each row from the lists of `candidates.py`, on Hopper.

    bound_from_places → list_candidates → select_top_keys

A few tiles give a lower bound of the k-th largest score, one sweep lists the keys above it, and the k largest of the
list are the row's. Rows whose lists overflowed are flagged for `key_reading.find_top_keys`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, tiles
from regard._backends.gpu.attention.backward.slopes import Rows, State, broadcast_rows, load_rows, weigh
from regard._backends.gpu.attention.config import describe_blocks, view
from regard._backends.gpu.attention.sparse import gather
from regard._backends.gpu.attention.sparse import launch as lists
from regard._backends.gpu.attention.sparse.bounds import sweep_groups
from regard._backends.gpu.attention.tiles import HIDDEN, LOG2E, Config, Options
from regard._backends.gpu.attention.visibility import NOWHERE
from regard._backends.gpu.launcher import launch
from regard._call.problem import Problem

LISTED = 80  # keys above the bound of a row, as many as its four lists hold a few times over
CHUNK = 32  # entries of each of a row's four lists that are in registers at a time
WARPS = 4  # of `select_top_keys`


def choose_stride(most: int) -> int:
    """Return how many whole tiles there are to one that counts for the bound: a power of two.

    Of keys thrown at G groups about G·log(G/(G − k)) lie above the k-th largest of the groups' maxima.
    """
    above = lists.GROUPS * math.log(lists.GROUPS / (lists.GROUPS - most))
    return 1 << max(0, int(math.log2(LISTED / above)))


def fill(
    p: Problem, key: Hashable, index: torch.Tensor, weight: torch.Tensor, state: State, opt: Options, config: Config
) -> torch.Tensor | None:
    """Fill index and weight; returns flags of the rows that are left to sweeps, None: all of them."""
    if lists.supports(p, "top keys") is not None:
        return None
    most, bound = index.shape[-1], torch.empty_like(state.shift)
    plain = config._replace(BM=lists.BLOCK, BN=lists.GROUPS, BULK=True)
    held, failed = lists.CandidateLists(p, False, False), lists.make_flags(p.q, gather.ROWS)
    k_blocks = describe_blocks(p.k, plain.BN, plain.BD, True)
    arguments, constants = (view(p.q), view(p.k), k_blocks, bound, opt), (plain, most, choose_stride(most))
    launch(key, bound_from_places, held.blocks, arguments, constants, num_warps=8, num_stages=3)
    for first, programs in lists.split_chunks(held.blocks):
        held.fill(key, bound, None, first, programs, opt)
        arguments = held.entries.view(torch.int64), held.counts, index, weight, failed, state, first, opt
        constants = plain, most, lists.CAP, lists.CAP - lists.SPARE, lists.BLOCK, CHUNK
        groups = programs * lists.BLOCK // gather.ROWS.value
        launch(key, select_top_keys, groups, arguments, constants, num_warps=WARPS)
    return failed


@triton.jit
def bound_from_places(q, k, k_blocks, bounds, opt, C: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr):
    """Store a number below the K-th largest score of each row; −∞ if fewer than K groups of keys are visible."""
    block, _ = key_loop.load_query_block(q, k, k, k_blocks, k_blocks, opt, C)
    best = sweep_groups(block, opt, C, STRIDE)
    top = tl.max(best, 1)
    bound = find_bound(best, K, C)
    bound -= (1e-3 + 1e-6 * tl.abs(top * block.a)) / block.a  # another kernel rounds the products otherwise
    row = (tiles.wide(block.b) * opt.heads + block.h) * opt.queries + block.i
    tl.store(bounds + row, tl.where(bound > 0.5 * HIDDEN, bound, -float("inf")), mask=block.i < opt.queries)


@triton.jit
def find_bound(best, K: tl.constexpr, C: tl.constexpr):
    """Return a lower bound of the k-th largest score of each row: of equal maxima all count as one."""
    bound = tl.max(best, 1)
    for _ in range(1, K):
        best = tl.where(best >= bound[:, None], HIDDEN, best)
        bound = tl.max(best, 1)
    return bound


@triton.jit
def select_top_keys(
    entries, counts, index, weight, failed, state, block0, opt, C: tl.constexpr, K: tl.constexpr, CAP: tl.constexpr,
    FULL: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store the K keys of most weight of sixteen rows, in the order of falling scores and rising positions."""
    b, h, i, slot = gather.locate_rows(block0, opt, BLOCK, False)
    if gather.flag_overflow(counts, slot, i, failed, b, h, opt.heads, opt.queries, FULL):
        inside = i < opt.queries
        row = (tiles.wide(b) * opt.heads + h) * opt.queries + i
        rows = load_state(state, b, h, i, opt, C)
        theta = tiles.column(tiles.load_theta(b, h, i, opt, C.ACC), opt)
        place = tl.arange(0, 4 * CHUNK)  # entry · quarter
        count = tl.load(counts + slot[:, None] * 4 + (place % 4)[None, :], mask=inside[:, None], other=0)
        longest = tl.max(tl.max(count, 1), 0)
        where = entries + slot // BLOCK * (4 * CAP * BLOCK) + slot % BLOCK * 4
        where = where[:, None] + ((place // 4) * (4 * BLOCK) + place % 4)[None, :]
        y, j = load_entries(where, count, 0, place, BLOCK)
        value = tl.full(i.shape, float("inf"), C.ACC)
        last = i * 0 - 1
        for at in range(K):
            top, first = find_next(y, j, y > 2.0 * HIDDEN, value, last)
            for start in range(CHUNK, longest, CHUNK):
                more, keys = load_entries(where, count, start, place, BLOCK)
                other, there = find_next(more, keys, more > 2.0 * HIDDEN, value, last)
                better = (other > top) | ((other == top) & (there < first))
                top = tl.where(better, other, top)
                first = tl.where(better, there, first)
            store_key(index, weight, row, at, top, first, rows, theta, inside, C, K)
            value = top
            last = first


@triton.jit
def load_entries(where, count, start, place, BLOCK: tl.constexpr):
    """(y, j) of a chunk of each row's four lists; (2·HIDDEN, NOWHERE) where a list has ended."""
    there = (start + place // 4)[None, :] < count
    both = tl.load(where + start * (4 * BLOCK), mask=there, other=0)
    y = both.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(there, y, 2.0 * HIDDEN), tl.where(there, (both >> 32).to(tl.int32), NOWHERE)


@triton.jit
def find_next(y, j, visible, value, place):
    """(score, key) of each row's first key after (value, place), in the order of falling scores, rising positions."""
    later = visible & ((y < value[:, None]) | ((y == value[:, None]) & (j > place[:, None])))
    top = tl.max(tl.where(later, y, 2.0 * HIDDEN), 1)
    return top, tl.min(tl.where(later & (y == top[:, None]), j, NOWHERE), 1)


@triton.jit
def load_state(state, b, h, i, opt, C: tl.constexpr):
    """Load the row state that a forward left, (shift, Z), as `slopes.weigh` reads it: in log2 units, 1/Z."""
    r = load_rows(state, b, h, i, tiles.key_count(opt, b), opt, C, False)
    shift = r.shift
    if C.F.family == "ratio":
        shift = shift * LOG2E
    inverse = tl.where(r.inverse > 0.0, 1.0 / r.inverse, r.inverse)  # a NaN stays
    return Rows(r.a, shift, inverse, r.delta, r.first, r.last, r.beta, r.gamma, r.epsilon)


@triton.jit
def store_key(index, weight, row, at, value, place, rows, theta, mine, C: tl.constexpr, K: tl.constexpr):
    """Store one key of each row and its weight."""
    F: tl.constexpr = C.F  # Triton 3.6 passes on no part of a configuration that has no name
    visible = (value > HIDDEN)[:, None]
    p, _, _, _ = weigh(value[:, None], visible, broadcast_rows(rows, False), theta, F, False, True)
    p = tl.sum(p, 1)
    tl.store(weight + row * K + at, p, mask=mine)
    tl.store(index + row * K + at, tl.where(p > 0.0, place, -1), mask=mine)
