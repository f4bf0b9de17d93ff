"""Long float32 rows of p = exp(s)/Z: what is held in `rows_exact` is computed twice here, STEP columns at a time."""

import triton
import triton.language as tl

from regard.kernels.rows_exact import exponentials, join, reciprocal, silent
from regard.kernels.rows_online import shift_of
from regard.kernels.rows_tiles import finite, highest, load_scores, place, store, store_state


@triton.jit
def forward_stream(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, FAINT: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    rows, columns, row, part = place(parts, 1, COLUMNS)
    scale = tl.zeros([1], tl.float64) + scale
    x = load_scores(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK, tl.float32)
    top = tl.zeros([1], tl.float32) + tl.sum(highest(x))
    shift = shift_of(finite(top), F)
    sums = tl.zeros([1, STEP], tl.float64)
    first = part * COLUMNS
    for i in range(0, COLUMNS, STEP):
        here = first + i + tl.arange(0, STEP)[None, :]
        y = load_scores(s, mask, rows, here, R, N, mask_row, mask_column, HAS_MASK, tl.float32)
        sums += exponentials(y, shift[:, None], scale[:, None], FAINT)
    z = tl.sum(sums, 1)
    if STAGE != "whole":
        top, z, shift, fall = join(top, z, shift, scale, partial, counters, row, part, parts, F, PARTS, STAGE)
    if STAGE != "publish":
        z = tl.where(top == float("-inf"), 0.0, z + F.rest(silent(shift, scale, F)))
        inverse = tl.where(top < float("inf"), reciprocal(z), float("nan"))
        for i in range(0, COLUMNS, STEP):
            here = first + i + tl.arange(0, STEP)[None, :]
            y = load_scores(s, mask, rows, here, R, N, mask_row, mask_column, HAS_MASK, tl.float32)
            e = exponentials(y, shift[:, None], scale[:, None], FAINT)
            store(p, (e * inverse[:, None]).to(tl.float32), rows, here, R, N)
        z = tl.where(top < float("inf"), z, float("nan"))
        store_state(state, shift, z.to(tl.float32), row + tl.arange(0, 1), part, R)
