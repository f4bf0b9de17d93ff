"""The level of a row, below which no key can have weight: what `candidates.py` lists keys by.

Forward's comes from some of the row's keys: a guess at their own τ (`survey.py`), F there, one step of Newton's.
F^(1/k) is convex, so the step never passes their τ, which lies below that of all keys. Backward's is forward's τ.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, tau_estimate, tiles
from regard._backends.gpu.attention.tiles import LOG2E


@triton.jit
def first_level(q, k, level, opt, C: tl.constexpr, FULL: tl.constexpr, STRIDE: tl.constexpr):
    """level_i ≤ τ_i, in units of y: −∞ takes every key, +∞ says that the lists would be too long."""
    scene, i0 = key_loop.load_query_block(q, k, k, k, k, opt, C)
    _, inner, outer = key_loop.find_key_range(i0, opt, tiles.key_count(opt, scene.b), C.BM, C.BN)
    many = (outer - inner) // C.BN
    found = tiles.full(C.BM, float("inf"), C.ACC)
    if scene.highest - scene.lowest <= 4 * (FULL - 8):
        found = -found
    if many >= 2:
        one = tiles.full(C.BM, 0.0, C.ACC)
        two = one
        for part in range(4):
            tile = key_loop.score_tile(scene, inner + many * (2 * part + 1) // 8 * C.BN, opt, C, False)
            one += tl.sum(tile[2], 1)
            two += tl.sum(tile[2] * tile[2], 1)
        mean = one / (4 * C.BN)
        sigma = tl.sqrt(tl.maximum(two / (4 * C.BN) - mean * mean, 1e-12))
        gain = scene.a * C.F.gain(scene.theta)
        power = tau_estimate.find_exponent(scene, C)
        n = (tl.cdiv(many, STRIDE) * C.BN).to(C.ACC)  # of which F is taken
        root = tau_estimate.tail(n, sigma * gain, power)
        # how far τ strays: by its own few keys, about 0.31/k, and by what the sample tells of mean and deviation
        stray = tl.sqrt(0.1 / (power * power) + (1.0 + 0.5 * root * root) / (4 * C.BN))
        # lower than it is likely to be: a guess with one or two keys above it would fill the lists
        place = mean + (root - (1.0 + 1.0 / power) * stray) * sigma
        # were the scores normal, would the lists overflow? Would they be nearly full, though not at τ itself?
        every = (scene.last - scene.first).to(C.ACC)
        most = tau_estimate.tail(every / (4.0 * FULL), sigma, sigma * 0.0)
        many_keys = mean + tau_estimate.tail(every / (2.5 * FULL), sigma, sigma * 0.0) * sigma
        turns = 0
        crowded = 1
        while (crowded > 0) & (turns < 2):
            at = place
            mass = tiles.zeros(C.BM, C.LANES, C.ACC)
            fall = mass
            for start in tl.range(inner, outer, C.BN * STRIDE):
                tile = key_loop.score_tile(scene, start, opt, C, False)
                more_mass, more_fall = tau_estimate.measure(tile[2], at * gain, scene, C)
                mass += more_mass
                fall += more_fall
            mass, fall = tl.sum(mass, 1), tl.sum(fall, 1)
            place = tl.where(mass > 0.0, at + step(mass, fall, power) / gain, at - 2.0 * sigma) - 1e-3 / gain
            crowded = tl.max(tl.where((place < many_keys) & (root > most), 1, 0), 0)
            turns += 1
        found = tl.where(place < mean + most * sigma, found, place)
    row = (tiles.wide(scene.b) * opt.heads + scene.h) * opt.queries + scene.i
    tl.store(level + row, found, mask=scene.i < opt.queries)


@triton.jit
def step(mass, fall, power):
    """Newton's step on the norm F^(1/k), convex as F is: never beyond the root, from either side."""
    some = (mass > 0.0) & (fall > 0.0)
    root = tl.exp2(tl.log2(tl.where(some, mass, 1.0)) / power)
    return tl.where(some, power * mass * (1.0 - 1.0 / root) / tl.where(some, fall, 1.0), 0.0)


@triton.jit
def last_level(shifts, sums, level, rows, opt, C: tl.constexpr, SIZE: tl.constexpr):
    """τ of every row in units of y; +∞ where no key has weight."""
    row = tiles.wide(tl.program_id(0)) * SIZE + tl.arange(0, SIZE)
    there = row < rows
    i = (row % opt.queries).to(tl.int32)
    h = (row // opt.queries % opt.heads).to(tl.int32)
    b = (row // opt.queries // opt.heads).to(tl.int32)
    a = tiles.row_factor(b, h, i, opt, C.ACC, C.LINEAR)
    tau = tl.load(shifts + row, mask=there, other=0.0) / (a * C.F.gain(tiles.number(opt.theta, C.ACC)))
    alive = tl.load(sums + row, mask=there, other=0.0) != 0.0
    tl.store(level + row, tl.where(alive, tau, float("inf")), mask=there)


@triton.jit
def steepness(slope, rows, opt, C: tl.constexpr, SIZE: tl.constexpr):
    """a·log2 e of every row."""
    row = tiles.wide(tl.program_id(0)) * SIZE + tl.arange(0, SIZE)
    i = (row % opt.queries).to(tl.int32)
    h = (row // opt.queries % opt.heads).to(tl.int32)
    b = tl.minimum(row, rows - 1) // opt.queries // opt.heads
    a = tiles.row_factor(b.to(tl.int32), h, i, opt, C.ACC, C.LINEAR)
    tl.store(slope + row, a * LOG2E, mask=row < rows)
