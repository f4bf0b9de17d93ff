"""Backward of long 16-bit rows in the places of a multiprocessor (`rows_places.py`): dp and p, or s, are read once.

    read    a, b, the held chunks, c, d      Σ of what δ is made of
    tell    c, d, the held chunks, a, b      ds; and the next row is called into each place that is left

Both tensors have places of their own. Gluon, Hopper.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from regard._backends.gpu.rows.online import downstream, slopes
from regard._backends.gpu.rows.resident.buffers import (
    by_lane,
    call_chunk,
    call_quarter,
    chunk,
    first_of,
    places_of,
    quarter,
    stagger,
    tell,
)
from regard._backends.gpu.rows.solver import add_two
from regard._backends.gpu.rows.terms import terms
from regard._backends.gpu.rows.tiles import larger, reciprocal


class Down(NamedTuple):
    """What the kernel is compiled for."""

    F: Any
    TRAITS: Any
    CHUNK: int  # columns; a quarter is half as many
    HELD: int  # chunks
    VECTOR: int  # numbers in 16 bytes
    EVEN: bool  # the row fills its chunks and quarters
    PHASES: int  # of the programs: `stagger`


class Row(NamedTuple):
    """Numbers of a row."""

    shift: Any
    inverse: Any  # 1/Z of ratios
    delta: Any
    scale: Any
    theta: Any


class Two(NamedTuple):
    """The places of dp and of what was saved: p, or s."""

    above: Any
    saved: Any


@gluon.jit
def call_chunks(two, row, i, C: gl.constexpr):
    call_chunk(two.above, row, i, C)
    call_chunk(two.saved, row, i, C)


@gluon.jit
def call_quarters(two, row, i: gl.constexpr, C: gl.constexpr):
    call_quarter(two.above, row, i, C)
    call_quarter(two.saved, row, i, C)


@gluon.jit
def known(x, C: gl.constexpr):
    """Saved numbers as slopes take them: a score of −inf weighs 0, and so does one as low as this."""
    if C.F.slope_of_weight is None and not C.TRAITS.slopes_end:
        x = larger(x, -3e38)
    return x


@gluon.jit
def chunks(two, i, C: gl.constexpr):
    """(dp, p or s) of a chunk."""
    OUTSIDE: gl.constexpr = float("-inf") if C.F.slope_of_weight is None else 0.0
    return chunk(two.above, i, C, 0.0), known(chunk(two.saved, i, C, OUTSIDE), C)


@gluon.jit
def quarters(two, i: gl.constexpr, C: gl.constexpr):
    OUTSIDE: gl.constexpr = float("-inf") if C.F.slope_of_weight is None else 0.0
    return quarter(two.above, i, C, 0.0), known(quarter(two.saved, i, C, OUTSIDE), C)


@gluon.jit
def lane_sums(above, x, m, C: gl.constexpr):
    """(Σ g′, Σ g′·dp) of a threshold map, Σ p·dp twice of a ratio (times Z, from scores), of each thread: [LANES]."""
    F: gl.constexpr = C.F
    TRAITS: gl.constexpr = C.TRAITS
    if F.family == "threshold":
        a = F.slope_of_weight(x, m.theta)
        v = a * above
    else:
        a = x
        if F.slope_of_weight is None:
            a, _v = terms(x, m.shift, m.scale, 0.0, F, TRAITS, True, False)
        v = a * above
        a = v
    return gl.sum(gl.sum(by_lane(a, C), 2), 0), gl.sum(gl.sum(by_lane(v, C), 2), 0)


@gluon.jit
def read_row(two, row, m, C: gl.constexpr):
    """(δ, a, b) of a row. The waits count the copies, two to a step, that were called after those waited for."""
    F: gl.constexpr = C.F
    async_copy.wait_group(2 * C.HELD + 2)
    a = quarters(two, 0, C)
    call_quarters(two, row, 2, C)
    weight, delta = lane_sums(a[0], a[1], m, C)
    async_copy.wait_group(2 * C.HELD + 2)
    b = quarters(two, 1, C)
    call_quarters(two, row, 3, C)
    weight, delta = add_two(weight, delta, *lane_sums(b[0], b[1], m, C))
    for i in range(C.HELD):
        async_copy.wait_group(2 * C.HELD + 2)
        above, x = chunks(two, i, C)
        weight, delta = add_two(weight, delta, *lane_sums(above, x, m, C))
        async_copy.commit_group()  # of nothing, twice, so that the waits may count alike
        async_copy.commit_group()
    async_copy.wait_group(2 * C.HELD)
    c = quarters(two, 2, C)
    weight, delta = add_two(weight, delta, *lane_sums(c[0], c[1], m, C))
    d = quarters(two, 3, C)
    weight, delta = add_two(weight, delta, *lane_sums(d[0], d[1], m, C))
    weight, delta = gl.reduce((weight, delta), 0, add_two)
    if F.family == "threshold":
        delta = gl.where(m.inverse == m.inverse, delta / gl.where(weight == 0.0, 1.0, weight), m.inverse)
    elif F.slope_of_weight is None:
        delta = delta * m.inverse
    return delta, a, b


@gluon.jit
def below(both, m, C: gl.constexpr):
    """ds of (dp, p or s)."""
    F: gl.constexpr = C.F
    above, x = both
    if F.family == "threshold":
        ds = F.slope_of_weight(x, m.theta) * (above - m.delta) * m.scale
    else:
        a, b = slopes(x, m.shift, m.scale, m.inverse, F, True)
        ds = downstream(a, b, above, m.delta, True, m.scale, m.inverse, F, False)
    return ds


@gluon.jit
def tell_row(two, row, a, b, after, m, C: gl.constexpr):
    """All of ds of a row; the one that comes `after` it is called into the places that it leaves."""
    c = quarters(two, 2, C)
    call_quarters(two, after, 0, C)
    tell(below(c, m, C), two.above, row, first_of(2, C), C)
    d = quarters(two, 3, C)
    call_quarters(two, after, 1, C)
    tell(below(d, m, C), two.above, row, first_of(3, C), C)
    for i in range(C.HELD):
        x = chunks(two, i, C)
        call_chunks(two, after, i, C)
        tell(below(x, m, C), two.above, row, i * C.CHUNK, C)
    tell(below(a, m, C), two.above, row, first_of(0, C), C)
    tell(below(b, m, C), two.above, row, first_of(1, C), C)


@gluon.jit
def backward_down(dp, saved, ds, state, R, N, scale: gl.float64, theta: gl.float64, C: gl.constexpr):
    """Every num_programs-th row; the scale is not faint, and a score of −inf weighs 0 by itself."""
    F: gl.constexpr = C.F
    two = Two(places_of(dp, ds, R, N, C), places_of(saved, ds, R, N, C))
    stagger(C.PHASES)
    call_quarters(two, gl.program_id(0), 0, C)
    call_quarters(two, gl.program_id(0), 1, C)
    for i in range(C.HELD):
        call_chunks(two, gl.program_id(0), i, C)
    for at in range(gl.program_id(0), R, gl.num_programs(0)):
        row, after = gl.cast(at, gl.int64), at + gl.num_programs(0)
        shift, inverse = gl.load(state + row), gl.load(state + R + row)
        if F.family == "ratio":
            inverse = reciprocal(inverse)
        scale_here, theta_here = scale.to(gl.float32), theta.to(gl.float32)
        m = Row(shift, inverse, inverse, scale_here, theta_here)
        delta, a, b = read_row(two, at, m, C)
        tell_row(two, row, a, b, after, Row(shift, inverse, delta, scale_here, theta_here), C)
    async_copy.wait_group(0)
