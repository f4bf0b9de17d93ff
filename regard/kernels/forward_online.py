"""o = Σ_j u_j·v_j / Z in one pass over the keys, for the ratio and pointwise families, with statistics on the way.

The running maximum `top` rescales what was summed before it rose. u = exp(s − m) families run in the frame of their
own maximum, and a sink or softmax1's silent key joins at the end; the other ratio maps run in the frame they ask for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels import statistics, tiles
from regard.kernels.statistics import Sums
from regard.kernels.tiles import HIDDEN, LN2, LOG2E


@triton.jit
def frame_of(top, b2, F: tl.constexpr):
    """log2 of the unit that u is measured in, from the maximum so far."""
    if F.family == "pointwise" or F.shift == "none":
        frame = top * 0.0
    elif F.exponential or F.shift == "max":
        frame = tl.maximum(top * b2, HIDDEN)
    else:
        frame = tl.maximum(top * b2, 0.0)
    return frame


@triton.jit
def terms(y, a, b2, frame, theta, F: tl.constexpr):
    """(u, v, log2 e) of scores y in a frame; shapes broadcast."""
    power = y * b2 - frame
    if F.family == "pointwise":
        u = F.weigh(y * a, theta)
        v = u
    else:
        e = tl.exp2(power)
        c = tiles.unshift(frame)
        u = F.numerator(e, y * a, c)
        v = F.denominator(e, y * a, c)
    return u, v, power


@triton.jit
def slopes(y, a, b2, frame, u, theta, F: tl.constexpr):
    """(u′, v′·u), what gradient_gain sums."""
    if F.family == "pointwise":
        d = F.slope(y * a, theta)
        x = d * 0.0
    else:
        e = tl.exp2(y * b2 - frame)
        c = tiles.unshift(frame)
        d = F.numerator_slope(e, y * a, c)
        x = F.denominator_slope(e, y * a, c) * u
    return d, x


@triton.jit
def moved(r, top, frame, a, b2, theta, F: tl.constexpr, NEED: tl.constexpr):
    """The sums of the keys before, told in a new frame and under a new maximum, if it rose."""
    fade = tl.exp2(r.frame - frame)
    rise = top > r.top
    folded = tl.where(rise, r.ties, 0.0)  # the old maximum joins the sums
    u0, v0, _ = terms(r.top, a, b2, frame, theta, F)
    d0, x0 = slopes(r.top, a, b2, frame, u0, theta, F)
    log_u = fade * (r.log_u + (r.frame - frame) * r.u)
    fall = tl.exp2((r.top - top) * b2)
    some = folded > 0.0
    return Sums(
        top, frame, r.z * fade, r.ties - folded,
        r.u * fade + tl.where(some, folded * u0, 0.0),
        r.v * fade + tl.where(some, folded * v0, 0.0),
        log_u + tl.where(some, folded * u0 * statistics.log2_or_0(u0), 0.0),
        r.square * fade * fade + tl.where(some, folded * u0 * u0, 0.0),
        r.slope * fade + tl.where(some, folded * d0, 0.0),
        r.cross * fade * fade + tl.where(some, folded * x0, 0.0),
        r.lse * fall + tl.where(some, folded * fall, 0.0),
        r.distance * fade, r.support, r.n, r.first, r.first_y, r.pivot, r.mean, r.m2,
    )  # fmt: skip


@triton.jit
def moved_exponential(r, top, frame):
    """The same where u = exp(s − top): the old maximum's terms are known without asking."""
    fade = tl.exp2(r.frame - frame)
    rise = top > r.top
    return Sums(
        top, frame, r.z * fade, r.ties,
        tl.where(rise, r.z, r.u) * fade,
        r.v,
        (r.log_u + (r.frame - frame) * r.z) * fade,
        tl.where(rise, r.square + (r.z - r.u), r.square) * fade * fade,
        r.slope, r.cross, r.lse, r.distance * fade, r.support, r.n, r.first, r.first_y, r.pivot, r.mean, r.m2,
    )  # fmt: skip


@triton.jit
def tile(
    acc, r, q, k, v, b, h, i, start, lowest, highest, first, last, a, b2, theta, seed, opt,
    F: tl.constexpr, NEED: tl.constexpr, LINEAR: tl.constexpr, BEHIND: tl.constexpr, EDGE: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One key block: scores, weights, their sums, and o += u·v."""
    ACC: tl.constexpr = acc.dtype
    g = h // opt.group
    j = (start + tl.arange(0, BN))[None, :]
    keys = tiles.block_of(k, b, g, start, lowest, highest, BN, D, BD, not EDGE)
    x = tl.dot(q, tl.trans(keys), input_precision=PRECISION, out_dtype=ACC)  # [M, N]
    y, seen = tiles.scores(x, b, h, i[:, None], j, first[:, None], last[:, None], opt, LINEAR, EDGE)
    top = r.top
    if NEED.top or (F.family == "ratio" and F.shift != "none"):
        top = tl.maximum(top, tl.max(y, 1))
    frame = frame_of(top, b2, F)
    u, w, power = terms(y, a[:, None], b2[:, None], frame[:, None], theta, F)
    u = tl.where(seen, u, 0.0)
    sum_u = tl.sum(u, 1)
    if F.family == "ratio":
        acc = acc * tl.exp2(r.frame - frame)[:, None]
    if NEED.shares:
        below = y != top[:, None]
        under = tl.where(below, u, 0.0)
        if F.exponential:
            r = moved_exponential(r, top, frame)
            log_u = power
        else:
            r = moved(r, top, frame, a, b2, theta, F, NEED)
            log_u = statistics.log2_or_0(under)
    else:
        r = Sums(
            top, frame, r.z * tl.exp2(r.frame - frame), r.ties, r.u, r.v, r.log_u, r.square, r.slope, r.cross,
            r.lse, r.distance, r.support, r.n, r.first, r.first_y, r.pivot, r.mean, r.m2,
        )  # fmt: skip
    ties, su, sv, sl, sq, ss, sx, se, far = r.ties, r.u, r.v, r.log_u, r.square, r.slope, r.cross, r.lse, r.distance
    if F.exponential or F.family == "pointwise":
        z = r.z + sum_u
    else:
        w = tl.where(seen, w, 0.0)
        z = r.z + tl.sum(w, 1)
    if NEED.shares:
        su += tl.sum(under, 1)
        if NEED.log_u:
            sl += tl.sum(under * log_u, 1)
        if NEED.square:
            sq += tl.sum(under * under, 1)
        if not F.exponential:
            ties += tl.sum(tl.where(seen & (below == 0), 1.0, 0.0).to(ACC), 1)
            if NEED.slope:
                d, cross = slopes(y, a[:, None], b2[:, None], frame[:, None], u, theta, F)
                sv += tl.sum(tl.where(below, w, 0.0), 1)
                ss += tl.sum(tl.where(below & seen, d, 0.0), 1)
                sx += tl.sum(tl.where(below & seen, cross, 0.0), 1)
            if NEED.lse:
                se += tl.sum(tl.where(below & seen, tl.exp2((y - top[:, None]) * b2[:, None]), 0.0), 1)
        if NEED.distance:
            far += statistics.stretch(u, i, j, start, sum_u, BEHIND and not EDGE)
    support, n, first_j, first_y, pivot, mean, m2 = statistics.counts(r, y, seen, j, top, u, NEED)
    r = Sums(
        top, frame, z, ties, su, sv, sl, sq, ss, sx, se, far, support, n, first_j, first_y, pivot, mean, m2
    )  # fmt: skip
    values = tiles.block_of(v, b, g, start, lowest, highest, BN, E, BE, not EDGE)
    if (opt.bias.ptr is not None) or (opt.mask.ptr is not None):  # 0·NaN is NaN: blank what this tile does not see
        anyone = tl.max(seen.to(tl.int32), 0)
        values = tl.where(anyone[:, None] != 0, values, 0.0)
    if opt.seed is not None:
        u = tl.where(tiles.keeps(b, h, i[:, None], j, opt, seed), u, 0.0)
    if (F.shift == "none") and (values.dtype == tl.float16):  # u may exceed what float16 holds
        acc = tl.dot(u.to(tl.float32), values.to(tl.float32), acc, input_precision="tf32x3", out_dtype=ACC)
    else:
        acc = tl.dot(u.to(values.dtype), values, acc, input_precision=PRECISION, out_dtype=ACC)
    return acc, r


@triton.jit
def first_scores(q, k, b, h, i, first, last, opt, ACC: tl.constexpr, LINEAR: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """y of each row's first key, where an interval decides which that is: one dot product per row."""
    d = tl.arange(0, BD)
    g = h // opt.group
    base = k.ptr + tiles.wide(b) * k.stride[0] + tiles.wide(g) * k.stride[1]
    there = (first < last)[:, None] & (d[None, :] < D)
    keys = tl.load(base + tiles.wide(first)[:, None] * k.stride[2] + d[None, :] * k.stride[3], mask=there, other=0.0)
    x = tl.sum(q.to(ACC) * keys.to(ACC), 1)
    y, _ = tiles.scores(x, b, h, i, first, first, last, opt, LINEAR, False)
    return y


@triton.jit
def forward_online(
    q, k, v, o, frames, sums, stats, opt,
    F: tl.constexpr, NEED: tl.constexpr, SLOT: tl.constexpr, SPARSE: tl.constexpr, LINEAR: tl.constexpr,
    BEHIND: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(opt.queries, BM)
    pid = tl.program_id(0)
    i0 = (blocks - 1 - pid % blocks) * BM  # the longest causal rows first
    h = (pid // blocks) % opt.heads
    b = pid // blocks // opt.heads
    i = i0 + tl.arange(0, BM)
    inside = i < opt.queries
    theta = tiles.number(opt.theta, ACC)
    a = tiles.row_factor(b, h, i, opt, ACC, LINEAR)
    b2 = a * LOG2E
    seed = 0
    if opt.seed is not None:
        seed = tl.load(opt.seed)

    n = tiles.key_count(opt, b)
    first, last = tiles.interval(i, opt, n)
    lowest, highest, begin, inner, outer = tiles.key_blocks(i0, opt, n, BM, BN)
    row_q = tiles.block_of(q, b, h, i0, 0, opt.queries, BM, D, BD, False)
    r = statistics.nothing(BM, ACC, 0.0 if F.family == "pointwise" or F.shift == "none" or (F.shift == "max0" and not F.exponential) else HIDDEN)
    acc = tl.zeros([BM, BE], ACC)
    if opt.left is not None:
        for start in tl.range(begin, tl.minimum(inner, highest), BN):
            acc, r = tile(acc, r, row_q, k, v, b, h, i, start, lowest, highest, first, last, a, b2, theta, seed, opt, F, NEED, LINEAR, BEHIND, True, BN, D, E, BD, BE, PRECISION)  # fmt: skip
    for start in tl.range(inner, outer, BN):
        acc, r = tile(acc, r, row_q, k, v, b, h, i, start, lowest, highest, first, last, a, b2, theta, seed, opt, F, NEED, LINEAR, BEHIND, False, BN, D, E, BD, BE, PRECISION)  # fmt: skip
    for start in tl.range(tl.maximum(inner, outer), highest, BN):
        acc, r = tile(acc, r, row_q, k, v, b, h, i, start, lowest, highest, first, last, a, b2, theta, seed, opt, F, NEED, LINEAR, BEHIND, True, BN, D, E, BD, BE, PRECISION)  # fmt: skip

    if NEED.count:
        seen_keys = r.n
    else:
        seen_keys = tl.maximum(last - first, 0).to(ACC)
    dead = seen_keys == 0.0
    frame, rest, inverse, z = ending(r, b, h, i, inside, opt, F, ACC)
    inverse = tl.where(dead, 0.0, inverse)
    o_tile = acc * (inverse * tiles.number(opt.kept, ACC))[:, None]
    o_tile = tl.where(dead[:, None], 0.0, o_tile)
    tiles.store_block(o, b, h, i0, opt.queries, o_tile, BM, E, BE)
    row = (tiles.wide(b) * opt.heads + h) * opt.queries + i
    natural = frame * LN2
    tl.store(frames + row, tl.where(dead, 0.0, natural), mask=inside)
    # backward takes m in natural units back to log2: Z follows that rounding
    tl.store(sums + row, tl.where(dead, 0.0, z * tl.exp2(frame - natural * LOG2E)), mask=inside)
    if NEED.top:
        rows = tl.num_programs(0) // blocks * tiles.wide(opt.queries)
        if F.exponential:
            one = tl.full([BM], 1.0, ACC)
            u1, v1, d1, x1 = one, one, one, one
            r = Sums(r.top, r.frame, r.z, tl.floor(r.z - r.u + 0.5), r.u, r.u, r.log_u, r.square, r.u, r.square, r.lse, r.distance, r.support, r.n, r.first, r.first_y, r.pivot, r.mean, r.m2)  # fmt: skip
            lse = frame * LN2 + tl.log(z)
        else:
            u1, v1, _ = terms(r.top, a, b2, r.frame, theta, F)
            d1, x1 = slopes(r.top, a, b2, r.frame, u1, theta, F)
            lse = r.top * a + tl.log(r.ties + r.lse)
        first_u = r.z * 0.0
        if NEED.first:
            if NEED.track_first:
                y = r.first_y
            else:
                y = first_scores(row_q, k, b, h, i, first, last, opt, ACC, LINEAR, D, BD)
            first_u, _, _ = terms(y, a, b2, r.frame, theta, F)
        statistics.finish(stats, row, rows, inside, dead, r, a, seen_keys, u1, v1, d1, x1, first_u, rest, inverse, lse, F.family, SPARSE, SLOT, NEED)  # fmt: skip


@triton.jit
def ending(r, b, h, i, inside, opt, F: tl.constexpr, ACC: tl.constexpr):
    """(frame, rest, 1/Z, Z): the sink and the silent key join. rest and 1/Z are in the loop's frame, Z in `frame`."""
    frame = r.frame
    if F.family == "pointwise":
        z = r.z * 0.0
        inverse = z + 1.0
        rest = z
    else:
        if F.exponential:
            if F.shift == "max0":
                frame = tl.maximum(frame, 0.0)
            if opt.sink.ptr is not None:
                sink = tiles.rows_of(opt.sink, b, h, i, inside, 0.0).to(ACC) * LOG2E
                frame = tl.maximum(frame, sink)
        fade = tl.exp2(r.frame - frame)
        extra = F.rest(tiles.unshift(frame))
        if opt.sink.ptr is not None:
            extra += tl.exp2(sink - frame)
        z = r.z * fade + extra
        inverse = tl.where(z == 0.0, 0.0, fade / tl.where(z == 0.0, 1.0, z))
        rest = extra / tl.where(fade > 0.0, fade, 1.0)
    return frame, rest, inverse, z
