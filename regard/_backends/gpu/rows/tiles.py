"""Loads, stores and exponentials of a tile of rows, and the exchange of sums between the programs of a row.

A tile is [ROWS, COLUMNS] of whole rows, or [1, COLUMNS] of a row that `parts` programs share. STAGE says what a
program does with a shared row:

    "whole"     the tile holds whole rows
    "meet"      publish the part's sums, wait for the row's other parts, finish: the tile is read once
    "publish"   publish the part's sums and end
    "finish"    in a second launch, read the tile again and finish
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Tile(NamedTuple):
    """The scores of one program: rows and columns of s [R, N], and the mask's strides."""

    s: Any
    mask: Any
    rows: Any  # [ROWS, 1]
    columns: Any  # [1, COLUMNS]
    R: Any
    N: Any
    mask_row: Any
    mask_column: Any


@triton.jit
def move_tile(tile, columns):
    """Returns the tile of the same rows at other columns."""
    return Tile(tile.s, tile.mask, tile.rows, columns, tile.R, tile.N, tile.mask_row, tile.mask_column)


@triton.jit
def locate_tile(parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns this program's rows [ROWS, 1] and columns [1, COLUMNS], its first row (int64) and its part of it."""
    program = tl.program_id(0)
    part = program % parts
    row = (program // parts).to(tl.int64) * ROWS
    rows = row + tl.arange(0, ROWS)[:, None]
    columns = part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return rows, columns, row, part


@triton.jit
def prefetch_tile(pointer, R, N, parts, COLUMNS: tl.constexpr, AHEAD: tl.constexpr):
    """Prefetches the tile of the program AHEAD programs later into the L2 cache, in lines of 128 bytes."""
    LINE: tl.constexpr = 1024 // pointer.dtype.element_ty.primitive_bitwidth
    program = tl.program_id(0) + AHEAD
    first = (program % parts) * COLUMNS + tl.arange(0, COLUMNS // LINE) * LINE
    row = (program // parts).to(tl.int64)
    inside = (first < N) & (row < R)
    address = tl.where(inside, (pointer + row * N + first).to(tl.int64), pointer.to(tl.int64))
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load(pointer, tile, other, ACC: tl.constexpr):
    """Loads a tile of any tensor [R, N]; `other` outside."""
    inside = (tile.rows < tile.R) & (tile.columns < tile.N)
    return tl.load(pointer + tile.rows * tile.N + tile.columns, mask=inside, other=other).to(ACC)


@triton.jit
def store(pointer, x, tile):
    """Stores a tile into any tensor [R, N]."""
    inside = (tile.rows < tile.R) & (tile.columns < tile.N)
    tl.store(pointer + tile.rows * tile.N + tile.columns, x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def store_state(state, shift, z, rows, part, R):
    """Stores the row state, shift and z, from the first part of each row."""
    mine = rows < tl.where(part == 0, R, 0)
    tl.store(state + rows, shift, mask=mine)
    tl.store(state + R + rows, z, mask=mine)


@triton.jit
def reciprocal(z):
    """1/z, and 0 for 0: a row without weight."""
    return tl.where(z == 0.0, 0.0, 1.0 / tl.where(z == 0.0, 1.0, z))


@triton.jit
def load_scores(tile, HAS_MASK: tl.constexpr, ACC: tl.constexpr):
    """Loads scores [ROWS, COLUMNS]; −inf where masked or outside."""
    x = load(tile.s, tile, float("-inf"), ACC)
    if HAS_MASK:
        x = tl.where(load_visible(tile), x, float("-inf"))
    return x


@triton.jit
def load_visible(tile):
    """Loads the mask of a tile: True where a score is visible."""
    inside = (tile.rows < tile.R) & (tile.columns < tile.N)
    offsets = tile.rows * tile.mask_row + tile.columns.to(tl.int64) * tile.mask_column
    return tl.load(tile.mask + offsets, mask=inside, other=0) != 0


@triton.jit
def scalar_tile(x, ACC: tl.constexpr):
    """Converts a scalar argument to the accumulator's dtype, [1, 1]."""
    return (tl.zeros([1, 1], tl.float64) + x).to(ACC)


@triton.jit
def load_theta(theta, theta_rows, rows, R, HAS_THETA: tl.constexpr, ACC: tl.constexpr):
    """Loads the normaliser's parameter: one per row [ROWS, 1], or one for all [1, 1]."""
    if HAS_THETA:
        return tl.load(theta_rows + rows, mask=rows < R, other=1.5).to(ACC)
    else:
        return scalar_tile(theta, ACC)


@triton.jit
def per_row(x):
    """Broadcasts a number per row [ROWS] to a tile [ROWS, K, LANES]."""
    return x[:, None, None]


@triton.jit
def nan_maximum(a, b):
    """The larger of two numbers; NaN if one is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_maximum(s):
    """The row's maximum [ROWS, 1], NaN if one is there: then, as for +inf, the whole row becomes NaN."""
    return tl.reduce(s, 1, nan_maximum, keep_dims=True)


@triton.jit
def finite_or_zero(m):
    """m if it is finite, else 0 (an empty row, or one that becomes NaN)."""
    return tl.where(tl.abs(m) < float("inf"), m, 0.0)


@triton.jit
def shifted_exp(x, shift, scale, HALF: tl.constexpr):
    """exp((x − shift)·scale), at most 1.

    16-bit scores (HALF) take one multiply-add, whose error is the same factor for the whole row. Where |shift|·scale
    exceeds 2²⁰ they lie so far apart that only the maximum has weight, so the factor is limited to 2²⁰/|shift|.
    """
    if x.dtype == tl.float64:
        e = tl.exp((x - shift) * scale)
    else:
        factor = tl.minimum(scale * 1.4426950408889634, 3e38)
        if HALF:
            root = 1024.0 * tl.rsqrt(tl.maximum(tl.abs(shift), 1e-30))
            factor = tl.minimum(factor, root * root)
            e = tl.exp2(tl.fma(x, factor, -shift * factor))
        else:
            e = tl.exp2((x - shift) * factor)
    return e


@triton.jit
def wait_for_parts(counter, target):
    """Waits until the row's programs have arrived `target` times in all; what they stored before is then visible.

    The hardware starts programs in order, so a program waits only for those that run or start next.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    while arrived < target:
        arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def publish_sum(partial, x, which, part, parts):
    """Stores one sum [1, 1] of this part among the row's partial sums [COUNT, parts]."""
    tl.store(partial + which * parts + part, tl.sum(x))


@triton.jit
def share_sums(sums, partial, counters, row, part, parts, STAGE: tl.constexpr):
    """Publishes a part's sums and waits for the row's other parts, as STAGE says; returns where `gather_sums` reads."""
    COUNT: tl.constexpr = len(sums)
    partial += row * COUNT * parts
    if STAGE != "finish":
        for which in tl.static_range(COUNT):
            publish_sum(partial, sums[which], which, part, parts)
    if STAGE == "meet":
        wait_for_parts(counters + row, parts)
    return partial


@triton.jit
def gather_sums(partial, which, parts, other, PARTS: tl.constexpr):
    """Loads one sum of each part of the row, [PARTS], past the L1 cache, which other programs' stores do not reach."""
    part = tl.arange(0, PARTS)
    return tl.load(partial + which * parts + part, mask=part < parts, other=other, cache_modifier=".cg")
