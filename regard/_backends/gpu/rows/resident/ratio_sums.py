"""Sums and weights of one resident row of the ratio family, wherever its scores lie.

    add_scores          adds scores to each thread's sum, relative to its own shift
    merge_threads       z of the row in the row's shift, and whether z is imprecise
    finish_row          Z and the factors of the weights
    careful_terms       u and v of an imprecise row, by slower formulas

Gluon.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
from regard._backends.gpu.rows.resident.buffers import by_lane
from regard._backends.gpu.rows.terms import compute_terms, shift_from_max
from regard._backends.gpu.rows.thread_shift import rescale_factor
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
def rescale_sum(before, own, scale, C: gl.constexpr):
    """Factor of a sum as the maximum of its scores rises from `before` to `own`."""
    F: gl.constexpr = C.F
    if C.FAST:
        shift = exponent_shift(shift_from_max(finite_or_zero(before), F), scale).m
        m = shift - exponent_shift(shift_from_max(finite_or_zero(own), F), scale).m
        power = ((gl.maximum(m, -127.0).to(gl.int32) + 127) << 23).to(gl.float32, bitcast=True)
        factor = gl.where(before == float("-inf"), 0.0, power).to(gl.float64) * (1.0 - m.to(gl.float64) * LN2_REST)
    else:
        factor = rescale_factor(before, own, scale.to(gl.float32), F)
    return factor


@gluon.jit
def add_scores(x, own, sums, scale, FIRST: gl.constexpr, C: gl.constexpr):
    """(maximum, sum) of every thread, [LANES], after some scores more."""
    x = by_lane(x, C)
    most = gl.reduce(gl.reduce(x, 2, nan_maximum), 0, nan_maximum)  # [LANES]
    if FIRST:
        own = most
        sums = sum_by_lane(x, own, scale, C)
    else:
        before = own
        own = nan_maximum(own, most)
        sums = sums * rescale_sum(before, own, scale, C) + sum_by_lane(x, own, scale, C)
    return own, sums


@gluon.jit
def merge_threads(own, sums, scale, C: gl.constexpr):
    """Merges the maxima and sums of all threads."""
    F: gl.constexpr = C.F
    top = gl.reduce(own, 0, nan_maximum)
    z = gl.sum(sums * rescale_sum(own, top, scale, C), 0)
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
