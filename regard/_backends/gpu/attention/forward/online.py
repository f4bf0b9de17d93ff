"""Forward of ratio and pointwise maps in one sweep over the keys: o = Σ_j u_j·v_j / Z, with statistics.

The running maximum `top` rescales what was summed before it rose. Maps u = exp(s − m) run in the shift of their own
maximum, and a sink or softmax1's extra key joins at the end; the other ratio maps run in the shift they ask for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, statistics, tiles, visibility
from regard._backends.gpu.attention.statistics import Sums
from regard._backends.gpu.attention.tiles import HIDDEN, LN2, LOG2E
from regard._backends.gpu.rows.terms import expm1_terms


@triton.jit
def find_shift(top, b2, F: tl.constexpr):
    """Return log2 of the unit that u is measured in, from the maximum so far."""
    if F.family == "pointwise" or F.shift == "none":
        shift = top * 0.0
    elif F.exponential or F.shift == "max":
        shift = tl.maximum(top * b2, HIDDEN)
    else:
        shift = tl.maximum(top * b2, 0.0)
    return shift


@triton.jit
def initial_shift(F: tl.constexpr, C: tl.constexpr):
    """Return the shift before any key."""
    if F.family == "ratio" and (F.exponential or F.shift == "max"):
        shift = tiles.full(C.BM, HIDDEN, C.ACC)
    else:
        shift = tiles.full(C.BM, 0.0, C.ACC)
    return shift


@triton.jit
def terms(y, a, b2, shift, theta, F: tl.constexpr):
    """Return (u, v, log2 e) of scores y in a shift; shapes broadcast."""
    power = y * b2 - shift
    if F.family == "pointwise":
        u = F.weigh(y * a, theta)
        v = u
    else:
        e, c = expm1_terms(tl.exp2(power), y * a, tiles.unshift(shift), F.differs and y.dtype == tl.float32)
        u = F.numerator(e, y * a, c)
        v = F.denominator(e, y * a, c)
    return u, v, power


@triton.jit
def slopes(y, a, b2, shift, u, theta, F: tl.constexpr):
    """Return (u′, v′·u), which gradient_gain sums."""
    if F.family == "pointwise":
        d = F.slope(y * a, theta)
        x = d * 0.0
    else:
        e = tl.exp2(y * b2 - shift)
        c = tiles.unshift(shift)
        d = F.numerator_slope(e, y * a, c)
        x = F.denominator_slope(e, y * a, c) * u
    return d, x


@triton.jit
def rescale_sums(r, top, shift, a, b2, theta, F: tl.constexpr):
    """Rescale the sums so far to a new shift; where the maximum rose, the old one joins the sums below it."""
    fade = tl.exp2(r.shift - shift)[:, None]
    offset = (r.shift - shift)[:, None]
    u, v, _ = terms(r.top, a, b2, shift, theta, F)
    d, x = slopes(r.top, a, b2, shift, u, theta, F)
    folded = tl.where((top > r.top)[:, None], r.ties, 0.0)  # the old maximum joins the sums
    some = folded > 0.0
    u, v, d, x = u[:, None], v[:, None], d[:, None], x[:, None]
    fall = tl.exp2((r.top - top) * b2)[:, None]
    return Sums(
        top, shift, r.z * fade, r.ties - folded,
        r.u * fade + tl.where(some, folded * u, 0.0),
        r.v * fade + tl.where(some, folded * v, 0.0),
        fade * (r.log_u + offset * r.u) + tl.where(some, folded * u * statistics.log2_or_0(u), 0.0),
        r.square * fade * fade + tl.where(some, folded * statistics.square(u, F), 0.0),
        r.slope * fade + tl.where(some, folded * d, 0.0),
        r.cross * fade * fade + tl.where(some, folded * x, 0.0),
        r.lse * fall + tl.where(some, folded * fall, 0.0),
        r.distance * fade, r.support, r.n, r.first, r.first_y, r.pivot, r.mean, r.m2,
    )  # fmt: skip


@triton.jit
def rescale_exponential_sums(r, top, shift):
    """Rescale the sums of u = exp(s − top), which include the maximum: its log is 0, its u is 1."""
    fade = tl.exp2(r.shift - shift)[:, None]
    return Sums(
        top, shift, r.z * fade, r.ties, r.u, r.v, (r.log_u + (r.shift - shift)[:, None] * r.z) * fade,
        r.square * (fade * fade), r.slope, r.cross, r.lse, r.distance * fade, r.support, r.n, r.first, r.first_y,
        r.pivot, r.mean, r.m2,
    )  # fmt: skip


@triton.jit
def rescale(acc, r, top, a, b2, theta, C: tl.constexpr):
    """Return o so far and its sums in the shift of the maximum `top`."""
    F: tl.constexpr = C.F
    shift = find_shift(top, b2, F)
    if F.family == "ratio":
        acc = acc * tl.exp2(r.shift - shift)[:, None]
    if F.exponential and not C.PACKED:
        r = rescale_exponential_sums(r, top, shift)
    else:
        r = rescale_sums(r, top, shift, a, b2, theta, F)
    return acc, r


@triton.jit
def add_tile(state, block, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Add one key block: scores, weights, their sums, and o += u·v.

    With few queries (C.PACKED) the sums are rescaled only in blocks where a maximum rose, which is seldom after the
    first ones, and exclude the maximum for every map: u = exp(s − top) adds its own at the end.
    """
    acc, r = state
    F: tl.constexpr = C.F
    NEED: tl.constexpr = C.NEED
    EXCLUDES: tl.constexpr = C.PACKED or not F.exponential
    a, theta, i = block.a, block.theta, block.i
    b2 = a * LOG2E
    _, _, y, visible, j = key_loop.score_tile(block, start, opt, C, EDGE)  # [M, N]
    if NEED.top or (F.family == "ratio" and F.shift != "none"):
        top = tl.maximum(r.top, tiles.fold_max(y, C))
        if C.PACKED:
            if tl.max(tl.where(top > r.top, 1, 0), 0) > 0:
                acc, r = rescale(acc, r, top, a, b2, theta, C)
        else:
            acc, r = rescale(acc, r, top, a, b2, theta, C)
    top, shift = r.top, r.shift
    u, v, power = terms(y, a[:, None], b2[:, None], shift[:, None], tiles.column(theta, opt), F)
    u = tl.where(visible, u, 0.0)
    sum_u = tiles.fold(u, C)
    z, ties, su, sv, sl, sq, ss, sx = r.z, r.ties, r.u, r.v, r.log_u, r.square, r.slope, r.cross
    se, far = r.lse, r.distance
    if F.family == "ratio" and not F.exponential:
        v = tl.where(visible, v, 0.0)
        z += tiles.fold(v, C)
    elif not (C.PACKED and F.exponential and NEED.shares):  # there Z is Σ' u and the maximum's ties
        z += sum_u
    if NEED.shares:
        under = u
        if EXCLUDES:
            below = y != top[:, None]
            under = tl.where(below, u, 0.0)
            su += tiles.fold(under, C)
            ties += tiles.fold(tl.where(visible, tl.where(below, 0.0, 1.0), 0.0).to(C.ACC), C)
            if NEED.slope:
                d, cross = slopes(y, a[:, None], b2[:, None], shift[:, None], u, tiles.column(theta, opt), F)
                sv += tiles.fold(tl.where(below, v, 0.0), C)
                ss += tiles.fold(tl.where(visible, tl.where(below, d, 0.0), 0.0), C)
                sx += tiles.fold(tl.where(visible, tl.where(below, cross, 0.0), 0.0), C)
            if NEED.lse:
                se += tiles.fold(
                    tl.where(visible, tl.where(below, tl.exp2((y - top[:, None]) * b2[:, None]), 0.0), 0.0), C
                )
        if NEED.log_u:
            log_u = tl.where(visible, power, 0.0) if F.exponential else statistics.log2_or_0(under)
            sl += tiles.fold(under * log_u, C)
        if NEED.square:
            sq += tiles.fold(statistics.square(under, F), C)
        if NEED.distance:
            far += statistics.sum_distances(u, block.position, j, start, sum_u, C.CAUSAL and not EDGE, C)
    weighs = statistics.find_support(u, y, a, visible, C)
    support, n, first, first_y, pivot, mean, m2 = statistics.update_counts(r, y, visible, j, top, weighs, C)
    r = Sums(top, shift, z, ties, su, sv, sl, sq, ss, sx, se, far, support, n, first, first_y, pivot, mean, m2)
    values = key_loop.load_values(block, start, visible, opt, C, EDGE)
    if opt.seed is not None:
        u = tl.where(tiles.dropout_mask(block.b, block.h, i[:, None], j, opt, block.seed), u, 0.0)
    if (F.shift == "none") and (values.dtype == tl.float16):  # u may exceed what float16 holds
        acc = tl.dot(u, values.to(tl.float32), acc, input_precision="tf32x3", out_dtype=C.ACC)
    else:
        acc = tiles.dot(u.to(values.dtype), values, acc, C)
    return acc, r


@triton.jit
def below_max_tile(state, block, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Add one key block to the sums of u = exp(s − top) below the maximum, once top is known."""
    su, sl, sq, ties, top = state
    _, _, y, visible, _ = key_loop.score_tile(block, start, opt, C, EDGE)
    su, sl, sq, ties = sum_below_max(su, sl, sq, ties, y != top[:, None], top, y, visible, block, C)
    return su, sl, sq, ties, top


@triton.jit
def sum_below_max(su, sl, sq, ties, below, top, y, visible, block, C: tl.constexpr):
    """Add Σ' u, Σ' u·log2 u, Σ' u² and the ties of a tile."""
    power = (y - top[:, None]) * (block.a * LOG2E)[:, None]
    u = tl.where(visible, tl.where(below, tl.exp2(power), 0.0), 0.0)
    su += tiles.fold(u, C)
    sl += tiles.fold(tl.where(visible, u * power, 0.0), C)
    sq += tiles.fold(u * u, C)
    ties += tiles.fold(tl.where(visible, tl.where(below, 0.0, 1.0), 0.0).to(C.ACC), C)
    return su, sl, sq, ties


@triton.jit
def exclude_max(r, block, i0, inside, opt, C: tl.constexpr):
    """Take the maximum out of the sums of u = exp(s − top): all minus 1, unless that leaves too few digits.

    Then one more sweep, without v, sums the keys below the maximum: nearly one-hot rows pay for their own precision.
    """
    su, sl, sq = r.z - 1.0, r.log_u, statistics.at_least_0(r.square - 1.0)
    ties = su * 0.0 + 1.0
    if C.NEED.shares:
        close = su < 0.0156 + 6e-4 * tl.abs(r.shift)  # the shift's own rounding counts too
        if tl.max(tl.where(close & inside & (r.top > HIDDEN), 1, 0), 0) > 0:
            zero = tiles.zeros(C.BM, C.LANES, C.ACC)
            su2, sl2, sq2, ties2, _ = key_loop.sweep((zero, zero, zero, zero, r.top), block, i0, opt, below_max_tile, C)
            su, sl, sq, ties = tl.sum(su2, 1), tl.sum(sl2, 1), tl.sum(sq2, 1), tl.sum(ties2, 1)
    return Sums(
        r.top, r.shift, r.z, ties, su, su, sl, sq, su, sq, r.lse, r.distance, r.support, r.n, r.first, r.first_y,
        r.pivot, r.mean, r.m2,
    )  # fmt: skip


@triton.jit
def forward_online(q, k, v, k_blocks, v_blocks, o, shifts, sums, stats, opt, C: tl.constexpr):
    """Compute one block of queries per program."""
    if opt.holes is not None:
        if tl.load(opt.holes) == 0:
            return
    forward_block(tl.program_id(0), q, k, v, k_blocks, v_blocks, o, shifts, sums, stats, opt, C)


@triton.jit
def forward_block(index, q, k, v, k_blocks, v_blocks, o, shifts, sums, stats, opt, C: tl.constexpr, rows=None):
    """Compute one block of queries; `rows` as in `statistics.finish`."""
    F: tl.constexpr = C.F
    block, i0 = key_loop.load_query_block_at(index, q, k, v, k_blocks, v_blocks, opt, C)
    acc = tiles.zeros(C.BM, C.BE, C.ACC)
    acc, r = key_loop.sweep((acc, statistics.empty_sums(initial_shift(F, C), C)), block, i0, opt, add_tile, C)
    finish_block(acc, statistics.sum_lanes(r), block, i0, o, shifts, sums, stats, opt, C, rows)


@triton.jit
def finish_block(acc, r, block, i0, o, shifts, sums, stats, opt, C: tl.constexpr, rows=None):
    """Store o, the row state and the statistics of a block of queries, from its sums over all keys."""
    F: tl.constexpr = C.F
    inside = block.i < opt.queries
    visible_keys = count_visible(r, block, opt, C)
    empty = visible_keys == 0.0
    shift, rest, inverse, z = join_sink(r, block, inside, opt, C)
    inverse = tl.where(empty, 0.0, inverse)
    out = tl.where(empty[:, None], 0.0, acc * (inverse * tiles.number(opt.keep_scale, C.ACC))[:, None])
    tiles.store_block(o, block.b, block.h, i0, opt.queries, out, C.BM, C.E, C.BE)
    row = (tiles.wide(block.b) * opt.heads + block.h) * opt.queries + block.i
    natural = shift * LN2
    tl.store(shifts + row, tl.where(empty, 0.0, natural), mask=inside)
    # backward takes m in natural units back to log2: Z follows that rounding
    tl.store(sums + row, tl.where(empty, 0.0, z * tl.exp2(shift - natural * LOG2E)), mask=inside)
    if C.NEED.top:
        a, b2 = block.a, block.a * LOG2E
        if F.exponential and not C.PACKED:
            one = tiles.full(C.BM, 1.0, C.ACC)
            u1, v1, d1, x1 = one, one, one, one
            r = exclude_max(r, block, i0, inside, opt, C)
        else:
            u1, v1, _ = terms(r.top, a, b2, r.shift, block.theta, F)
            d1, x1 = slopes(r.top, a, b2, r.shift, u1, block.theta, F)
        if F.exponential:
            lse = natural + tl.log(z)
        else:
            lse = r.top * a + tl.log(r.ties + r.lse)
        first_u = r.z * 0.0
        if C.NEED.first:
            y = r.first_y if C.NEED.track_first else statistics.first_scores(block, opt, C)
            first_u, _, _ = terms(y, a, b2, r.shift, block.theta, F)
        statistics.finish(
            stats, row, inside, empty, r, a, visible_keys, u1, v1, d1, x1, first_u, rest, inverse, lse, opt, C, rows
        )


@triton.jit
def count_visible(r, block, opt, C: tl.constexpr):
    """Return the number of visible keys of each row; 0 or 1 if nobody asks for more."""
    if C.NEED.count:
        n = r.n
    elif (opt.bias.ptr is not None) or (opt.relative.ptr is not None):
        n = tl.where(r.z == 0.0, 0.0, 1.0).to(C.ACC)
    else:
        n = visibility.count_keys(block.b, block.h, block.i, block.first, block.last, opt).to(C.ACC)
    return n


@triton.jit
def join_sink(r, block, inside, opt, C: tl.constexpr):
    """Add the sink and softmax1's extra key: (shift, their share of Z, 1/Z in the loop's shift, Z)."""
    F: tl.constexpr = C.F
    shift = r.shift
    if F.family == "pointwise":
        z = r.z * 0.0
        inverse = z + 1.0
        rest = z
    else:
        if F.exponential:
            if F.shift == "max0":
                shift = tl.maximum(shift, 0.0)
            if opt.sink.ptr is not None:
                sink = tiles.load_rows(opt.sink, block.b, block.h, block.i, inside, 0.0).to(C.ACC) * LOG2E
                shift = tl.maximum(shift, sink)
        fade = tl.exp2(r.shift - shift)
        extra = F.rest(tiles.unshift(shift))
        if opt.sink.ptr is not None:
            extra += tl.exp2(sink - shift)
        z = r.z * fade + extra
        some = tl.where(z == 0.0, 1.0, z)
        inverse = tl.where(z == 0.0, 0.0, fade / some)
        rest = extra / some  # a share: extra / fade overflows where the sink is far above
    return shift, rest, inverse, z
