"""What the row kernels share: a program's tile of scores, the exponential, and the meeting of a row's programs.

A tile is [ROWS, COLUMNS] of one or more whole rows, or [1, COLUMNS] of a row that `parts` programs share. STAGE says
how far a program goes with a shared row:

    "whole"     the tile holds whole rows
    "meet"      publish the part's sums, wait for the row's other parts, finish: the tile is read once
    "publish"   publish and leave …
    "finish"    … and in a second launch read the tile again and finish
"""

import triton
import triton.language as tl


@triton.jit
def place(parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's rows [ROWS, 1] and columns [1, COLUMNS], its first row (int64) and its part of it."""
    program = tl.program_id(0)
    part = program % parts
    row = (program // parts).to(tl.int64) * ROWS
    rows = row + tl.arange(0, ROWS)[:, None]
    columns = part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return rows, columns, row, part


@triton.jit
def prefetch(pointer, R, N, parts, COLUMNS: tl.constexpr, AHEAD: tl.constexpr):
    """Call the tile of the program that comes AHEAD programs later into the L2 cache, a line of 128 bytes at a time."""
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
def load(pointer, rows, columns, R, N, other, ACC: tl.constexpr):
    inside = (rows < R) & (columns < N)
    return tl.load(pointer + rows * N + columns, mask=inside, other=other).to(ACC)


@triton.jit
def store(pointer, x, rows, columns, R, N):
    inside = (rows < R) & (columns < N)
    tl.store(pointer + rows * N + columns, x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def store_state(state, shift, z, rows, part, R):
    """Frame and z of these rows, told by the first of a row's parts."""
    mine = rows < tl.where(part == 0, R, 0)
    tl.store(state + rows, shift, mask=mine)
    tl.store(state + R + rows, z, mask=mine)


@triton.jit
def reciprocal(z):
    """1/z, and 0 for 0: a row without weight."""
    return tl.where(z == 0.0, 0.0, 1.0 / tl.where(z == 0.0, 1.0, z))


@triton.jit
def load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK: tl.constexpr, ACC: tl.constexpr):
    """Scores [ROWS, COLUMNS]; −inf where hidden, masked or outside."""
    x = load(s, rows, columns, R, N, float("-inf"), ACC)
    if HAS_MASK:
        x = tl.where(visible(mask, rows, columns, R, N, mask_row, mask_column), x, float("-inf"))
    return x


@triton.jit
def visible(mask, rows, columns, R, N, mask_row, mask_column):
    inside = (rows < R) & (columns < N)
    offsets = rows * mask_row + columns.to(tl.int64) * mask_column
    return tl.load(mask + offsets, mask=inside, other=0) != 0


@triton.jit
def number(x, ACC: tl.constexpr):
    """A scalar argument in the accumulator's type, [1, 1]."""
    return (tl.zeros([1, 1], tl.float64) + x).to(ACC)


@triton.jit
def parameter(theta, theta_rows, rows, R, HAS_THETA: tl.constexpr, ACC: tl.constexpr):
    """The normaliser's parameter: one per row [ROWS, 1], or one for all [1, 1]."""
    if HAS_THETA:
        return tl.load(theta_rows + rows, mask=rows < R, other=1.5).to(ACC)
    else:
        return number(theta, ACC)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def highest(s):
    """The row's maximum [ROWS, 1], NaN if one is there: then, as for +inf, the whole row becomes NaN."""
    return tl.reduce(s, 1, larger, keep_dims=True)


@triton.jit
def finite(m):
    """m where it is a number to subtract, else 0 (an empty row, or one that becomes NaN)."""
    return tl.where(tl.abs(m) < float("inf"), m, 0.0)


@triton.jit
def exponential(x, offset, scale, HALF: tl.constexpr):
    """exp((x − shift)·scale), at most 1.

    Of 16-bit scores (HALF) by one multiply-add, whose error is the same factor for the whole row. Beside a shift of
    2²⁰/scale and more they lie so far apart that all but the maximum weigh 0, whatever the scale: it is then made
    small enough for the exponent.
    """
    if x.dtype == tl.float64:
        e = tl.exp((x - offset) * scale)
    else:
        factor = tl.minimum(scale * 1.4426950408889634, 3e38)
        if HALF:
            root = 1024.0 * tl.rsqrt(tl.maximum(tl.abs(offset), 1e-30))
            factor = tl.minimum(factor, root * root)
            e = tl.exp2(tl.fma(x, factor, -offset * factor))
        else:
            e = tl.exp2((x - offset) * factor)
    return e


@triton.jit
def meet(counter, target):
    """Wait until the row's programs have come `target` times in all; what they stored before is then visible.

    The hardware starts programs in order, so a program waits only for those that run or start next.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    while arrived < target:
        arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def publish(partial, x, which, part, parts):
    """Store one sum [1, 1] of this part among the row's partial sums [COUNT, parts]."""
    tl.store(partial + which * parts + part, tl.sum(x))


@triton.jit
def gather(partial, which, parts, other, PARTS: tl.constexpr):
    """One sum of each part of the row, [PARTS], past the L1 cache, which other programs' stores do not reach."""
    part = tl.arange(0, PARTS)
    return tl.load(partial + which * parts + part, mask=part < parts, other=other, cache_modifier=".cg")
