"""Resident backward kernel for long 16-bit rows: dp and p, or s, are read once (`buffers.py`).

    read     a, b, the held chunks, c, d      the sums that δ is made of
    store    c, d, the held chunks, a, b      ds; and the next row is copied into each buffer that is free

Both tensors have buffers of their own. Gluon, Hopper.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from regard._backends.gpu.rows.ratio import ratio_gradient, ratio_slopes
from regard._backends.gpu.rows.resident.buffers import (
    TwoBuffers,
    allocate_buffers,
    by_lane,
    copy_row,
    reduce_row,
    stagger,
    store_row,
)
from regard._backends.gpu.rows.solver import add_two
from regard._backends.gpu.rows.terms import compute_terms
from regard._backends.gpu.rows.tiles import reciprocal


class RowNumbers(NamedTuple):
    """Numbers of a row."""

    shift: Any
    inverse: Any  # 1/Z of ratios
    delta: Any
    scale: Any
    theta: Any


@gluon.jit
def sum_by_lane(pair, m, C: gl.constexpr):
    """(Σ g′, Σ g′·dp) of a threshold map, Σ p·dp twice of a ratio (times Z, from scores), of each thread: [LANES]."""
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    upstream, x = pair
    if F.family == "threshold":
        a = F.slope_of_weight(x, m.theta)
        v = a * upstream
    else:
        a = x
        if F.slope_of_weight is None:
            a, _v = compute_terms(x, m.shift, m.scale, 0.0, F, TRAITS, True, False)
        v = a * upstream
        a = v
    return gl.sum(gl.sum(by_lane(a, C), 2), 0), gl.sum(gl.sum(by_lane(v, C), 2), 0)


@gluon.jit
def accumulate(pair, state, m, FIRST: gl.constexpr, C: gl.constexpr):
    """Adds `sum_by_lane` to the threads' sums, for `reduce_row`."""
    sums = sum_by_lane(pair, m, C)
    if not FIRST:
        sums = add_two(state[0], state[1], sums[0], sums[1])
    return sums


@gluon.jit
def finish_delta(sums, m, C: gl.constexpr):
    """δ of a row from the sums of its threads."""
    F: gl.constexpr = C.F
    weight, delta = gl.reduce((sums[0], sums[1]), 0, add_two)
    if F.family == "threshold":
        delta = gl.where(m.inverse == m.inverse, delta / gl.where(weight == 0.0, 1.0, weight), m.inverse)
    elif F.slope_of_weight is None:
        delta = delta * m.inverse
    return delta


@gluon.jit
def score_gradient(pair, m, C: gl.constexpr):
    """ds of (dp, p or s)."""
    F: gl.constexpr = C.F
    upstream, x = pair
    if F.family == "threshold":
        ds = F.slope_of_weight(x, m.theta) * (upstream - m.delta) * m.scale
    else:
        a, b = ratio_slopes(x, m.shift, m.scale, m.inverse, F, True)
        ds = ratio_gradient(a, b, upstream, m.delta, True, m.scale, m.inverse, F, False)
    return ds


@gluon.jit
def backward_resident(dp, saved, ds, state, R, N, scale: gl.float64, theta: gl.float64, C: gl.constexpr):
    """ds of every num_programs-th row."""
    F: gl.constexpr = C.F
    two = TwoBuffers(allocate_buffers(dp, ds, R, N, C), allocate_buffers(saved, ds, R, N, C))
    stagger(C.PHASES)
    copy_row(two, gl.program_id(0), C)
    for at in range(gl.program_id(0), R, gl.num_programs(0)):
        row, after = gl.cast(at, gl.int64), at + gl.num_programs(0)
        shift, inverse = gl.load(state + row), gl.load(state + R + row)
        if F.family == "ratio":
            inverse = reciprocal(inverse)
        scale_here, theta_here = scale.to(gl.float32), theta.to(gl.float32)
        m = RowNumbers(shift, inverse, inverse, scale_here, theta_here)
        sums, a, b = reduce_row(two, at, accumulate, (0, 0), m, C)
        m = RowNumbers(shift, inverse, finish_delta(sums, m, C), scale_here, theta_here)
        store_row(two, row, a, b, after, score_gradient, m, C)
    async_copy.wait_group(0)
