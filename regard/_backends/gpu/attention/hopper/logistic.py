"""p = 1/(1 + 2⁻ˣ) of a thread's scores, x = y·b + g, with one special function per score where that is exact enough.

    tanh        ½ + ½·tanh(x·ln 2/2), absolute error 4e-6: for rows whose weights are not all small
    series      e − e² with e = 2ˣ, relative error e² ≤ 2⁻¹⁰ (float16: 2⁻¹²): for tiles without a larger e, as a bias
                of −log n leaves them
    reciprocal  one reciprocal for four weights, exact for every score

A warp takes one method per tile. A row's `margin` is the weight of every eighth key (in its first tile of every key),
less 2⁻¹⁰ (float16: 2⁻⁸) for each key weighed by tanh. While the margin is not negative, the errors are below 2⁻¹¹
(2⁻¹³) of the row's weight if the other keys are alike, and below 2⁻⁸ (2⁻¹⁰) in any case.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from regard._backends.gpu.attention.hopper.fragment import first_octet, per_lane

HALF_LN2 = gl.constexpr(0.34657359027997264)
RECIPROCAL, TANH, SERIES = (gl.constexpr(k) for k in range(3))


@gluon.constexpr_function
def reciprocal_code(n):
    """PTX for 1/(1 + a) of a thread's n numbers a ≥ 0, with one reciprocal for four numbers of a row.

    With a′ = min((1 + a)·2⁻⁶³, 1), where the multiply-add saturates by itself, neither a′b′ nor (a′b′·2⁶³)·(c′d′·2⁶³)
    leaves float32's range. No weight is below 2⁻⁶³; a NaN may make all four NaN.
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
def in_place_constraints(n):
    """Constraints of n registers that are read and overwritten."""
    return ",".join(["=r"] * n + [str(k) for k in range(n)])


@gluon.jit
def reciprocal(odds):
    """1/(1 + odds) of cells [M, N/8, 4, 2]."""
    N: gl.constexpr = odds.shape[0] * odds.shape[1] * 8 // 128
    return gl.inline_asm_elementwise(reciprocal_code(N), in_place_constraints(N), [odds], gl.float32, True, N)


@gluon.constexpr_function
def tanh_cost(n, half):
    """Loss of a row's margin if n/2 of its keys are weighed by tanh."""
    return n / 2.0 * (2.0**-8 if half else 2.0**-10)


@gluon.constexpr_function
def method_code(n, half):
    """PTX that writes the warp's method into n numbers. In: n scores of a thread, then n each of b, g and margins."""
    y, b, g, margin = (n * k for k in (1, 2, 3, 4))
    code = f".reg .pred p; .reg .b32 m, u, v; .reg .f32 x; mov.b32 m, {TANH.value};"
    cost = tanh_cost(n, half)
    code += f" setp.ge.f32 p, ${margin}, {cost}; setp.ge.and.f32 p, ${margin + 2}, {cost}, p;"
    code += " vote.sync.all.pred p, p, -1; @p bra.uni DONE;"
    for name, row in (("u", 0), ("v", 2)):  # integers compare three at once; 0 is below no score that matters
        code += f" mov.b32 {name}, 0;"
        code += "".join(f" max.s32 {name}, {name}, ${y + k};" for k in range(n) if k % 4 // 2 * 2 == row)
    small = -6.0 if half else -5.0
    code += f" fma.rn.f32 x, u, ${b}, ${g}; setp.le.f32 p, x, {small};"
    code += f" fma.rn.f32 x, v, ${b + 2}, ${g}; setp.le.and.f32 p, x, {small}, p;"
    code += f" vote.sync.all.pred p, p, -1; selp.b32 m, {SERIES.value}, {RECIPROCAL.value}, p; DONE:"
    return "{ " + code + "".join(f" mov.b32 ${k}, m;" for k in range(n)) + " }"


@gluon.constexpr_function
def method_constraints(n):
    """Constraints of `method_code`."""
    return ",".join(["=&r"] * n + ["r"] * (4 * n))


@gluon.jit
def choose_method(y, b, g, margin, HALF: gl.constexpr):
    """Method for a tile y [M, N/8, 4, 2], as [M, 4]; b and margin are [M, 4]."""
    N: gl.constexpr = y.shape[0] * y.shape[1] * 8 // 128
    LAYOUT: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(1, y.type.layout))
    y, b = gl.broadcast(y, per_lane(gl.convert_layout(b, LAYOUT)))
    y, gained = gl.broadcast(y, per_lane(gl.convert_layout(margin, LAYOUT)))
    offset = gl.full(y.shape, g, gl.float32, y.type.layout)
    method = gl.inline_asm_elementwise(
        method_code(N, HALF), method_constraints(N), [y, b, offset, gained], gl.int32, True, N
    )
    method, _ = gl.split(first_octet(method))
    return gl.convert_layout(method, margin.type.layout)


@gluon.constexpr_function
def weight_code(n, half):
    """PTX for the weights of n scores; a second output of n registers holds the gain of each row's margin."""
    y, b, b_tanh, g, g_tanh, method = (n * k for k in range(2, 8))
    row = [k % 4 // 2 * 2 for k in range(n)]
    power = [f" fma.rn.f32 ${k}, ${y + k}, ${b + row[k]}, ${g};" for k in range(n)]
    gained = "".join(f" add.f32 a{row[k]}, a{row[k]}, ${k};" for k in range(n) if k % 32 < 4)
    code = ".reg .f32 a0, a2, x; .reg .pred p; mov.f32 a0, 0.0; mov.f32 a2, 0.0;"
    code += f" setp.eq.s32 p, ${method}, {TANH.value}; @p bra.uni TANH;"
    code += f" setp.eq.s32 p, ${method}, {SERIES.value}; @p bra.uni SERIES;"
    code += "".join(f"{power[k]} neg.f32 ${k}, ${k}; ex2.approx.ftz.f32 ${k}, ${k};" for k in range(n))
    code += reciprocal_code(n) + gained + " bra.uni DONE; SERIES:"
    for k in range(n):
        code += f"{power[k]} ex2.approx.ftz.f32 ${k}, ${k}; neg.f32 x, ${k}; fma.rn.f32 ${k}, x, ${k}, ${k};"
    code += f" bra.uni DONE; TANH: mov.f32 a0, {-tanh_cost(n, half)}; mov.f32 a2, a0;"
    for k in range(n):
        code += f" fma.rn.f32 ${k}, ${y + k}, ${b_tanh + row[k]}, ${g_tanh};"
        code += f" tanh.approx.f32 ${k}, ${k}; fma.rn.f32 ${k}, ${k}, 0.5, 0.5;"
    return "{ " + code + gained + " DONE:" + "".join(f" mov.f32 ${n + k}, a{row[k]};" for k in range(n)) + " }"


@gluon.constexpr_function
def weight_constraints(n):
    """Constraints of `weight_code`."""
    return ",".join(["=&f"] * (2 * n) + ["f"] * (5 * n) + ["r"] * n)


@gluon.jit
def weigh(y, b, g, method, HALF: gl.constexpr):
    """(p, gain of each row's margin [M, 4]) of one split y [M, N/8, 4, 2] of a tile."""
    N: gl.constexpr = y.shape[0] * y.shape[1] * 8 // 128
    y, b = gl.broadcast(y, per_lane(b))
    y, method = gl.broadcast(y, per_lane(method))
    offset = gl.full(y.shape, g, gl.float32, y.type.layout)
    numbers = [y, b, b * HALF_LN2, offset, offset * HALF_LN2, method]
    p, gained = gl.inline_asm_elementwise(
        weight_code(N, HALF), weight_constraints(N), numbers, (gl.float32, gl.float32), True, N
    )  # fmt: skip
    gained, _ = gl.split(first_octet(gained))
    return p, gained
