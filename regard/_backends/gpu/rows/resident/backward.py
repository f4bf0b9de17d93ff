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
    allocate_buffers,
    by_lane,
    copy_chunk,
    copy_quarter,
    load_chunk,
    load_quarter,
    quarter_start,
    stagger,
    store_columns,
)
from regard._backends.gpu.rows.solver import add_two
from regard._backends.gpu.rows.terms import compute_terms
from regard._backends.gpu.rows.tiles import nan_maximum, reciprocal


class RowNumbers(NamedTuple):
    """Numbers of a row."""

    shift: Any
    inverse: Any  # 1/Z of ratios
    delta: Any
    scale: Any
    theta: Any


class TwoBuffers(NamedTuple):
    """The buffers of dp and of what was saved: p, or s."""

    upstream: Any
    saved: Any


@gluon.jit
def copy_chunks(two, row, i, C: gl.constexpr):
    """Starts the copies of chunk i of both tensors."""
    copy_chunk(two.upstream, row, i, C)
    copy_chunk(two.saved, row, i, C)


@gluon.jit
def copy_quarters(two, row, i: gl.constexpr, C: gl.constexpr):
    """Starts the copies of quarter i of both tensors."""
    copy_quarter(two.upstream, row, i, C)
    copy_quarter(two.saved, row, i, C)


@gluon.jit
def clamp_saved(x, C: gl.constexpr):
    """Replaces a score of −inf by one so low that its slopes are 0, unless they are at −inf too."""
    if C.F.slope_of_weight is None and not C.TRAITS.slopes_vanish:
        x = nan_maximum(x, -3e38)
    return x


@gluon.jit
def load_chunks(two, i, C: gl.constexpr):
    """(dp, p or s) of chunk i."""
    OUTSIDE: gl.constexpr = float("-inf") if C.F.slope_of_weight is None else 0.0
    return load_chunk(two.upstream, i, C, 0.0), clamp_saved(load_chunk(two.saved, i, C, OUTSIDE), C)


@gluon.jit
def load_quarters(two, i: gl.constexpr, C: gl.constexpr):
    """(dp, p or s) of quarter i."""
    OUTSIDE: gl.constexpr = float("-inf") if C.F.slope_of_weight is None else 0.0
    return load_quarter(two.upstream, i, C, 0.0), clamp_saved(load_quarter(two.saved, i, C, OUTSIDE), C)


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
def sum_delta(two, row, m, C: gl.constexpr):
    """(δ, a, b) of a row. The waits count the copies, two to a step, that were started after those waited for."""
    F: gl.constexpr = C.F
    async_copy.wait_group(2 * C.HELD + 2)
    a = load_quarters(two, 0, C)
    copy_quarters(two, row, 2, C)
    weight, delta = sum_by_lane(a, m, C)
    async_copy.wait_group(2 * C.HELD + 2)
    b = load_quarters(two, 1, C)
    copy_quarters(two, row, 3, C)
    weight, delta = add_two(weight, delta, *sum_by_lane(b, m, C))
    for i in range(C.HELD):
        async_copy.wait_group(2 * C.HELD + 2)
        weight, delta = add_two(weight, delta, *sum_by_lane(load_chunks(two, i, C), m, C))
        async_copy.commit_group()  # two empty ones, so that every wait counts alike
        async_copy.commit_group()
    async_copy.wait_group(2 * C.HELD)
    weight, delta = add_two(weight, delta, *sum_by_lane(load_quarters(two, 2, C), m, C))
    weight, delta = add_two(weight, delta, *sum_by_lane(load_quarters(two, 3, C), m, C))
    weight, delta = gl.reduce((weight, delta), 0, add_two)
    if F.family == "threshold":
        delta = gl.where(m.inverse == m.inverse, delta / gl.where(weight == 0.0, 1.0, weight), m.inverse)
    elif F.slope_of_weight is None:
        delta = delta * m.inverse
    return delta, a, b


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
def store_gradient(two, row, a, b, after, m, C: gl.constexpr):
    """Stores ds of a whole row, and copies the row `after` it into the buffers as they become free."""
    c = load_quarters(two, 2, C)
    copy_quarters(two, after, 0, C)
    store_columns(score_gradient(c, m, C), two.upstream, row, quarter_start(2, C), C)
    d = load_quarters(two, 3, C)
    copy_quarters(two, after, 1, C)
    store_columns(score_gradient(d, m, C), two.upstream, row, quarter_start(3, C), C)
    for i in range(C.HELD):
        x = load_chunks(two, i, C)
        copy_chunks(two, after, i, C)
        store_columns(score_gradient(x, m, C), two.upstream, row, i * C.CHUNK, C)
    store_columns(score_gradient(a, m, C), two.upstream, row, quarter_start(0, C), C)
    store_columns(score_gradient(b, m, C), two.upstream, row, quarter_start(1, C), C)


@gluon.jit
def backward_resident(dp, saved, ds, state, R, N, scale: gl.float64, theta: gl.float64, C: gl.constexpr):
    """ds of every num_programs-th row."""
    F: gl.constexpr = C.F
    two = TwoBuffers(allocate_buffers(dp, ds, R, N, C), allocate_buffers(saved, ds, R, N, C))
    stagger(C.PHASES)
    copy_quarters(two, gl.program_id(0), 0, C)
    copy_quarters(two, gl.program_id(0), 1, C)
    for i in range(C.HELD):
        copy_chunks(two, gl.program_id(0), i, C)
    for at in range(gl.program_id(0), R, gl.num_programs(0)):
        row, after = gl.cast(at, gl.int64), at + gl.num_programs(0)
        shift, inverse = gl.load(state + row), gl.load(state + R + row)
        if F.family == "ratio":
            inverse = reciprocal(inverse)
        scale_here, theta_here = scale.to(gl.float32), theta.to(gl.float32)
        m = RowNumbers(shift, inverse, inverse, scale_here, theta_here)
        delta, a, b = sum_delta(two, at, m, C)
        store_gradient(two, row, a, b, after, RowNumbers(shift, inverse, delta, scale_here, theta_here), C)
    async_copy.wait_group(0)
