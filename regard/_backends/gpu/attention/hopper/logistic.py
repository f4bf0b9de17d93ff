"""p = 1/(1 + 2⁻ˣ) of a thread's scores, x = y·b + g, by one special function each where that is exact enough.

    tanh      ½ + ½·tanh(x·ln 2/2), wrong by 4e-6 at most, however small p is: rows whose weights are not all small
    series    e − e² of e = 2ˣ, wrong by e² ≤ 2⁻¹⁰ of p (float16: 2⁻¹²): tiles without a larger e, as a bias of −log n
              leaves them
    quotient  one reciprocal for four weights, always right

A warp takes one of them for a tile. A row's `margin` is the weight of every eighth key (in its first tile of all),
less 2⁻¹⁰ (float16: 2⁻⁸) for each key weighed by tanh. While it is not negative, the errors are below 2⁻¹¹ (2⁻¹³) of all
weight if those keys are like the others, and below 2⁻⁸ (2⁻¹⁰) whatever the others are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from regard._backends.gpu.attention.hopper.ptx import first_octet, per_lane

HALF_LN2 = gl.constexpr(0.34657359027997264)
QUOTIENT, TANH, SERIES = (gl.constexpr(k) for k in range(3))


@gluon.constexpr_function
def inverting(n):
    """$k = 1/(1 + $k) of a thread's n numbers ≥ 0, of two rows by turns of two: one reciprocal for four of a row.

    With a′ = min((1 + a)·2⁻⁶³, 1), where the multiply-add saturates by itself, neither a′b′ nor (a′b′·2⁶³)·(c′d′·2⁶³)
    leaves float32's range. So no weight comes below 2⁻⁶³; a NaN makes its whole four NaN, or its neighbour's.
    """
    code = ".reg .b32 x, y, r;" + "".join(f" fma.rn.sat.f32 ${k}, ${k}, 0f20000000, 0f20000000;" for k in range(n))
    for k in range(0, n, 8):
        for a, b, c, d in ([f"${k + j}" for j in four] for four in ((0, 1, 4, 5), (2, 3, 6, 7))):
            code += f" mul.f32 x, {a}, {b}; mul.f32 x, x, 0f5F000000;"
            code += f" mul.f32 y, {c}, {d}; mul.f32 y, y, 0f5F000000;"
            code += " mul.f32 r, x, y; rcp.approx.ftz.f32 r, r; mul.f32 y, y, r; mul.f32 x, x, r;"
            code += f" mul.f32 r, y, {b}; mul.f32 {b}, y, {a}; mov.b32 {a}, r;"
            code += f" mul.f32 r, x, {d}; mul.f32 {d}, x, {c}; mov.b32 {c}, r;"
    return "{ " + code + " }"


@gluon.constexpr_function
def in_place(n):
    return ",".join(["=r"] * n + [str(k) for k in range(n)])


@gluon.jit
def quotient(odds):
    """1/(1 + odds) of cells [M, N/8, 4, 2]."""
    N: gl.constexpr = odds.shape[0] * odds.shape[1] * 8 // 128
    return gl.inline_asm_elementwise(inverting(N), in_place(N), [odds], gl.float32, True, N)


@gluon.constexpr_function
def price(n, half):
    """What a row's margin loses where n/2 keys of it are weighed by tanh."""
    return n / 2.0 * (2.0**-8 if half else 2.0**-10)


@gluon.constexpr_function
def choosing(n, half):
    """How a warp weighs its tile, into every $k: n scores of a thread, then as many b, g and margins."""
    y, b, g, margin = (n * k for k in (1, 2, 3, 4))
    code = f".reg .pred p; .reg .b32 m, u, v; .reg .f32 x; mov.b32 m, {TANH.value};"
    code += f" setp.ge.f32 p, ${margin}, {price(n, half)}; setp.ge.and.f32 p, ${margin + 2}, {price(n, half)}, p;"
    code += " vote.sync.all.pred p, p, -1; @p bra.uni DONE;"
    for name, row in (("u", 0), ("v", 2)):  # as integers, so that three compare at once; of negative ones none is met
        code += f" mov.b32 {name}, 0;"
        code += "".join(f" max.s32 {name}, {name}, ${y + k};" for k in range(n) if k % 4 // 2 * 2 == row)
    small = -6.0 if half else -5.0
    code += f" fma.rn.f32 x, u, ${b}, ${g}; setp.le.f32 p, x, {small};"
    code += f" fma.rn.f32 x, v, ${b + 2}, ${g}; setp.le.and.f32 p, x, {small}, p;"
    code += f" vote.sync.all.pred p, p, -1; selp.b32 m, {SERIES.value}, {QUOTIENT.value}, p; DONE:"
    return "{ " + code + "".join(f" mov.b32 ${k}, m;" for k in range(n)) + " }"


@gluon.constexpr_function
def choosing_registers(n):
    return ",".join(["=&r"] * n + ["r"] * (4 * n))


@gluon.jit
def manner(y, b, g, margin, HALF: gl.constexpr):
    """Which of the three for a tile y [M, N/8, 4, 2]; b and margin are [M, 4], and so is the answer."""
    N: gl.constexpr = y.shape[0] * y.shape[1] * 8 // 128
    LAYOUT: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(1, y.type.layout))
    y, b = gl.broadcast(y, per_lane(gl.convert_layout(b, LAYOUT)))
    y, met = gl.broadcast(y, per_lane(gl.convert_layout(margin, LAYOUT)))
    offset = gl.full(y.shape, g, gl.float32, y.type.layout)
    way = gl.inline_asm_elementwise(choosing(N, HALF), choosing_registers(N), [y, b, offset, met], gl.int32, True, N)
    way, _ = gl.split(first_octet(way))
    return gl.convert_layout(way, margin.type.layout)


@gluon.constexpr_function
def weighing(n, half):
    """$k: the weights of n scores; then in every register of a row what the margin gains by them."""
    y, b, b_tanh, g, g_tanh, way = (n * k for k in range(2, 8))
    row = [k % 4 // 2 * 2 for k in range(n)]
    power = [f" fma.rn.f32 ${k}, ${y + k}, ${b + row[k]}, ${g};" for k in range(n)]
    met = "".join(f" add.f32 a{row[k]}, a{row[k]}, ${k};" for k in range(n) if k % 32 < 4)
    code = ".reg .f32 a0, a2, x; .reg .pred p; mov.f32 a0, 0.0; mov.f32 a2, 0.0;"
    code += f" setp.eq.s32 p, ${way}, {TANH.value}; @p bra.uni TANH;"
    code += f" setp.eq.s32 p, ${way}, {SERIES.value}; @p bra.uni SERIES;"
    code += "".join(f"{power[k]} neg.f32 ${k}, ${k}; ex2.approx.ftz.f32 ${k}, ${k};" for k in range(n))
    code += inverting(n) + met + " bra.uni DONE; SERIES:"
    for k in range(n):
        code += f"{power[k]} ex2.approx.ftz.f32 ${k}, ${k}; neg.f32 x, ${k}; fma.rn.f32 ${k}, x, ${k}, ${k};"
    code += f" bra.uni DONE; TANH: mov.f32 a0, {-price(n, half)}; mov.f32 a2, a0;"
    for k in range(n):
        code += f" fma.rn.f32 ${k}, ${y + k}, ${b_tanh + row[k]}, ${g_tanh};"
        code += f" tanh.approx.f32 ${k}, ${k}; fma.rn.f32 ${k}, ${k}, 0.5, 0.5;"
    return "{ " + code + met + " DONE:" + "".join(f" mov.f32 ${n + k}, a{row[k]};" for k in range(n)) + " }"


@gluon.constexpr_function
def weighing_registers(n):
    return ",".join(["=&f"] * (2 * n) + ["f"] * (5 * n) + ["r"] * n)


@gluon.jit
def weighed(y, b, g, way, HALF: gl.constexpr):
    """(p, what each row's margin gains [M, 4]) of a piece of a tile, y [M, N/8, 4, 2]."""
    N: gl.constexpr = y.shape[0] * y.shape[1] * 8 // 128
    y, b = gl.broadcast(y, per_lane(b))
    y, way = gl.broadcast(y, per_lane(way))
    offset = gl.full(y.shape, g, gl.float32, y.type.layout)
    numbers = [y, b, b * HALF_LN2, offset, offset * HALF_LN2, way]
    p, met = gl.inline_asm_elementwise(
        weighing(N, HALF), weighing_registers(N), numbers, (gl.float32, gl.float32), True, N
    )  # fmt: skip
    met, _ = gl.split(first_octet(met))
    return p, met
