"""The tile language in numba: `abs exp exp2 log log2 maximum minimum sqrt where`, and primitives for loops.

    exp(x) = 2ⁿ·P(r),   n = round(x / ln 2),   r = x − n·ln 2        straight-line code: no branch, no call

so that LLVM turns a loop over a row into vectors. Additions keep the order in which they are written, except in
`accumulate`, which allows any order: s − m stays exact, and sums still run on sixteen lanes at once.

This module needs numba; only compiled kernels import it.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types
from numba.extending import overload
from numba.np.unsafe.ndarray import to_fixed_tuple

from regard._backends.cpu.jit.intrinsics import (  # noqa: F401
    accumulate,
    bits,
    compress,
    compress_index,
    from_bits,
    maximum,
    minimum,
    side_begin,
    side_interleave,
    side_maximum,
    side_moments,
    where,
)
from regard.statistics.definitions import Row  # noqa: F401

STRICT = {"fastmath": {"contract"}, "error_model": "numpy", "forceinline": True}

abs = abs
sqrt = math.sqrt


def index_float32(j): ...
def index_float64(j): ...


@overload(index_float32, jit_options=STRICT)
def _index_float32(j):
    return lambda j: np.int32(j)


@overload(index_float64, jit_options=STRICT)
def _index_float64(j):
    return lambda j: np.int64(j)


def column_tuple(table, column, count): ...


@overload(column_tuple, jit_options=STRICT, prefer_literal=True)
def _column_tuple(table, column, count):
    number = count.literal_value
    return lambda table, column, count: to_fixed_tuple(table[:, column], number)


def exp(x): ...
def decay(x): ...  # exp(x) for x ≤ 0
def growth(x): ...  # exp(x) − 1 for |x| ≤ ln 2 / 2, accurate near 0
def exp2(x): ...
def log(x): ...
def log2(x): ...


# exp(r) = 1 + r + C₂r² + … on |r| ≤ ln 2 / 2, minimax with error 3e-9; doubled, as the power of two is halved
E32 = tuple(np.float32(2 * c) for c in (1, 1, 0.49999994, 0.16666520, 0.041668393, 0.0083687808, 0.0013814467))
E64 = tuple(2.0 / math.factorial(k) for k in range(14))
MAGIC32, MAGIC64 = np.float32(1.5 * 2**23), 1.5 * 2**52  # adding it rounds to an integer, which its low bits then hold
LOG2E32, LOG2E64 = np.float32(1 / math.log(2)), 1 / math.log(2)
LN2_32, LN2_64 = np.float32(math.log(2)), math.log(2)
HIGH32, LOW32 = np.float32(0.693359375), np.float32(-2.12194440e-4)  # ln 2 in two parts; n·HIGH is exact
HIGH64, LOW64 = 6.93147180369123816490e-01, 1.90821492927058770002e-10
INF32, ZERO32, HALF32 = np.float32(math.inf), np.float32(0), np.float32(0.5)
SMALL32, LARGE32 = np.float32(-86.98), np.float32(88.722839)  # below: 0 (1.8e-38 is the smallest power); above: inf
SMALL64, LARGE64 = -707.7, 709.782712893384


@overload(decay, jit_options=STRICT)
def _decay(x):
    if x == types.float32:

        def body(x):
            t = x * LOG2E32 + MAGIC32
            n = t - MAGIC32
            r = (x - n * HIGH32) - n * LOW32
            half = from_bits(np.int32((bits(t) + 126) << 23))
            return where(x < SMALL32, ZERO32, _power_series32(r) * half)

        return body

    def body(x):
        t = x * LOG2E64 + MAGIC64
        n = t - MAGIC64
        r = (x - n * HIGH64) - n * LOW64
        half = from_bits((bits(t) + 1022) << 52)
        return where(x < SMALL64, 0.0, _power_series64(r) * half)

    return body


@overload(exp, jit_options=STRICT)
def _exp(x):
    infinity, large = (INF32, LARGE32) if x == types.float32 else (math.inf, LARGE64)
    return lambda x: where(x >= large, infinity, decay(x))


@overload(exp2, jit_options=STRICT)
def _exp2(x):
    if x == types.float32:

        def body(x):
            t = x + MAGIC32
            half = from_bits(np.int32((bits(t) + 126) << 23))
            y = _power_series32((x - (t - MAGIC32)) * LN2_32) * half
            return where(x >= np.float32(128), INF32, where(x < np.float32(-125.5), ZERO32, y))

        return body

    def body(x):
        t = x + MAGIC64
        half = from_bits((bits(t) + 1022) << 52)
        y = _power_series64((x - (t - MAGIC64)) * LN2_64) * half
        return where(x >= 1024.0, math.inf, where(x < -1021.5, 0.0, y))

    return body


@overload(growth, jit_options=STRICT)
def _growth(x):
    if x == types.float32:
        return lambda x: x + HALF32 * _curve32(x)
    return lambda x: x + 0.5 * _curve64(x)


def _curve32(r): ...
def _curve64(r): ...
def _power_series32(r): ...
def _power_series64(r): ...
def _log_parts32(x): ...


@overload(_curve32, jit_options=STRICT)
def _curve32_body(r):
    return lambda r: ((((E32[6] * r + E32[5]) * r + E32[4]) * r + E32[3]) * r + E32[2]) * (r * r)


@overload(_curve64, jit_options=STRICT)
def _curve64_body(r):
    def body(r):
        q = E64[13]
        for k in range(12, 1, -1):
            q = q * r + E64[k]
        return q * (r * r)

    return body


@overload(_power_series32, jit_options=STRICT)
def _power_series32_body(r):
    def body(r):
        q = _curve32(r)
        high = E32[0] + E32[1] * r
        return high + ((E32[1] * r - (high - E32[0])) + q)  # adds what rounding took from `high`

    return body


@overload(_power_series64, jit_options=STRICT)
def _power_series64_body(r):
    return lambda r: E64[0] + (E64[1] * r + _curve64(r))


# log(1 + f) = f − f²/2 + f³(…) for 1 + f between √½ and √2, minimax with relative error 6e-9
L32 = tuple(
    np.float32(c)
    for c in (0.33333331, -0.25000820, 0.20001227, -0.16623357, 0.14201757, -0.13160183, 0.12761578, -0.07634497)
)
TINY32, LIFT32, LIFTED32 = np.float32(2.0**-126), np.float32(2.0**24), np.float32(24)
ROOT_HALF_BITS = int(np.float32(math.sqrt(0.5)).view(np.int32))
ONE32, ONE_BITS = np.float32(1), int(np.float32(1).view(np.int32))


@overload(_log_parts32, jit_options=STRICT)
def _log_parts32_body(x):
    """(n, log(1 + f)) with x = 2ⁿ(1 + f)."""

    def body(x):
        small = x < TINY32
        lifted = x * LIFT32 if small else x
        n = np.int32(bits(lifted) - ROOT_HALF_BITS) >> 23
        f = from_bits(np.int32(bits(lifted) - (n << 23))) - ONE32
        p = L32[7]
        for k in range(6, -1, -1):
            p = p * f + L32[k]
        square = f * f
        return np.float32(np.int32(n)) - (LIFTED32 if small else ZERO32), f + (p * f * square - HALF32 * square)

    return body


def _log_edges(x, y): ...


@overload(_log_edges, jit_options=STRICT)
def _log_edges_body(x, y):
    def body(x, y):
        y = y if x > ZERO32 else (-INF32 if x == ZERO32 else np.float32(math.nan))
        return x if x == INF32 else y

    return body


@overload(log, jit_options=STRICT)
def _log(x):
    if x == types.float32:

        def body(x):
            n, log1p = _log_parts32(x)
            return _log_edges(x, n * HIGH32 + (n * LOW32 + log1p))

        return body
    return lambda x: math.log(x)


@overload(log2, jit_options=STRICT)
def _log2(x):
    if x == types.float32:

        def body(x):
            n, log1p = _log_parts32(x)
            return _log_edges(x, n + log1p * LOG2E32)

        return body
    return lambda x: math.log2(x)
