"""Inline PTX for one thread's numbers of a tile, where the compiler would take more instructions.

A thread holds two rows, which alternate in its registers two numbers at a time (`fragment.py`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from regard._backends.gpu.attention.hopper.fragment import cells, first_octet, per_lane


@gluon.constexpr_function
def shift_code(sums, slack, floor):
    """PTX that raises the shifts. Out: two shifts, two rescaling factors, then z and the other rescaled sums.

    Nothing changes unless a score of the warp lies `slack` powers of two above its shift.
    """
    largest, b2, shift, old = (2 * (2 + sums) + k for k in (0, 2, 4, 6))
    code = ".reg .pred p, q; .reg .f32 x, y, d;"
    for row, name in ((0, "p"), (1, "q")):
        code += f" neg.f32 x, ${shift + row}; fma.rn.f32 x, ${largest + row}, ${b2 + row}, x;"
        code += f" setp.gt.f32 {name}, x, {slack}; mov.b32 ${row}, ${shift + row}; mov.f32 ${2 + row}, 1.0;"
        code += "".join(f" mov.b32 ${4 + 2 * k + row}, ${old + 2 * k + row};" for k in range(sums))
    code += " or.pred p, p, q; vote.sync.any.pred p, p, -1; @!p bra.uni KEEP;"
    for row in (0, 1):
        z, log_u, square, distance = (f"${4 + 2 * k + row}" for k in range(4))
        code += f" mov.b32 x, ${largest + row};"
        code += "".join(f" shfl.sync.bfly.b32 y, x, {lane}, 31, -1; max.f32 x, x, y;" for lane in (1, 2))
        code += f" mul.f32 y, x, ${b2 + row}; max.f32 y, y, {floor}; sub.f32 d, ${row}, y;"
        code += f" setp.lt.f32 p, d, {-slack}; @p mov.b32 ${row}, y; @!p mov.f32 d, 0.0;"
        code += f" ex2.approx.ftz.f32 x, d; mov.b32 ${2 + row}, x;"
        if sums == 4:
            code += (
                f" fma.rn.f32 {log_u}, d, {z}, {log_u}; mul.f32 {log_u}, {log_u}, x; mul.f32 {distance}, {distance}, x;"
            )
            code += f" mul.f32 {square}, {square}, x; mul.f32 {square}, {square}, x;"
        code += f" mul.f32 {z}, {z}, x;"
    return "{ " + code + " KEEP: }"


@gluon.constexpr_function
def shift_constraints(sums):
    """Constraints of `shift_code`."""
    return ",".join(["=&f"] * (2 * (2 + sums)) + ["f"] * (6 + 2 * sums))


@gluon.constexpr_function
def max_code(n):
    """PTX that writes the largest of each of a thread's two rows into all n numbers.

    Compares as integers, three in one instruction: the order is that of floats if the largest is not negative, and
    the reverse order of unsigned integers otherwise.
    """
    rows = {"a": [k for k in range(n) if k % 4 < 2], "b": [k for k in range(n) if k % 4 >= 2]}

    def chain(compare, name, row):
        code = f" {compare} {name}, ${n + row[0]}, ${n + row[1]};"
        return code + "".join(f" {compare} {name}, {name}, ${n + k};" for k in row[2:])

    code = ".reg .b32 a, b, x; .reg .pred p, q;" + "".join(chain("max.s32", *row) for row in rows.items())
    code += " setp.lt.s32 p, a, 0; setp.lt.s32 q, b, 0; or.pred p, p, q; @!p bra DONE;"
    for name, row in rows.items():
        code += chain("min.u32", "x", row) + f" setp.lt.s32 p, {name}, 0; @p mov.b32 {name}, x;"
    return "{ " + code + " DONE:" + "".join(f" mov.b32 ${k}, {name};" for name, row in rows.items() for k in row) + " }"


@gluon.constexpr_function
def max_constraints(n):
    """Constraints of `max_code`."""
    return ",".join(["=r"] * n + ["r"] * n)


@gluon.jit
def row_max(y):
    """Largest of a thread's numbers in each row: [M, N/8, 4, 2] → [M, 4]."""
    N: gl.constexpr = y.shape[0] * y.shape[1] * 8 // 128
    y = gl.inline_asm_elementwise(max_code(N), max_constraints(N), [y], gl.float32, True, N)
    y = first_octet(y)
    y, _ = gl.split(y)
    return y


@gluon.jit
def reciprocal(x):
    """1/x, to one unit in the last place."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.constexpr_function
def rescale_code(n):
    """PTX that multiplies a thread's n numbers by a factor per row, unless every factor in the warp is 1."""
    check = f"setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.f32 q, ${2 * n + 2}, 0f3F800000; or.pred p, p, q;"
    multiply = " ".join(f"mul.f32 ${k}, ${k}, ${2 * n + k};" for k in range(n))
    return f"{{ .reg .pred p, q; {check} vote.sync.any.pred p, p, -1; @!p bra.uni KEEP; {multiply} KEEP: }}"


@gluon.constexpr_function
def rescale_constraints(n):
    """Constraints of `rescale_code`."""
    return ",".join(["=f"] * n + [str(k) for k in range(n)] + ["f"] * n)


@gluon.jit
def rescale(o, factor):
    """o·factor, factor [M, 4]; a warp whose factors are all 1 skips it."""
    N: gl.constexpr = o.shape[0] * o.shape[1] // 128
    x = cells(o)
    factor = per_lane(gl.convert_layout(factor, gl.SliceLayout(2, gl.SliceLayout(1, x.type.layout))))
    x, factor = gl.broadcast(x, factor)
    x = gl.inline_asm_elementwise(rescale_code(N), rescale_constraints(N), [x, factor], gl.float32, True, N)
    return gl.convert_layout(gl.reshape(x, o.shape), o.type.layout)


@gluon.constexpr_function
def round_code(dtype, clipped):
    """PTX that rounds two numbers to 16 bits, clipped at 0 if `clipped`."""
    kind = "bf16" if dtype == gl.bfloat16 else "f16"
    return f"cvt.rn.{'relu.' if clipped else ''}{kind}x2.f32 $0, $2, $1;"


@gluon.jit
def round_weights(u, dtype: gl.constexpr, F: gl.constexpr, IN_PLACE: gl.constexpr):
    """u in 16 bits, a signed map's clipped at 0. IN_PLACE stops ptxas from moving the conversion."""
    CODE: gl.constexpr = round_code(dtype, F.signed is not None)
    if F.signed is None and not IN_PLACE:
        p = u.to(dtype)
    elif dtype == gl.bfloat16:
        p = gl.inline_asm_elementwise(CODE, "=r,r,r", [u], gl.bfloat16, False, 2)
    else:
        p = gl.inline_asm_elementwise(CODE, "=r,r,r", [u], gl.float16, False, 2)
    return p
