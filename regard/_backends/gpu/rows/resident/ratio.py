"""One long row of the ratio family, wherever its scores lie: its sum, its end and its weights.

    added         what a thread sums, measured from its own maximum
    met           the sums of all threads in the row's shift, and whether the row is odd: z says too little there
    ended         z and what weights are told from
    carefully     u and v of an odd row, with the digits of scores and not of powers of two

Gluon, Hopper.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from regard._backends.gpu.rows.exact import exponentials, halves, reciprocal, silent
from regard._backends.gpu.rows.fast_exact import CROWD, FAR, LN2_REST, apart, frame_of, term, weight
from regard._backends.gpu.rows.long import fall_of
from regard._backends.gpu.rows.online import ending
from regard._backends.gpu.rows.resident.buffers import by_lane
from regard._backends.gpu.rows.terms import shift_of, suited, terms
from regard._backends.gpu.rows.tiles import finite, larger


class Met(NamedTuple):
    """A row after its scores were summed."""

    top: Any
    shift: Any
    pace: Any
    z: Any
    gap: Any  # float32 softmax: between the shift of z and the shift
    odd: Any


class Told(NamedTuple):
    """What a row's weights are told from."""

    shift: Any
    pace: Any
    inverse: Any
    rest: Any
    scale: Any


@gluon.jit
def wide(x):
    """A number per thread, [LANES], against a tile [K, LANES, VECTOR]."""
    return gl.expand_dims(gl.expand_dims(x, 0), 2)


@gluon.jit
def summed(x, own, scale, C: gl.constexpr):
    """Σv of a chunk in each thread's own shift, [LANES]."""
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    offset = shift_of(finite(own), F)
    if C.QUICK:
        z = gl.sum(gl.sum(term(x, frame_of(wide(offset), scale), C.SCALED), 2).to(gl.float64), 0)
        z = gl.where(gl.abs(frame_of(offset, scale).m) < FAR, z, float("nan"))
    else:
        pace = suited(own, scale.to(gl.float32) + finite(own) * 0.0, TRAITS)
        _u, v = terms(x, wide(offset), wide(pace), 0.0, F, TRAITS, C.VECTOR == 8, False)
        z = gl.sum(gl.sum(v, 2), 0)
    return z


@gluon.jit
def fall(before, own, scale, C: gl.constexpr):
    """What terms are multiplied by as the maximum rises from `before` to `own`."""
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    if C.QUICK:
        m = frame_of(shift_of(finite(before), F), scale).m - frame_of(shift_of(finite(own), F), scale).m
        power = ((gl.maximum(m, -127.0).to(gl.int32) + 127) << 23).to(gl.float32, bitcast=True)
        factor = gl.where(before == float("-inf"), 0.0, power).to(gl.float64) * (1.0 - m.to(gl.float64) * LN2_REST)
    else:
        factor = fall_of(before, own, scale.to(gl.float32), F, TRAITS)
    return factor


@gluon.jit
def added(x, own, sums, scale, FIRST: gl.constexpr, C: gl.constexpr):
    """(own, sums) of every thread, its maximum and its sum measured from it, with some scores more."""
    x = by_lane(x, C)
    most = gl.reduce(gl.reduce(x, 2, larger), 0, larger)  # [LANES]
    if FIRST:
        own = most
        sums = summed(x, own, scale, C)
    else:
        before = own
        own = larger(own, most)
        sums = sums * fall(before, own, scale, C) + summed(x, own, scale, C)
    return own, sums


@gluon.jit
def met(own, sums, scale, C: gl.constexpr):
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    top = gl.reduce(own, 0, larger)
    z = gl.sum(sums * fall(own, top, scale, C), 0)
    offset = shift_of(finite(top), F)
    pace = suited(top, scale.to(gl.float32), TRAITS)
    gap = z
    odd = offset * scale.to(gl.float32) < 0.25
    if C.QUICK:
        gap = apart(frame_of(offset, scale), offset, scale)
        z = z * gap
        odd = ((z >= CROWD) & (top < float("inf"))) == 0
    return Met(top, offset, pace, z, gap, odd)


@gluon.jit
def ended(row, scale, C: gl.constexpr):
    """(z, what the weights are told from) of a row that is not odd."""
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    if C.QUICK:
        z = row.z + F.rest(silent(row.shift, scale, F))
        inverse, rest = halves(reciprocal(z) * row.gap)
        rest = rest / inverse
    else:
        z, inverse = ending(row.top, row.z, row.shift, scale.to(gl.float32), F, TRAITS, C.VECTOR == 8)
        rest = inverse
    return z, Told(row.shift, row.pace, inverse, rest, scale)


@gluon.jit
def weights(x, told, C: gl.constexpr):
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    if C.QUICK:
        shift = frame_of(told.shift, told.scale)
        p = weight(x, shift, told.inverse.to(gl.int32, bitcast=True), told.rest, C.SCALED)
    else:
        u, _v = terms(x, told.shift, told.pace, 0.0, F, TRAITS, C.VECTOR == 8, False)
        p = u * told.inverse
    return p


@gluon.jit
def nothing_yet(row, C: gl.constexpr):
    """The sum of an odd row before its first chunk."""
    z = row.shift.to(gl.float64) * 0.0
    if not C.QUICK:
        z = z.to(gl.float32)
    return z


@gluon.jit
def carefully(x, row, scale, C: gl.constexpr):
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    if C.QUICK:
        u = exponentials(x, row.shift, scale, False)
        v = u
    else:
        u, v = terms(x, row.shift, row.pace, 0.0, F, TRAITS, C.VECTOR == 8, True)
    return u, v


@gluon.jit
def ended_carefully(row, z, scale, C: gl.constexpr):
    """(z, 1/z) of an odd row, summed `carefully`."""
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    if C.QUICK:
        z = gl.where(row.top == float("-inf"), 0.0, z + F.rest(silent(row.shift, scale, F)))
        inverse = gl.where(row.top < float("inf"), reciprocal(z), float("nan"))
        z = gl.where(row.top < float("inf"), z, float("nan"))
    else:
        z, inverse = ending(row.top, z, row.shift, scale.to(gl.float32), F, TRAITS, C.VECTOR == 8)
    return z, inverse
