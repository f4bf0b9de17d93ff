"""Resident kernel of the ratio family: a row is read once and summed in shared memory (`buffers.py`).

    sum      a, b, the held chunks, c, d      each thread adds its scores, relative to its own maximum
    store    c, d, the held chunks, a, b      and the next row is copied into each buffer that is free

An imprecise row is read again from the cache and computed by slower formulas. Gluon, Hopper.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from regard._backends.gpu.rows.exact import exp_float64, exp_minus_shift_float64, reciprocal_float64, split_float64
from regard._backends.gpu.rows.fast_exact import (
    LN2_REST,
    MAX_SHIFT,
    MIN_TERMS,
    exp_term,
    exp_weight,
    exponent_shift,
    shift_gap,
)
from regard._backends.gpu.rows.ratio import finish_sum
from regard._backends.gpu.rows.resident.buffers import (
    allocate_buffers,
    by_lane,
    columns_from,
    copy_row,
    reduce_row,
    stagger,
    store_columns,
    store_row,
)
from regard._backends.gpu.rows.terms import compute_terms, shift_from_max
from regard._backends.gpu.rows.tiles import finite_or_zero, nan_maximum


class RowSum(NamedTuple):
    """A row after its scores were summed."""

    top: Any
    shift: Any
    z: Any
    gap: Any  # FAST: the factor from the integer shift to the shift
    imprecise: Any


class WeightFactors(NamedTuple):
    """What a row's weights are computed from."""

    shift: Any
    inverse: Any
    rest: Any  # FAST: the relative rounding error of `inverse`
    scale: Any


@gluon.jit
def per_lane(x):
    """Broadcasts a number per thread [LANES] to a tile [K, LANES, VECTOR]."""
    return gl.expand_dims(gl.expand_dims(x, 0), 2)


@gluon.jit
def sum_by_lane(x, own, scale, C: gl.constexpr):
    """Σv of a chunk in each thread's own shift, [LANES]."""
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    shift = shift_from_max(finite_or_zero(own), F)
    if C.FAST:
        z = gl.sum(gl.sum(exp_term(x, exponent_shift(per_lane(shift), scale), C.SCALED), 2).to(gl.float64), 0)
        z = gl.where(gl.abs(exponent_shift(shift, scale).m) < MAX_SHIFT, z, float("nan"))
    else:
        scales = scale.to(gl.float32) + finite_or_zero(own) * 0.0
        _u, v = compute_terms(x, per_lane(shift), per_lane(scales), 0.0, F, TRAITS, C.VECTOR == 8, False)
        z = gl.sum(gl.sum(v, 2), 0)
    return z


@gluon.jit
def rescale_factor(before, after, scale, C: gl.constexpr):
    """Factor of a sum as the maximum of its scores rises from `before` to `after`; 0 if there were no scores."""
    F: gl.constexpr = C.F
    shift = shift_from_max(finite_or_zero(before), F)
    after = shift_from_max(finite_or_zero(after), F)
    if C.FAST:
        m = exponent_shift(shift, scale).m - exponent_shift(after, scale).m
        power = ((gl.maximum(m, -127.0).to(gl.int32) + 127) << 23).to(gl.float32, bitcast=True)
        factor = gl.where(before == float("-inf"), 0.0, power).to(gl.float64) * (1.0 - m.to(gl.float64) * LN2_REST)
    elif F.shift == "none":
        factor = scale.to(gl.float32) * 0.0 + 1.0
    else:
        factor = gl.where(before == float("-inf"), 0.0, gl.exp((shift - after) * scale.to(gl.float32)))
    return factor


@gluon.jit
def accumulate(x, state, scale, FIRST: gl.constexpr, C: gl.constexpr):
    """(maximum, sum) of every thread, [LANES], after some scores more, for `reduce_row`."""
    own, sums = state
    x = by_lane(x, C)
    most = gl.reduce(gl.reduce(x, 2, nan_maximum), 0, nan_maximum)  # [LANES]
    if FIRST:
        own = most
        sums = sum_by_lane(x, own, scale, C)
    else:
        before = own
        own = nan_maximum(own, most)
        sums = sums * rescale_factor(before, own, scale, C) + sum_by_lane(x, own, scale, C)
    return own, sums


@gluon.jit
def merge_threads(own, sums, scale, C: gl.constexpr):
    """Merges the maxima and sums of all threads."""
    F: gl.constexpr = C.F
    top = gl.reduce(own, 0, nan_maximum)
    z = gl.sum(sums * rescale_factor(own, top, scale, C), 0)
    shift = shift_from_max(finite_or_zero(top), F)
    gap = z
    imprecise = shift * scale.to(gl.float32) < 0.25
    if C.FAST:
        gap = shift_gap(exponent_shift(shift, scale), shift, scale)
        z = z * gap
        imprecise = ((z >= MIN_TERMS) & (top < float("inf"))) == 0
    return RowSum(top, shift, z, gap, imprecise)


@gluon.jit
def finish_row(row, scale, C: gl.constexpr):
    """(Z, the factors of the weights) of a row that is not imprecise."""
    F: gl.constexpr = C.F
    if C.FAST:
        z = row.z + F.rest(exp_minus_shift_float64(row.shift, scale, F))
        inverse, rest = split_float64(reciprocal_float64(z) * row.gap)
        rest = rest / inverse
    else:
        z, inverse = finish_sum(row.top, row.z, row.shift, scale.to(gl.float32), F, C.VECTOR == 8)
        rest = inverse
    return z, WeightFactors(row.shift, inverse, rest, scale)


@gluon.jit
def weigh(x, factors, C: gl.constexpr):
    """Weights of some scores."""
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    if C.FAST:
        power = exponent_shift(factors.shift, factors.scale)
        p = exp_weight(x, power, factors.inverse.to(gl.int32, bitcast=True), factors.rest, C.SCALED)
    else:
        scale = factors.scale.to(gl.float32)
        u, _v = compute_terms(x, factors.shift, scale, 0.0, F, TRAITS, C.VECTOR == 8, False)
        p = u * factors.inverse
    return p


@gluon.jit
def zero_sum(row, C: gl.constexpr):
    """The sum of an imprecise row before its first chunk."""
    z = row.shift.to(gl.float64) * 0.0
    if not C.FAST:
        z = z.to(gl.float32)
    return z


@gluon.jit
def careful_terms(x, row, scale, C: gl.constexpr):
    """(u, v) of an imprecise row: float64 exponentials, or `expm1_terms`."""
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    if C.FAST:
        u = exp_float64(x, row.shift, scale)
        v = u
    else:
        u, v = compute_terms(x, row.shift, scale.to(gl.float32), 0.0, F, TRAITS, C.VECTOR == 8, True)
    return u, v


@gluon.jit
def finish_careful(row, z, scale, C: gl.constexpr):
    """(Z, 1/Z) of an imprecise row."""
    F: gl.constexpr = C.F
    if C.FAST:
        z = gl.where(row.top == float("-inf"), 0.0, z + F.rest(exp_minus_shift_float64(row.shift, scale, F)))
        inverse = gl.where(row.top < float("inf"), reciprocal_float64(z), float("nan"))
        z = gl.where(row.top < float("inf"), z, float("nan"))
    else:
        z, inverse = finish_sum(row.top, z, row.shift, scale.to(gl.float32), F, C.VECTOR == 8)
    return z, inverse


@gluon.jit
def load_again(work, row, first, C: gl.constexpr):
    """Loads scores of an imprecise row from the cache."""
    columns = columns_from(first, C.CHUNK, C)
    x = gl.load(work.s + row * work.N + columns, mask=columns < work.N, other=float("-inf"))
    return x.to(gl.float32)


@gluon.jit
def sum_again(work, row, total, scale, C: gl.constexpr):
    """z of an imprecise row."""
    z = zero_sum(total, C)
    for first in range(0, work.N, C.CHUNK):
        _u, v = careful_terms(load_again(work, row, first, C), total, scale, C)
        z += gl.sum(v, 0)
    return z


@gluon.jit
def store_again(work, row, total, inverse, scale, C: gl.constexpr):
    """Stores the weights of an imprecise row."""
    for first in range(0, work.N, C.CHUNK):
        u, _v = careful_terms(load_again(work, row, first, C), total, scale, C)
        store_columns(u * inverse, work, row, first, C)


@gluon.jit
def forward_resident_ratio(s, p, state, R, N, scale: gl.float64, theta: gl.float64, C: gl.constexpr):
    """Weights of every num_programs-th row."""
    work = allocate_buffers(s, p, R, N, C)
    stagger(C.PHASES)
    copy_row(work, gl.program_id(0), C)
    for at in range(gl.program_id(0), R, gl.num_programs(0)):
        row, after = gl.cast(at, gl.int64), at + gl.num_programs(0)
        sums, a, b = reduce_row(work, at, accumulate, (0, 0), scale, C)
        total = merge_threads(sums[0], sums[1], scale, C)
        if C.CAREFUL and total.imprecise:
            z, inverse = finish_careful(total, sum_again(work, row, total, scale, C), scale, C)
            store_again(work, row, total, inverse, scale, C)
            copy_row(work, after, C)
        else:
            z, factors = finish_row(total, scale, C)
            store_row(work, row, a, b, after, weigh, factors, C)
        gl.store(state + row, total.shift)
        gl.store(state + R + row, z.to(gl.float32))
    async_copy.wait_group(0)
