"""Forward of threshold maps: o = Σ_j p_j·v_j, p = g(γ·s − τ), τ such that Σp = 1, by repeated sweeps over the keys.

F(τ) = Σ g(x − τ), x = γ·s, is convex and falls from F(max − 1) ≥ 1 to F(max) = 0. The first sweep finds the maximum
and a lower bound of τ (`tau_estimate.py`), at which F is mostly 1.00 to 1.01; a few more, mostly one, evaluate F and
its slope at the current τ; the last one weighs. A step from τ is

    far from Σp = 1     τ + F·log F / |F′|     as if F fell like an exponential, which tails of scores nearly do
    near it             the exact solution on the present support (g = t, t²), or the same step

kept inside the bracket that the evaluations so far and Newton's steps (never beyond the root) give. The last sweep
divides by the F it finds, so that the remaining error in τ does not touch Σp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, statistics, tau_estimate, tiles, visibility
from regard._backends.gpu.attention.sparse import support
from regard._backends.gpu.attention.statistics import Sums
from regard._backends.gpu.attention.tau_estimate import Bracket


@triton.jit
def excess(y, top, tau, block, C: tl.constexpr):
    """Return t = max(γ·(s − max) − τ, 0)."""
    slope = block.a * C.F.gain(block.theta)  # [M]: Triton 3.6 does not compile a product of columns beside a soft cap
    if C.PRECISION == "ieee" and tl.float32 == C.ACC and not C.NEED.top:  # 16 bits: one rounding of τ for the whole row
        t = tiles.positive_part(y * slope[:, None] - (top * slope + tau)[:, None])
    else:
        t = tiles.positive_part((y - top[:, None]) * slope[:, None] - tau[:, None])
    return t


@triton.jit
def measure_tile(state, block, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Add a tile's (Σ g, |∂F/∂τ|, support) at τ; of g = t² half of |∂F/∂τ|. 16 bits take no count of the support."""
    mass, fall, support, top, tau = state
    COUNTED: tl.constexpr = C.PRECISION != "ieee" or tl.float32 != C.ACC or C.NEED.top
    _, _, y, _, _ = key_loop.score_tile(block, start, opt, C, EDGE)
    theta = tiles.column(block.theta, opt)
    t = excess(y, top, tau, block, C)
    if C.F.order == 2:
        mass += tiles.fold(t * t, C)
        fall += tiles.fold(t, C)
    elif C.F.order == 1:
        mass += tiles.fold(t, C)
        fall += tiles.fold(tl.where(t > 0.0, 1.0, 0.0).to(C.ACC), C)
    else:
        u, d = tiles.weigh_excess(t, theta, C)
        mass += tiles.fold(u, C)
        fall += tiles.fold(d, C)
    if COUNTED and C.F.order != 1:
        support += tiles.fold(tl.where(t > 0.0, 1.0, 0.0).to(C.ACC), C)
    return mass, fall, support, top, tau


@triton.jit
def next_tau(s, mass, fall, support, exponent, C: tl.constexpr):
    """Return the bracket after one step of τ from F, |F′| and the support at the present one; g(t) = t^exponent.

    Without a count of the support (0) Newton's step on F^(1/k) is the near one, and the support is taken for twice what
    Hölder's inequality says that it is at least.
    """
    over = mass - 1.0
    low = tl.where(over >= 0.0, tl.maximum(s.low, s.tau), s.low)
    high = tl.where(over <= 0.0, tl.minimum(s.high, s.tau), s.high)
    some = (fall > 0.0) & (mass > 0.0)
    safe = tl.where(some, fall, 1.0)
    newton = s.tau + over / safe
    low = tl.where(some, tl.maximum(low, tl.minimum(newton, high)), low)
    log_mass = tl.log2(tl.where(some, mass, 1.0))
    far = s.tau + mass * (log_mass * tiles.LN2) / safe
    near, reach = newton, 0.02
    if C.F.order == 0:
        near = far
    elif C.F.order == 2:
        root = 0.25 * fall * fall - support * over
        exact = s.tau + over / (0.5 * safe + tl.sqrt(tl.maximum(root, 0.0)))
        near = tl.where(support > 0.0, exact, s.tau + tau_estimate.newton_step(mass, fall, exponent))
        reach = 0.5
    tau = tl.where(tl.abs(over) <= reach, near, far)
    tau = tl.where(some, tl.minimum(tl.maximum(tau, low), high), 0.5 * (low + high))
    left, step = tl.abs(over), tl.abs(tau - s.tau)
    least = tl.exp2(exponent * tl.log2(safe / exponent) - (exponent - 1.0) * log_mass)
    support = tl.where(support > 0.0, support, 2.0 * least)
    if C.F.order == 2:  # what keys that enter or leave the support on the way could add to F
        left = tl.where(left <= reach, support * step * step, left)
    elif C.F.order == 0:  # the same, and ten times what the step leaves where none does
        cross = tl.where(step > 0.0, support * tl.exp2(exponent * tl.log2(tl.maximum(step, 1e-30))), 0.0)
        left = tl.where(left <= 0.5, tl.maximum(2.5 * over * over, cross), left)
    return Bracket(tau, low, high, left)


@triton.jit
def solve(s, block, top, alive, i0, opt, C: tl.constexpr, LIMIT: tl.constexpr, CLOSE: tl.constexpr):
    """Find τ of every row, relative to γ·max; ends once every row is so near to Σp = 1 that the last step suffices."""
    lanes = tiles.zeros(C.BM, C.LANES, C.ACC)
    exponent = tau_estimate.find_exponent(block, C)
    finest = 2e-7 if tl.float32 == C.ACC else 1e-15  # the resolution of `excess` in τ
    if C.PRECISION == "ieee" and tl.float32 == C.ACC and not C.NEED.top:
        finest = 2e-7 * (1.0 + tl.abs(top * (block.a * C.F.gain(block.theta))))
    busy = tl.max(tl.where(alive, 1, 0), 0)
    turns = 0
    while (busy > 0) & (turns < LIMIT):
        mass, fall, support, _, _ = key_loop.sweep((lanes, lanes, lanes, top, s.tau), block, i0, opt, measure_tile, C)
        mass, fall, support = tl.sum(mass, 1), tl.sum(fall, 1), tl.sum(support, 1)
        if C.F.order == 0:
            fall = fall / C.F.gain(block.theta)
        elif C.F.order == 2:
            fall = 2.0 * fall
        s = next_tau(s, mass, fall, support, exponent, C)
        busy = tl.max(tl.where(alive & (s.left > CLOSE) & (s.high - s.low > finest), 1, 0), 0)
        turns += 1
    return s.tau


@triton.jit
def weigh_tile(state, block, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Score a tile and weigh it."""
    _, r = state
    _, _, y, visible, j = key_loop.score_tile(block, start, opt, C, EDGE)
    return weigh_scores(state, excess(y, r.top, r.shift, block, C), y, visible, j, block, start, opt, C, EDGE)


@triton.jit
def weigh_scores(state, t, y, visible, j, block, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Add a tile to o, Σp, Σg′ and the statistics: `r.shift` holds τ, `r.z` Σp, `r.v` Σg′ over all keys."""
    acc, r = state
    NEED: tl.constexpr = C.NEED
    theta = tiles.column(block.theta, opt)
    u, d = tiles.weigh_excess(t, theta, C)
    if C.F.order == 0:
        u = tl.where(t == t, u, t)  # a power of what is above 0 hides NaN
    sum_u = tiles.fold(u, C)
    if C.F.order == 2 and not NEED.slope:  # a slope in proportion to t
        sum_d = tiles.fold(t, C) * C.F.slope(tl.full([1, 1], 1.0, C.ACC), theta)
    else:
        d = tl.where(t > 0.0, d, t)
        sum_d = tiles.fold(d, C)
    z, sv = r.z + sum_u, r.v + sum_d
    ties, su, sl, sq, ss, sx, se, far = r.ties, r.u, r.log_u, r.square, r.slope, r.cross, r.lse, r.distance
    if NEED.shares:
        below = y != r.top[:, None]
        under = tl.where(below, u, 0.0)
        su += tiles.fold(under, C)
        ties += tiles.fold(tl.where(visible, tl.where(below, 0.0, 1.0), 0.0).to(C.ACC), C)
        if NEED.log_u:
            sl += tiles.fold(under * statistics.log2_or_0(under), C)
        if NEED.square:
            sq += tiles.fold(under * under, C)
        if NEED.slope:
            lower = tl.where(below, d, 0.0)
            ss += tiles.fold(lower, C)
            sx += tiles.fold(lower * lower, C)
        if NEED.lse:
            gap = (y - r.top[:, None]) * (block.a * tiles.LOG2E)[:, None]
            se += tiles.fold(tl.where(visible, tl.where(below, tl.exp2(gap), 0.0), 0.0), C)
        if NEED.distance:
            far += statistics.sum_distances(u, block.position, j, start, sum_u, C.CAUSAL and not EDGE, C)
    support, n, first, first_y, pivot, mean, m2 = statistics.update_counts(r, y, visible, j, r.top, t, C)
    r = Sums(r.top, r.shift, z, ties, su, sv, sl, sq, ss, sx, se, far, support, n, first, first_y, pivot, mean, m2)
    values = key_loop.load_values(block, start, visible, opt, C, EDGE)
    if opt.seed is not None:
        u = tl.where(tiles.dropout_mask(block.b, block.h, block.i[:, None], j, opt, block.seed), u, 0.0)
    acc = tiles.dot(u.to(values.dtype), values, acc, C)
    return acc, r


@triton.jit
def forward_threshold(
    q, k, v, k_blocks, v_blocks, o, shifts, sums, stats, failed, opt,
    C: tl.constexpr, LIMIT: tl.constexpr, CLOSE: tl.constexpr, RESIDENT: tl.constexpr,
):  # fmt: skip
    """Compute one block of queries per program, unless the candidate lists (`sparse/`) have computed it.

    RESIDENT: one tile holds all keys, and its scores stay in registers while τ is solved.
    """
    if opt.holes is not None:
        if tl.load(opt.holes) == 0:
            return
    if failed is not None:
        if support.are_queries_solved(failed, opt, C.BM, support.FLAG_ROWS):
            return
    block, i0 = key_loop.load_query_block(q, k, v, k_blocks, v_blocks, opt, C)
    zero = tiles.full(C.BM, 0.0, C.ACC)
    if RESIDENT:
        _, _, y, visible, j = key_loop.score_tile(block, 0, opt, C, True)
        n = tl.sum(tl.where(visible, 1.0, 0.0).to(C.ACC), 1)
        top = tl.max(y, 1)
        x = (y - top[:, None]) * (block.a * C.F.gain(block.theta))[:, None]
    else:
        s, top, n = tau_estimate.survey(block, i0, opt, C)
    inside = block.i < opt.queries
    visible_keys = n
    if not C.NEED.count:
        visible_keys = visibility.count_keys(block.b, block.h, block.i, block.first, block.last, opt).to(C.ACC)
    empty = visible_keys == 0.0
    if RESIDENT:
        tau = tau_estimate.solve_resident(x, block, opt, C, LIMIT)
    else:
        tau = solve(s, block, top, inside & (empty == 0), i0, opt, C, LIMIT, CLOSE)
    r = statistics.empty_sums(tau, C)
    r = Sums(top, tau, r.z, r.ties, r.u, r.v, r.log_u, r.square, r.slope, r.cross, r.lse, r.distance, r.support, r.n,
             r.first, r.first_y, r.pivot, r.mean, r.m2)  # fmt: skip
    acc = tiles.zeros(C.BM, C.BE, C.ACC)
    if RESIDENT:
        t = tiles.positive_part(x - tau[:, None])
        acc, r = weigh_scores((acc, r), t, y, visible, j, block, 0, opt, C, True)
    else:
        acc, r = key_loop.sweep((acc, r), block, i0, opt, weigh_tile, C)
    r = statistics.sum_lanes(r)
    inverse = tl.where(empty, 0.0, 1.0 / tl.where(r.z == 0.0, 1.0, r.z))
    out = tl.where(empty[:, None], 0.0, acc * (inverse * tiles.number(opt.keep_scale, C.ACC))[:, None])
    tiles.store_block(o, block.b, block.h, i0, opt.queries, out, C.BM, C.E, C.BE)
    row = (tiles.wide(block.b) * opt.heads + block.h) * opt.queries + block.i
    a, theta = block.a, block.theta
    tl.store(shifts + row, tl.where(empty, 0.0, top * (a * C.F.gain(theta)) + tau), mask=inside)
    tl.store(sums + row, tl.where(empty, 0.0, r.v), mask=inside)
    if C.NEED.top:
        t1 = tiles.positive_part(-tau)
        u1, d1 = C.F.weigh(t1, theta), C.F.slope(t1, theta)
        first_u = zero
        if C.NEED.first:
            y = r.first_y if C.NEED.track_first else statistics.first_scores(block, opt, C)
            first_u = C.F.weigh(tiles.positive_part((y - top) * (a * C.F.gain(theta)) - tau), theta)
        lse = top * a + tl.log(r.ties + r.lse)
        statistics.finish(
            stats, row, inside, empty, r, a, visible_keys, u1, u1, d1, d1 * d1, first_u, zero, inverse, lse, opt, C
        )
