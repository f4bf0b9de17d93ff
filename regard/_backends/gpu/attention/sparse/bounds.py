"""Lower bounds of τ: keys below a row's bound cannot have weight, and `candidates.py` does not list them.

The forward's bound comes from some of the row's keys: an estimate of their own τ (`tau_estimate.py`), then a Newton
step on F^(1/k). That function is convex, so the step never passes their τ, which is below the τ of all keys. The
backward's bound is the forward's τ.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, tau_estimate, tiles
from regard._backends.gpu.attention.tiles import LOG2E


@triton.jit
def bound_from_sample(q, k, bounds, opt, C: tl.constexpr, FULL: tl.constexpr, STRIDE: tl.constexpr):
    """Stores bound_i ≤ τ_i in units of y: −∞ lists every key, +∞ means that the lists would overflow."""
    scene, i0 = key_loop.load_query_block(q, k, k, k, k, opt, C)
    _, inner, outer = key_loop.find_key_range(i0, opt, tiles.key_count(opt, scene.b), C.BM, C.BN)
    whole_blocks = (outer - inner) // C.BN
    bound = tiles.full(C.BM, float("inf"), C.ACC)
    if scene.highest - scene.lowest <= 4 * (FULL - 8):
        bound = -bound
    if whole_blocks >= 2:
        sum_y = tiles.full(C.BM, 0.0, C.ACC)
        sum_y2 = sum_y
        for sample in range(4):
            tile = key_loop.score_tile(scene, inner + whole_blocks * (2 * sample + 1) // 8 * C.BN, opt, C, False)
            sum_y += tl.sum(tile[2], 1)
            sum_y2 += tl.sum(tile[2] * tile[2], 1)
        mean = sum_y / (4 * C.BN)
        sigma = tl.sqrt(tl.maximum(sum_y2 / (4 * C.BN) - mean * mean, 1e-12))
        gain = scene.a * C.F.gain(scene.theta)
        power = tau_estimate.find_exponent(scene, C)
        n = (tl.cdiv(whole_blocks, STRIDE) * C.BN).to(C.ACC)  # keys that F is summed over
        root = tau_estimate.tail(n, sigma * gain, power)
        # τ's standard error: about 0.31/k from the few keys above it, the rest from the sample's mean and deviation
        deviation = tl.sqrt(0.1 / (power * power) + (1.0 + 0.5 * root * root) / (4 * C.BN))
        # start below the expected τ: a start with only one or two keys above it would end too low and fill the lists
        tau = mean + (root - (1.0 + 1.0 / power) * deviation) * sigma
        # where normal scores would overflow the lists, and where they would nearly fill them
        visible = (scene.last - scene.first).to(C.ACC)
        overflow = tau_estimate.tail(visible / (4.0 * FULL), sigma, sigma * 0.0)
        crowded = mean + tau_estimate.tail(visible / (2.5 * FULL), sigma, sigma * 0.0) * sigma
        steps = 0
        too_low = 1
        while (too_low > 0) & (steps < 2):
            tau_before = tau
            mass = tiles.zeros(C.BM, C.LANES, C.ACC)
            slope_sum = mass
            for start in tl.range(inner, outer, C.BN * STRIDE):
                tile = key_loop.score_tile(scene, start, opt, C, False)
                more_mass, more_slope = tau_estimate.measure(tile[2], tau_before * gain, scene, opt, C)
                mass += more_mass
                slope_sum += more_slope
            mass, slope_sum = tl.sum(mass, 1), tl.sum(slope_sum, 1)
            higher = tau_before + newton_step(mass, slope_sum, power) / gain
            tau = tl.where(mass > 0.0, higher, tau_before - 2.0 * sigma) - 1e-3 / gain
            too_low = tl.max(tl.where((tau < crowded) & (root > overflow), 1, 0), 0)
            steps += 1
        bound = tl.where(tau < mean + overflow * sigma, bound, tau)
    row = (tiles.wide(scene.b) * opt.heads + scene.h) * opt.queries + scene.i
    tl.store(bounds + row, bound, mask=scene.i < opt.queries)


@triton.jit
def newton_step(mass, slope_sum, power):
    """Newton step on the norm F^(1/k), which is convex: it never passes the root."""
    some = (mass > 0.0) & (slope_sum > 0.0)
    root = tl.exp2(tl.log2(tl.where(some, mass, 1.0)) / power)
    return tl.where(some, power * mass * (1.0 - 1.0 / root) / tl.where(some, slope_sum, 1.0), 0.0)


@triton.jit
def bound_from_tau(shifts, sums, bounds, rows, opt, C: tl.constexpr, SIZE: tl.constexpr):
    """Stores τ of every row in units of y, or +∞ where no key has weight."""
    row = tiles.wide(tl.program_id(0)) * SIZE + tl.arange(0, SIZE)
    inside = row < rows
    i = (row % opt.queries).to(tl.int32)
    h = (row // opt.queries % opt.heads).to(tl.int32)
    b = (row // opt.queries // opt.heads).to(tl.int32)
    a = tiles.row_factor(b, h, i, opt, C.ACC, C.LINEAR)
    tau = tl.load(shifts + row, mask=inside, other=0.0) / (a * C.F.gain(tiles.load_theta(b, h, i, opt, C.ACC)))
    has_weight = tl.load(sums + row, mask=inside, other=0.0) != 0.0
    tl.store(bounds + row, tl.where(has_weight, tau, float("inf")), mask=inside)


@triton.jit
def store_slopes(slopes, rows, opt, C: tl.constexpr, SIZE: tl.constexpr):
    """Stores a·log2 e of every row."""
    row = tiles.wide(tl.program_id(0)) * SIZE + tl.arange(0, SIZE)
    i = (row % opt.queries).to(tl.int32)
    h = (row // opt.queries % opt.heads).to(tl.int32)
    b = tl.minimum(row, rows - 1) // opt.queries // opt.heads
    a = tiles.row_factor(b.to(tl.int32), h, i, opt, C.ACC, C.LINEAR)
    tl.store(slopes + row, a * LOG2E, mask=row < rows)
