"""τ with Σ value(max(y − τ, 0)) = 1 over a row of scores y: the steps of the threshold family.

From a point τ the sums over the current support give the next one. F(τ) = Σ value is convex, so Newton's step never
passes the solution from the left. For value = t² two better ones: √F is a norm, so convex too, and Newton's step on it
is twice as long where F is large; the root of the quadratic on the current support is exact once the support is, but
may pass the solution: it then comes back from the right, never behind the last Newton step (`floor`).

The solution for some of the scores is a lower bound for all. So the few maxima of groups of scores are solved first;
the many then need one or two steps more, which is what a row costs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard._backends.gpu.rows.tiles import finite, gather, larger, load_scores, meet, publish

LIMIT = tl.constexpr(40)  # steps; rows of random scores take 3 to 8
FINE = tl.constexpr(1e-5)  # coarser solutions take Newton's steps alone: a step more, but no support to count


@triton.jit
def maxima(x, GROUPS: tl.constexpr, VECTOR: tl.constexpr):
    """The largest score of each of GROUPS groups, [1, GROUPS]: of what a thread holds, so that nothing moves."""
    parts: tl.constexpr = x.shape[1] // (GROUPS * VECTOR)
    grouped = tl.reshape(x, [x.shape[0], parts, GROUPS, VECTOR])
    return tl.reduce(tl.reduce(grouped, 3, larger), 1, larger)


@triton.jit
def add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def sums_of(y, tau, theta, F: tl.constexpr):
    """value, slope and whether in the support at τ, of each score."""
    t = tl.maximum(y - tau, 0.0)
    return F.weigh(t, theta), F.slope(t, theta).to(y.dtype), (t > 0.0).to(y.dtype)


@triton.jit
def reduced(value, slope, count, TOLERANCE: tl.constexpr, F: tl.constexpr):
    """Σ value, Σ slope and the size of the support, each [1, 1], in one reduction: waiting is what it costs."""
    if F.order == 2 and TOLERANCE < FINE:
        total, slope, count = tl.reduce((value, slope, count), 1, add_three, keep_dims=True)
    else:
        total, slope = tl.reduce((value, slope), 1, add_two, keep_dims=True)
        count = total
    return total, slope, count


@triton.jit
def sums(y, tau, theta, TOLERANCE: tl.constexpr, F: tl.constexpr):
    value, slope, count = sums_of(y, tau, theta, F)
    return reduced(value, slope, count, TOLERANCE, F)


@triton.jit
def advance(tau, floor, total, slope, count, gain, TOLERANCE: tl.constexpr, F: tl.constexpr):
    """The next τ, and whether it differs enough to go on."""
    fall = slope / gain
    alive = fall > 0.0
    miss = total - 1.0
    fall = tl.where(alive, fall, 1.0)
    if F.order == 2:
        half = 0.5 * fall  # Σ t
        newton = (total - tl.sqrt(total)) / half
        move = newton
        if TOLERANCE < FINE:
            room = half * half - count * miss
            move = tl.where(room > 0.0, miss / (half + tl.sqrt(tl.maximum(room, 0.0))), newton)
    else:
        newton = miss / fall
        move = newton
    floor = tl.where(miss >= 0.0, tl.maximum(floor, tau + newton), floor)
    after = tl.maximum(tau + move, floor)
    far = (tl.abs(miss) > TOLERANCE) & (tl.abs(after - tau) > 0.5 * TOLERANCE * tl.abs(tau))
    return after, floor, (alive & far).to(tl.int32)


class Row(NamedTuple):
    """A program's scores: where they are, and y = factor·(x − top) of them where they are held.

    Where only the first half is held, `others` are the columns of the second, which is read again.
    """

    s: Any
    mask: Any
    rows: Any
    columns: Any
    R: Any
    N: Any
    mask_row: Any
    mask_column: Any
    y: Any
    others: Any


@triton.jit
def read_again(row, columns, top, factor, HAS_MASK: tl.constexpr, ACC: tl.constexpr):
    """y of these columns, from the cache."""
    tl.debug_barrier()  # or the compiler would hold on to what it read before
    x = load_scores(row.s, row.mask, row.rows, columns, row.R, row.N, row.mask_row, row.mask_column, HAS_MASK, ACC)
    return (x - finite(top)) * factor


@triton.jit
def scores_of(row, top, factor, HAS_MASK: tl.constexpr, ACC: tl.constexpr, AGAIN: tl.constexpr):
    """y [1, COLUMNS], or of the first half of them; held, or read again."""
    if AGAIN == "all":
        y = read_again(row, row.columns, top, factor, HAS_MASK, ACC)
    else:
        y = row.y
    return y


@triton.jit
def sums_over(row, top, factor, tau, theta, TOLERANCE: tl.constexpr, F: tl.constexpr, HAS_MASK: tl.constexpr,
              ACC: tl.constexpr, AGAIN: tl.constexpr):  # fmt: skip
    """`sums` of all of a program's scores."""
    value, slope, count = sums_of(scores_of(row, top, factor, HAS_MASK, ACC, AGAIN), tau, theta, F)
    if AGAIN == "half":
        more = sums_of(read_again(row, row.others, top, factor, HAS_MASK, ACC), tau, theta, F)
        value, slope, count = value + more[0], slope + more[1], count + more[2]
    return reduced(value, slope, count, TOLERANCE, F)


@triton.jit
def solve(row, top, factor, tau, theta, gain, partial, counter, part, parts, TOLERANCE: tl.constexpr, F: tl.constexpr,
          PARTS: tl.constexpr, SHARED: tl.constexpr, HAS_MASK: tl.constexpr, ACC: tl.constexpr,
          AGAIN: tl.constexpr):  # fmt: skip
    """τ with Σ value = 1, and the sums there. SHARED: over all parts of the row, which meet at every step."""
    floor = tau * 0.0 - 1.0
    total, slope, count = sums_over(row, top, factor, tau, theta, TOLERANCE, F, HAS_MASK, ACC, AGAIN)
    if SHARED:
        total, slope, count = share(total, slope, count, 0, partial, counter, part, parts, PARTS, F)
    after, floor, far = advance(tau, floor, total, slope, count, gain, TOLERANCE, F)
    step = 1
    while (tl.max(far) > 0) & (step < LIMIT):
        tau = after
        total, slope, count = sums_over(row, top, factor, tau, theta, TOLERANCE, F, HAS_MASK, ACC, AGAIN)
        if SHARED:
            total, slope, count = share(total, slope, count, step, partial, counter, part, parts, PARTS, F)
        after, floor, far = advance(tau, floor, total, slope, count, gain, TOLERANCE, F)
        step += 1
    return tau, total, slope


@triton.jit
def share(total, slope, count, step, partial, counter, part, parts, PARTS: tl.constexpr, F: tl.constexpr):
    """The three sums over all parts. Steps take turns in two buffers, so that none is overwritten while read."""
    which = 3 * (step % 2)
    publish(partial, total, which, part, parts)
    publish(partial, slope, which + 1, part, parts)
    if F.order == 2:
        publish(partial, count, which + 2, part, parts)
    meet(counter, (step + 2) * parts)
    none = total * 0.0
    total = none + tl.sum(gather(partial, which, parts, 0.0, PARTS), 0)
    slope = none + tl.sum(gather(partial, which + 1, parts, 0.0, PARTS), 0)
    count = total
    if F.order == 2:
        count = none + tl.sum(gather(partial, which + 2, parts, 0.0, PARTS), 0)
    return total, slope, count


@triton.jit
def start(few, theta, gain, factor, partial, F: tl.constexpr):
    """The maximum of a few scores [1, n], and about the τ at which they alone would sum to 1."""
    top = alone(tl.reduce(few, 1, larger, keep_dims=True))
    held = Row(0, 0, 0, 0, 0, 0, 0, 0, (few - finite(top)) * factor, 0)
    low = finite(top) * 0.0 - 1.0
    tau, _, _ = solve(
        held, top, factor, low, theta, gain, partial, partial, 0, 1, 1e-4, F, 1, False, False, few.dtype, "none"
    )
    return top, alone(tau)


@triton.jit
def alone(x):
    """[1, 1] again from a scalar, so that no tile takes over the layout of what x was reduced from."""
    return tl.zeros([1, 1], x.dtype) + tl.sum(x)
