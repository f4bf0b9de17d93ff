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
def first_frame(F: tl.constexpr, C: tl.constexpr):
    """The frame before any key."""
    if F.family == "ratio" and (F.exponential or F.shift == "max"):
        frame = tiles.full(C.BM, HIDDEN, C.ACC)
    else:
        frame = tiles.full(C.BM, 0.0, C.ACC)
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
def moved(r, top, frame, a, b2, theta, F: tl.constexpr):
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
def completed(r):
    """The sums that u = exp(s − top) leaves implicit: v = u′ = u, and the maximum's terms are all 1."""
    ties = tl.floor(r.z - r.u + 0.5)
    return Sums(
        r.top, r.frame, r.z, ties, r.u, r.u, r.log_u, r.square, r.u, r.square, r.lse, r.distance, r.support, r.n,
        r.first, r.first_y, r.pivot, r.mean, r.m2,
    )  # fmt: skip


@triton.jit
def tile(state, scene, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """One key block: scores, weights, their sums, and o += u·v."""
    acc, r = state
    F: tl.constexpr = C.F
    NEED: tl.constexpr = C.NEED
    a, theta, i = scene.a, scene.theta, scene.i
    b2 = a * LOG2E
    _, _, y, seen, j = tiles.look(scene, start, opt, C, EDGE)  # [M, N]
    top = r.top
    if NEED.top or (F.family == "ratio" and F.shift != "none"):
        top = tl.maximum(top, tl.max(y, 1))
    frame = frame_of(top, b2, F)
    u, v, power = terms(y, a[:, None], b2[:, None], frame[:, None], theta, F)
    u = tl.where(seen, u, 0.0)
    sum_u = tl.sum(u, 1)
    sum_v = sum_u
    if F.family == "ratio":
        acc = acc * tl.exp2(r.frame - frame)[:, None]
        if not F.exponential:
            v = tl.where(seen, v, 0.0)
            sum_v = tl.sum(v, 1)
    if NEED.shares:
        below = y != top[:, None]
        under = tl.where(below, u, 0.0)
        if F.exponential:
            r = moved_exponential(r, top, frame)
            log_u = power
        else:
            r = moved(r, top, frame, a, b2, theta, F)
            log_u = statistics.log2_or_0(under)
    ties, su, sv, sl, sq, ss, sx, se, far = r.ties, r.u, r.v, r.log_u, r.square, r.slope, r.cross, r.lse, r.distance
    z = r.z + sum_v
    if NEED.shares:
        su += tl.sum(under, 1)
        if NEED.log_u:
            sl += tl.sum(under * log_u, 1)
        if NEED.square:
            sq += tl.sum(under * under, 1)
        if not F.exponential:
            ties += tl.sum(tl.where(seen & (below == 0), 1.0, 0.0).to(C.ACC), 1)
            if NEED.slope:
                d, cross = slopes(y, a[:, None], b2[:, None], frame[:, None], u, theta, F)
                sv += tl.sum(tl.where(below, v, 0.0), 1)
                ss += tl.sum(tl.where(below & seen, d, 0.0), 1)
                sx += tl.sum(tl.where(below & seen, cross, 0.0), 1)
            if NEED.lse:
                se += tl.sum(tl.where(below & seen, tl.exp2((y - top[:, None]) * b2[:, None]), 0.0), 1)
        if NEED.distance:
            far += statistics.stretch(u, i, j, start, sum_u, C.BEHIND and not EDGE)
    else:
        z = r.z * tl.exp2(r.frame - frame) + sum_v
    support, n, first, first_y, pivot, mean, m2 = statistics.counts(r, y, seen, j, top, u, NEED)
    r = Sums(top, frame, z, ties, su, sv, sl, sq, ss, sx, se, far, support, n, first, first_y, pivot, mean, m2)
    values = tiles.values_of(scene, start, seen, opt, C, EDGE)
    if opt.seed is not None:
        u = tl.where(tiles.keeps(scene.b, scene.h, i[:, None], j, opt, scene.seed), u, 0.0)
    if (F.shift == "none") and (values.dtype == tl.float16):  # u may exceed what float16 holds
        acc = tl.dot(u, values.to(tl.float32), acc, input_precision="tf32x3", out_dtype=C.ACC)
    else:
        acc = tiles.dot(u.to(values.dtype), values, acc, C)
    return acc, r


@triton.jit
def forward_online(q, k, v, o, frames, sums, stats, opt, C: tl.constexpr):
    F: tl.constexpr = C.F
    scene, i0 = tiles.scene_of(q, k, v, opt, C)
    acc = tiles.zeros(C.BM, C.BE, C.ACC)
    acc, r = tiles.sweep((acc, statistics.nothing(first_frame(F, C), C)), scene, i0, opt, tile, C)
    inside = scene.i < opt.queries
    seen_keys = r.n if C.NEED.count else tl.maximum(scene.last - scene.first, 0).to(C.ACC)
    dead = seen_keys == 0.0
    frame, rest, inverse, z = ending(r, scene, inside, opt, C)
    inverse = tl.where(dead, 0.0, inverse)
    out = tl.where(dead[:, None], 0.0, acc * (inverse * tiles.number(opt.kept, C.ACC))[:, None])
    tiles.store_block(o, scene.b, scene.h, i0, opt.queries, out, C.BM, C.E, C.BE)
    row = (tiles.wide(scene.b) * opt.heads + scene.h) * opt.queries + scene.i
    natural = frame * LN2
    tl.store(frames + row, tl.where(dead, 0.0, natural), mask=inside)
    # backward takes m in natural units back to log2: Z follows that rounding
    tl.store(sums + row, tl.where(dead, 0.0, z * tl.exp2(frame - natural * LOG2E)), mask=inside)
    if C.NEED.top:
        a, b2 = scene.a, scene.a * LOG2E
        if F.exponential:
            one = tiles.full(C.BM, 1.0, C.ACC)
            u1, v1, d1, x1 = one, one, one, one
            r = completed(r)
            lse = frame * LN2 + tl.log(z)
        else:
            u1, v1, _ = terms(r.top, a, b2, r.frame, scene.theta, F)
            d1, x1 = slopes(r.top, a, b2, r.frame, u1, scene.theta, F)
            lse = r.top * a + tl.log(r.ties + r.lse)
        first_u = r.z * 0.0
        if C.NEED.first:
            y = r.first_y if C.NEED.track_first else statistics.first_scores(scene, opt, C)
            first_u, _, _ = terms(y, a, b2, r.frame, scene.theta, F)
        statistics.finish(stats, row, inside, dead, r, a, seen_keys, u1, v1, d1, x1, first_u, rest, inverse, lse, opt, C)


@triton.jit
def ending(r, scene, inside, opt, C: tl.constexpr):
    """(frame, rest, 1/Z, Z): the sink and the silent key join. rest and 1/Z are in the loop's frame, Z in `frame`."""
    F: tl.constexpr = C.F
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
                sink = tiles.rows_of(opt.sink, scene.b, scene.h, scene.i, inside, 0.0).to(C.ACC) * LOG2E
                frame = tl.maximum(frame, sink)
        fade = tl.exp2(r.frame - frame)
        extra = F.rest(tiles.unshift(frame))
        if opt.sink.ptr is not None:
            extra += tl.exp2(sink - frame)
        z = r.z * fade + extra
        inverse = tl.where(z == 0.0, 0.0, fade / tl.where(z == 0.0, 1.0, z))
        rest = extra / tl.where(fade > 0.0, fade, 1.0)
    return frame, rest, inverse, z
