"""Which keys a query sees: causal order, window and lengths, its interval, and what biases and masks hide.

`visible_range` is what every row is masked by. A row bias of −inf hides its row; keys that a key bias hides before the
first and after the last visible one are cut off here, and those between are hidden in `scores.compute_scores`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import tiles

NOWHERE = tl.constexpr(2147483647)


@triton.jit
def head_of(table, b, h, SIZE):
    """Return a pointer to the SIZE numbers of one head."""
    return table.ptr + (tiles.wide(b) * table.b + tiles.wide(h) * table.h) // 2 * SIZE


@triton.jit
def visible_range(b, h, i, opt, n):
    """Return (first, last): query i sees keys first ≤ j < last only; n as `tiles.key_count` has it."""
    first, last = tiles.window_range(i, opt, n)
    if opt.interval.ptr is not None:
        there = i < opt.queries
        first = tl.maximum(first, load_interval(0, b, h, i, there, 0, opt))
        last = tl.minimum(last, load_interval(1, b, h, i, there, NOWHERE, opt))
    if opt.row_bias.ptr is not None:
        bias = tiles.load_rows(opt.row_bias, b, h, i, i < opt.queries, 0.0)
        last = tl.where(bias == -float("inf"), 0, last)
    if opt.key_index.rank.ptr is not None:
        lowest, highest, _ = find_key_span(b, h, opt)
        first = tl.maximum(first, lowest)
        last = tl.minimum(last, highest)
    return first, last


@triton.jit
def load_interval(field, b, h, i, there, other, opt):
    """Load lo (0), hi (1) or the position (2) of rows i."""
    stride = opt.interval.stride
    where = opt.interval.ptr + field * stride[0] + tiles.wide(b) * stride[1] + tiles.wide(h) * stride[2]
    return tl.load(where + tiles.wide(i) * stride[3], mask=there, other=other)


@triton.jit
def find_key_span(b, h, opt):
    """Return (first, last + 1, holes?) of the keys that the key bias shows."""
    shown = tl.load(head_of(opt.key_index.rank, b, h, opt.keys + 1) + opt.keys)
    keys = head_of(opt.key_index.keys, b, h, opt.keys)
    lowest = tl.load(keys, mask=shown > 0, other=0)
    highest = tl.load(keys + shown - 1, mask=shown > 0, other=-1) + 1
    return lowest, highest, shown < highest - lowest


@triton.jit
def positions(b, h, i, opt):
    """Return where queries i stand among the keys, for distances."""
    place = i
    if opt.offset is not None:
        place = i + opt.offset
    if opt.interval.ptr is not None:
        place = load_interval(2, b, h, i, i < opt.queries, 0, opt)
    return place


@triton.jit
def count_keys(b, h, i, first, last, opt):
    """Return the number of visible keys of rows whose range is [first, last), beside no bias that is a matrix."""
    if opt.tiles.lists.ptr is not None:
        count = tl.load(head_of(opt.tiles.rows, b, h, 2 * opt.queries) + 2 * i + 1, mask=i < opt.queries, other=0)
    elif opt.key_index.rank.ptr is not None:
        rank = head_of(opt.key_index.rank, b, h, opt.keys + 1)
        some = first < last
        count = tl.load(rank + last, mask=some, other=0) - tl.load(rank + first, mask=some, other=0)
    else:
        count = tl.maximum(last - first, 0)
    return count


@triton.jit
def first_keys(b, h, i, first, last, opt):
    """Return the first visible key of each row, NOWHERE or any number ≥ last for a row without one."""
    if opt.tiles.lists.ptr is not None:
        key = tl.load(head_of(opt.tiles.rows, b, h, 2 * opt.queries) + 2 * i, mask=i < opt.queries, other=NOWHERE)
    elif opt.key_index.rank.ptr is not None:
        rank = head_of(opt.key_index.rank, b, h, opt.keys + 1)
        shown = tl.load(rank + opt.keys)
        before = tl.load(rank + first, mask=first < last, other=NOWHERE)
        keys = head_of(opt.key_index.keys, b, h, opt.keys)
        key = tl.load(keys + before, mask=before < shown, other=NOWHERE)
    else:
        key = first
    return key


@triton.jit
def block_range(first, last, b, h, i0, i, opt, n, C: tl.constexpr):
    """Return (lowest, earliest, latest, highest) of the queries i of one block, from i0 on.

    They see keys of [lowest, highest) alone, and each sees [earliest, latest), if nothing within is hidden.
    """
    if C.RAGGED:
        inside = i < opt.queries
        some = inside & (first < last)
        lowest = tl.min(tl.where(some, first, opt.keys), 0)
        highest = tl.max(tl.where(some, last, 0), 0)
        earliest = tl.max(tl.where(inside, first, 0), 0)
        latest = tl.min(tl.where(inside, last, opt.keys), 0)
    else:
        lowest, latest = visible_range(b, h, i0, opt, n)
        earliest, highest = visible_range(b, h, tl.minimum(i0 + C.BM, opt.queries) - 1, opt, n)
    return lowest, earliest, latest, highest
