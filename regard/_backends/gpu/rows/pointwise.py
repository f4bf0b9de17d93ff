"""Long rows of the pointwise family, written as they are read: nothing is held, nothing waits for a sum.

A row that holds NaN or +inf becomes NaN as a whole. That is known when all of it has been read, and such a row is
written a second time.
"""

import triton
import triton.language as tl

from regard._backends.gpu.rows.online import join
from regard._backends.gpu.rows.terms import terms
from regard._backends.gpu.rows.tiles import highest, larger, load_scores, number, parameter, store, store_state


@triton.jit
def forward_pointwise(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, TRAITS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, STEP: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """One row, or COLUMNS of it where several programs share it, STEP at a time; COLUMNS is a multiple of STEP."""
    ACC: tl.constexpr = state.dtype.element_ty
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts).to(tl.int64)
    rows = row + tl.arange(0, 1)[:, None]
    begin = part * COLUMNS
    end = tl.minimum(begin + COLUMNS, N)
    scale = number(scale, ACC)
    theta = parameter(theta, theta_rows, rows, R, HAS_THETA, ACC)
    none = number(0.0, ACC)
    tops = tl.full([1, STEP], float("-inf"), ACC)
    if STAGE != "finish":
        for first in range(begin, end, STEP):
            columns = first + tl.arange(0, STEP)[None, :]
            x = load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, ACC)
            tops = larger(tops, x)
            u, _v = terms(x, none, scale, theta, F, TRAITS, False, False)
            store(p, u, rows, columns, R, N)
    top, _z, _shift, _fall = join(
        highest(tops), none, none, scale, partial, counters, row, part, parts, F, TRAITS, PARTS, STAGE, ACC
    )
    if STAGE != "publish":
        bad = tl.where(top < float("inf"), 0.0, float("nan"))
        store_state(state, none, bad, rows, part, R)
        if tl.max(tl.where(top < float("inf"), 0, 1)) > 0:
            for first in range(begin, end, STEP):
                columns = first + tl.arange(0, STEP)[None, :]
                store(p, tl.zeros([1, STEP], ACC) + bad, rows, columns, R, N)
