"""Small tables that a call's kernels read, filled on the device before them: no wait for the host.

    index_keys     of a bias per key: which keys it leaves visible
    find_queries   of ragged rows, for dk and dv: the range of queries that see a block of keys

A table is made for one call and dropped with it. Heads that share what decides share their table. Those of a dense
mask are in `dense.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from regard._backends.gpu.attention import tiles, visibility
from regard._backends.gpu.attention.tiles import Config, KeyIndex, Options, Table
from regard._backends.gpu.attention.visibility import NOWHERE
from regard._backends.gpu.launcher import launch
from regard._call.problem import Problem

KEYS = 1024  # of a key bias
QUERIES = 1024


@triton.jit
def index_keys(rank, keys, opt, heads, SIZE: tl.constexpr):
    """List the keys of one head whose bias is above −inf, and how many lie before each key."""
    head = tl.program_id(0)
    b = head // heads
    h = head % heads
    rank += tiles.wide(head) * (opt.keys + 1)
    keys += tiles.wide(head) * opt.keys
    total = 0
    for start in tl.range(0, opt.keys, SIZE):
        j = start + tl.arange(0, SIZE)
        bias = tiles.load_rows(opt.key_bias, b, h, j, j < opt.keys, -float("inf"))
        shown = tl.where(bias == -float("inf"), 0, 1)
        before = total + tl.cumsum(shown, 0) - shown
        tl.store(rank + j, before, mask=j < opt.keys)
        tl.store(keys + before, j, mask=shown != 0)
        total += tl.sum(shown, 0)
    tl.store(rank + opt.keys, total)


@triton.jit
def find_queries(ranges, opt, heads, BM: tl.constexpr, BN: tl.constexpr, SIZE: tl.constexpr):
    """Store (begin, inner, outer, end) of one block of keys, as `key_loop.find_query_range` has them.

    [inner, outer) is the first run of queries that see the whole block.
    """
    blocks = tl.cdiv(opt.keys, BN)
    pid = tl.program_id(0)
    j0 = pid % blocks * BN
    b = pid // blocks // heads
    h = pid // blocks % heads
    n = tiles.key_count(opt, b)
    begin = opt.queries
    end = 0
    inner = opt.queries
    for start in tl.range(0, opt.queries, SIZE):
        i = start + tl.arange(0, SIZE)
        first, last = visibility.visible_range(b, h, i, opt, n)
        inside = i < opt.queries
        some = inside & (first < j0 + BN) & (last > j0) & (first < last)
        begin = tl.minimum(begin, tl.min(tl.where(some, i, NOWHERE), 0))
        end = tl.maximum(end, tl.max(tl.where(some, i + 1, 0), 0))
        whole = inside & (first <= j0) & (last >= j0 + BN)
        inner = tl.minimum(inner, tl.min(tl.where(whole, i, NOWHERE), 0))
    outer = opt.queries
    for start in tl.range(inner // SIZE * SIZE, opt.queries, SIZE):
        i = start + tl.arange(0, SIZE)
        first, last = visibility.visible_range(b, h, i, opt, n)
        cut = (i > inner) & (i < opt.queries) & ((first > j0) | (last < j0 + BN))
        outer = tl.minimum(outer, tl.min(tl.where(cut, i, NOWHERE), 0))
    where = ranges + 4 * tiles.wide(pid)
    tl.store(where, begin // BM * BM)
    tl.store(where + 1, tl.cdiv(inner, BM) * BM)
    tl.store(where + 2, outer // BM * BM)
    tl.store(where + 3, end)


def add_key_index(p: Problem, opt: Options) -> Options:
    """Return the options with the index of the keys that a bias per key shows, if the call has one."""
    if opt.key_bias.ptr is None:
        return opt
    keys = p.k.shape[2]
    shared, per_entry, heads = find_shared(p, p.bias.stride()[:2], ragged=False, lengths=False)
    like = dict(dtype=torch.int32, device=p.q.device)
    rank, shown = torch.empty(heads, keys + 1, **like), torch.empty(heads, keys, **like)
    launch(None, index_keys, heads, (rank, shown, opt, per_entry), (KEYS,), num_warps=4)
    return opt._replace(key_index=KeyIndex(Table(rank, *shared), Table(shown, *shared)))


def add_query_ranges(p: Problem, config: Config, opt: Options) -> Options:
    """Return the options with the queries of each block of keys, where a row's keys are no function of its index."""
    if not config.RAGGED or p.mask is not None:
        return opt
    strides = (0, 0) if opt.key_bias.ptr is None else p.bias.stride()[:2]
    shared, per_entry, heads = find_shared(p, strides, ragged=True)
    blocks = triton.cdiv(p.k.shape[2], config.BN)
    ranges = torch.empty(heads, blocks, 4, dtype=torch.int32, device=p.q.device)
    arguments = ranges, opt, per_entry
    launch(None, find_queries, heads * blocks, arguments, (config.BM, config.BN, QUERIES), num_warps=4)
    return opt._replace(ranges=Table(ranges, *shared))


def find_shared(p: Problem, strides: tuple, ragged: bool, lengths: bool = True) -> tuple[tuple[int, int], int, int]:
    """Return ((b, h) of a `Table`, its heads per batch entry, its heads) where a tensor of these strides decides."""
    steps = [strides]
    if ragged and p.interval is not None:
        steps.append(p.interval.stride()[1:3])
    if ragged and p.row_bias is not None:
        steps.append(p.row_bias.stride()[:2])
    differs_b = any(step[0] for step in steps) or (lengths and p.key_lengths is not None)
    differs_h = any(step[1] for step in steps)
    batch, heads = p.q.shape[:2]
    per_entry = heads if differs_h else 1
    return (2 * per_entry if differs_b else 0, 2 * int(differs_h)), per_entry, per_entry * (batch if differs_b else 1)
