"""Row kernel for long 16-bit rows of the ratio family: every thread has its own shift, and they are merged once.

    z = Σ_thread z_thread·e^(m_thread − m),   m = max m_thread

No warp waits for another between its first load and its last exponential, so the loads of one overlap the arithmetic
of the others. The weights are then computed with the row's shift.
"""

import triton
import triton.language as tl

from regard._backends.gpu.rows import tiles
from regard._backends.gpu.rows.ratio import finish_sum, merge_parts
from regard._backends.gpu.rows.terms import compute_terms, shift_from_max


@triton.jit
def rescale_factor(before, after, scale, F: tl.constexpr):
    """Factor of a sum when the maximum of its scores rises from `before` to `after`; 0 if there were no scores."""
    if F.shift == "none":
        factor = scale * 0.0 + 1.0
    else:
        shift = shift_from_max(tiles.finite_or_zero(before), F)
        factor = tl.exp((shift - shift_from_max(tiles.finite_or_zero(after), F)) * scale)
        factor = tl.where(before == float("-inf"), 0.0, factor)
    return factor


@triton.jit
def forward_thread_shift(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    PIECES: tl.constexpr, TRAITS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """Weights of one row or part per program, loaded in PIECES at once and summed in the order in which they arrive."""
    ACC: tl.constexpr = state.dtype.element_ty
    RAW: tl.constexpr = s.dtype.element_ty
    HALF: tl.constexpr = s.dtype.element_ty.primitive_bitwidth == 16
    PIECE: tl.constexpr = COLUMNS // PIECES
    rows, columns, row, part = tiles.locate_tile(parts, 1, PIECE)
    tile = tiles.Tile(s, mask, rows, columns + part * (COLUMNS - PIECE), R, N, mask_row, mask_column)
    scale = tiles.scalar_tile(scale, ACC)
    pieces = ()
    for i in tl.static_range(PIECES):
        pieces += (tiles.load_scores(tiles.move_tile(tile, tile.columns + i * PIECE), HAS_MASK, RAW),)
    own = tl.full([1, LANES], float("-inf"), ACC)
    sums = tl.zeros([1, LANES], ACC)
    for i in tl.static_range(PIECES):
        x = tl.reshape(pieces[i].to(ACC), [PIECE // (LANES * VECTOR), LANES, VECTOR])
        before = own
        own = tiles.nan_maximum(own, tl.reduce(tl.reduce(x, 2, tiles.nan_maximum), 0, tiles.nan_maximum)[None, :])
        shift = shift_from_max(tiles.finite_or_zero(own), F)
        _u, v = compute_terms(x, shift[:, :, None], scale[:, :, None], 0.0, F, TRAITS, HALF, False)
        if i > 0:
            sums = sums * rescale_factor(before, own, scale, F)
        sums += tl.sum(tl.sum(v, 2), 0)[None, :]
    own = tl.where(sums >= 0.0, own, float("nan"))  # so that every thread sums before it waits for the others
    top = tl.reduce(own, 1, tiles.nan_maximum, keep_dims=True)  # [1, 1]
    shift = shift_from_max(tiles.finite_or_zero(top), F)
    z = tl.sum(sums * rescale_factor(own, top, scale, F), 1, keep_dims=True)
    top, z, shift, _factor = merge_parts(
        top, z, shift, scale, partial, counters, row, part, parts, F, PARTS, STAGE, ACC
    )
    if STAGE != "publish":
        z, inverse = finish_sum(top, z, shift, scale, F, HALF)
        tl.debug_barrier()
        for i in tl.static_range(PIECES):
            piece = tiles.move_tile(tile, tile.columns + i * PIECE)
            x = tiles.load_scores(piece, HAS_MASK, RAW).to(ACC)
            u, _v = compute_terms(x, shift, scale, 0.0, F, TRAITS, HALF, False)
            tiles.store(p, u * inverse, piece)
        tiles.store_state(state, shift, z, rows, part, R)
