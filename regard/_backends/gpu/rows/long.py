"""Long rows of the ratio family: every thread measures its scores from their own maximum, and the row is joined once.

    z = Σ_thread z_thread·e^(m_thread − m),   m = max m_thread

So no warp waits for another between its first load and its last exponential: the loads of one hide behind the
arithmetic of the others. Threads meet once for (m, z), then the weights are told, in the row's shift.
"""

import triton
import triton.language as tl

from regard._backends.gpu.rows.online import ending, join
from regard._backends.gpu.rows.terms import shift_of, suited, terms
from regard._backends.gpu.rows.tiles import finite, larger, number, place, store, store_state, visible


@triton.jit
def load_raw(s, mask, rows, columns, R, N, mask_row, mask_column, HAS_MASK: tl.constexpr):
    """Scores as they are stored, −inf where hidden or outside."""
    x = tl.load(s + rows * N + columns, mask=(rows < R) & (columns < N), other=float("-inf"))
    if HAS_MASK:
        x = tl.where(visible(mask, rows, columns, R, N, mask_row, mask_column), x, float("-inf"))
    return x


@triton.jit
def fall_of(before, after, scale, F: tl.constexpr, TRAITS: tl.constexpr):
    """What terms are multiplied by when the maximum of their scores rises; 0 if there were none."""
    if TRAITS.proportional:
        fall = suited(after, scale, TRAITS) / suited(before, scale, TRAITS)
    elif F.shift == "none":
        fall = scale * 0.0 + 1.0
    else:
        fall = tl.exp((shift_of(finite(before), F) - shift_of(finite(after), F)) * scale)
        fall = tl.where(before == float("-inf"), 0.0, fall)
    return fall


@triton.jit
def forward_long(
    s, p, state, mask, theta_rows, partial, counters, R, N, parts, mask_row, mask_column,
    scale: tl.float64, theta: tl.float64,
    F: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    PIECES: tl.constexpr, TRAITS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_THETA: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """Called for in PIECES, all at once, and taken one after another as they come."""
    ACC: tl.constexpr = state.dtype.element_ty
    HALF: tl.constexpr = s.dtype.element_ty.primitive_bitwidth == 16
    PIECE: tl.constexpr = COLUMNS // PIECES
    rows, columns, row, part = place(parts, 1, PIECE)
    columns += part * (COLUMNS - PIECE)
    scale = number(scale, ACC)
    pieces = ()
    for i in tl.static_range(PIECES):
        pieces += (load_raw(s, mask, rows, columns + i * PIECE, R, N, mask_row, mask_column, HAS_MASK),)
    own = tl.full([1, LANES], float("-inf"), ACC)
    sums = tl.zeros([1, LANES], ACC)
    for i in tl.static_range(PIECES):
        x = tl.reshape(pieces[i].to(ACC), [PIECE // (LANES * VECTOR), LANES, VECTOR])
        before = own
        own = larger(own, tl.reduce(tl.reduce(x, 2, larger), 0, larger)[None, :])
        shift, pace = shift_of(finite(own), F), suited(own, scale, TRAITS)
        _u, v = terms(x, shift[:, :, None], pace[:, :, None], 0.0, F, TRAITS, HALF, False)
        if i > 0:
            sums = sums * fall_of(before, own, scale, F, TRAITS)
        sums += tl.sum(tl.sum(v, 2), 0)[None, :]
    own = tl.where(sums >= 0.0, own, float("nan"))  # so that every thread sums before it meets the others
    top = tl.reduce(own, 1, larger, keep_dims=True)  # [1, 1]
    shift = shift_of(finite(top), F)
    z = tl.sum(sums * fall_of(own, top, scale, F, TRAITS), 1, keep_dims=True)
    top, z, shift, _fall = join(top, z, shift, scale, partial, counters, row, part, parts, F, TRAITS, PARTS, STAGE, ACC)
    if STAGE != "publish":
        z, inverse = ending(top, z, shift, scale, F, TRAITS, HALF)
        pace = suited(top, scale, TRAITS)
        tl.debug_barrier()
        for i in tl.static_range(PIECES):
            x = load_raw(s, mask, rows, columns + i * PIECE, R, N, mask_row, mask_column, HAS_MASK).to(ACC)
            u, _v = terms(x, shift, pace, 0.0, F, TRAITS, HALF, False)
            store(p, u * inverse, rows, columns + i * PIECE, R, N)
        store_state(state, shift, z, rows, part, R)
