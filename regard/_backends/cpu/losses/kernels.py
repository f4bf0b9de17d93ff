"""Losses of rows, Ω*(s) − s_y, and their gradients (p − e_y)·dl: templates for `jit.compile.kernel`.

The row state is (max, τ, rest) for threshold normalisers, p = value(max(gain·(s − max) − τ − rest, 0)), and
(max, 1/Z, 0) for softmax. With t the argument of `value` and α = 1 + gain,

    Ω*(s) − max = (Σ value(t)·t − 1)/α + (1 + τ + rest)/gain        log Z for softmax
"""

from __future__ import annotations

import math

import numpy as np

from regard._backends.cpu.jit.compile import prim, real, tile
from regard._backends.cpu.rows.row_io import CHUNK, INF, NAN, fill, load, read
from regard._backends.cpu.threshold_solver import pack_above, solve_row


def loss_of_target(potential, top, s, y, ignore, has_target):
    """Ω* − s_y from Ω* − max; 0 where y is `ignore`, NaN where it is no column. Without a target Ω*."""
    value = potential + np.float64(top)
    if has_target:
        value = np.float64(NAN)
        if y == ignore:
            value = np.float64(0)
        elif 0 <= y < s.size:
            value = potential + (np.float64(top) - np.float64(s[y]))
    return value


def forward_threshold(s, target, loss, state, parameter, ignore, has_target, mask, scratch, first, last):
    n = s.shape[1]
    x, y = scratch[0, :n], scratch[1]
    gain = tile.gain(parameter)
    for i in range(first, last):
        top = load(s[i], x, mask, False)
        tau, rest, potential = real(NAN), real(NAN), np.float64(NAN)
        if prim.abs(top) < INF:
            tau, rest, _, _ = solve_row(x, top, gain, y, parameter, gain)
            size = pack_above(x, top, tau / gain, y)
            excess = np.float64(0)
            for start in range(0, size, CHUNK):
                part, chunk = 0.0, y[start : min(start + CHUNK, size)]
                for j in range(chunk.size):
                    t = prim.maximum(chunk[j] * gain - tau - rest, 0.0)
                    part = prim.accumulate(part, prim.where(t > 0.0, tile.value(t, parameter) * t, 0.0))
                excess += part
            shift = np.float64(1) + np.float64(tau) + np.float64(rest)
            potential = (excess - np.float64(1)) / (np.float64(1) + np.float64(gain)) + shift / np.float64(gain)
        else:
            top = real(NAN)
        state[0, i] = top
        state[1, i] = tau
        state[2, i] = rest
        loss[i] = loss_of_target(potential, top, s[i], target[i] if has_target else 0, ignore, has_target)


def forward_softmax(s, target, loss, state, parameter, ignore, has_target, mask, scratch, first, last):
    n = s.shape[1]
    for i in range(first, last):
        x, top = read(s[i], scratch[0, :n], mask, False)
        total = np.float64(NAN)
        if prim.abs(top) < INF:
            total = np.float64(0)
            for start in range(0, n, CHUNK):
                part, chunk = 0.0, x[start : min(start + CHUNK, n)]
                for j in range(chunk.size):
                    part = prim.accumulate(part, prim.decay(chunk[j] - top))
                total += part
        else:
            top = real(NAN)
        state[0, i] = top
        state[1, i] = real(np.float64(1) / total)
        state[2, i] = 0.0
        loss[i] = loss_of_target(math.log(total), top, s[i], target[i] if has_target else 0, ignore, has_target)


def weigh_threshold(x, top, second, third, gain, parameter):
    """p from the row state of a threshold normaliser."""
    t = prim.maximum((x - top) * gain - second - third, 0.0)
    return prim.where(t > 0.0, tile.value(t, parameter), 0.0)


def weigh_softmax(x, top, second, third, gain, parameter):
    """p from softmax's row state."""
    return prim.decay(x - top) * second


def backward(dl, s, target, state, ds, parameter, gain, ignore, has_target, first, last):
    n = s.shape[1]
    for i in range(first, last):
        top, second, third, upstream, y = state[0, i], state[1, i], state[2, i], dl[i], -1
        row, x = ds[i], s[i]
        if has_target:
            y = target[i]
            if y == ignore:
                fill(row, 0.0)
                continue
            if y < 0 or y >= n:
                top = real(NAN)
        if top != top:
            fill(row, NAN)
            continue
        for j in range(n):
            row[j] = tile.weigh(x[j], top, second, third, gain, parameter) * upstream
        if has_target:
            p = tile.weigh(x[y], top, second, third, gain, parameter)
            row[y] = (p - 1.0) * upstream
