"""What the row kernels share: a program's tile of scores, an exact exponential, and the meeting of a row's programs.

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
def place(tickets, parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGE: tl.constexpr):
    """This program's rows [ROWS, 1] (int64), columns [1, COLUMNS] and part.

    Programs that wait for one another take a ticket: a row's parts then start in order, whatever the hardware does.
    """
    if STAGE == "meet":
        place = tl.atomic_add(tickets, 1, sem="relaxed")
    else:
        place = tl.program_id(0)
    part = place % parts
    row = (place // parts).to(tl.int64) * ROWS
    rows = row + tl.arange(0, ROWS)[:, None]
    columns = part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return rows, columns, part


@triton.jit
def load(pointer, rows, columns, R, N, other, ACC: tl.constexpr):
    inside = (rows < R) & (columns < N)
    return tl.load(pointer + rows * N + columns, mask=inside, other=other).to(ACC)


@triton.jit
def store(pointer, x, rows, columns, R, N):
    inside = (rows < R) & (columns < N)
    tl.store(pointer + rows * N + columns, x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def store_state(state, frame, z, rows, part, R):
    """Frame and z of these rows, told by the first of a row's parts."""
    mine = rows < tl.where(part == 0, R, 0)
    tl.store(state + rows, frame, mask=mine)
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
def highest(s):
    """The row's maximum [ROWS, 1]; +inf stands for NaN too: either makes the whole row NaN."""
    return tl.max(tl.where(s < float("inf"), s, float("inf")), 1, keep_dims=True)


@triton.jit
def finite(m):
    """m where it is a number to subtract, else 0 (an empty row, or one that becomes NaN)."""
    return tl.where(tl.abs(m) < float("inf"), m, 0.0)


@triton.jit
def exponential(x, EXACT: tl.constexpr):
    """e^x for x ≤ 0; with EXACT the rounding of x·log₂e is put back, so that float32 keeps its last bits."""
    if EXACT:
        x = tl.maximum(x, -1000.0)
        y = x * 1.4426950216293335
        lost = tl.fma(x, 1.4426950216293335, -y) + x * 1.9259629911266175e-8
        z = tl.exp2(y)
        return tl.fma(z, lost * 0.6931471805599453, z)
    else:
        return tl.exp(x)


@triton.jit
def meet(counter, target):
    """Wait until `target` programs of this row have come; what they stored before is then visible."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    while arrived < target:
        arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def publish(partial, x, which, row, part, parts, COUNT: tl.constexpr):
    """Store one sum of this part: partial is [R, COUNT, parts]."""
    tl.store(partial + (row * COUNT + which) * parts + part, x)


@triton.jit
def gather(partial, which, row, parts, other, COUNT: tl.constexpr, PARTS: tl.constexpr):
    """The sums of all parts of the row, [1, PARTS], past the L1 cache, which other programs' stores do not reach."""
    part = tl.arange(0, PARTS)[None, :]
    pointers = partial + (row * COUNT + which) * parts + part
    return tl.load(pointers, mask=part < parts, other=other, cache_modifier=".cg")
