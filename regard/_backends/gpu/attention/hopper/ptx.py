"""What a thread does with its numbers of a tile, written in PTX where the compiler would need more instructions.

A thread holds two rows: of [M, N/8, 4, 2], octet · lane · pair, every octet's pair of one lane, the rows by turns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def cells(x):
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def per_lane(x):
    """[M, 4] as [M, 1, 4, 1]."""
    return gl.expand_dims(gl.expand_dims(x, 2), 1)


@gluon.jit
def first_octet(y):
    """The first octet of [M, N/8, 4, 2]: [M, 4, 2]."""
    if y.shape[1] == 1:
        one = gl.reshape(y, [y.shape[0], 4, 2])
    else:
        half = gl.reshape(y, [y.shape[0], y.shape[1] // 2, 2, 4, 2])
        half, _ = gl.split(gl.permute(half, [0, 1, 3, 4, 2]))
        one = first_octet(half)
    return one


@gluon.constexpr_function
def following(sums, lazy, floor):
    """$0, $1: the shifts of a thread's two rows; $2, $3: by what they fell; then z and the other sums, told in them.

    Unless a score of the warp lies `lazy` powers of two above its shift, all stay as they are.
    """
    most, b2, shift, old = (2 * (2 + sums) + k for k in (0, 2, 4, 6))
    code = ".reg .pred p, q; .reg .f32 x, y, d;"
    for row, name in ((0, "p"), (1, "q")):
        code += f" neg.f32 x, ${shift + row}; fma.rn.f32 x, ${most + row}, ${b2 + row}, x;"
        code += f" setp.gt.f32 {name}, x, {lazy}; mov.b32 ${row}, ${shift + row}; mov.f32 ${2 + row}, 1.0;"
        code += "".join(f" mov.b32 ${4 + 2 * k + row}, ${old + 2 * k + row};" for k in range(sums))
    code += " or.pred p, p, q; vote.sync.any.pred p, p, -1; @!p bra.uni KEEP;"
    for row in (0, 1):
        z, log_u, square, distance = (f"${4 + 2 * k + row}" for k in range(4))
        code += f" mov.b32 x, ${most + row};"
        code += "".join(f" shfl.sync.bfly.b32 y, x, {lane}, 31, -1; max.f32 x, x, y;" for lane in (1, 2))
        code += f" mul.f32 y, x, ${b2 + row}; max.f32 y, y, {floor}; sub.f32 d, ${row}, y;"
        code += f" setp.lt.f32 p, d, {-lazy}; @p mov.b32 ${row}, y; @!p mov.f32 d, 0.0;"
        code += f" ex2.approx.ftz.f32 x, d; mov.b32 ${2 + row}, x;"
        if sums == 4:
            code += (
                f" fma.rn.f32 {log_u}, d, {z}, {log_u}; mul.f32 {log_u}, {log_u}, x; mul.f32 {distance}, {distance}, x;"
            )
            code += f" mul.f32 {square}, {square}, x; mul.f32 {square}, {square}, x;"
        code += f" mul.f32 {z}, {z}, x;"
    return "{ " + code + " KEEP: }"


@gluon.constexpr_function
def following_registers(sums):
    return ",".join(["=&f"] * (2 * (2 + sums)) + ["f"] * (6 + 2 * sums))


@gluon.constexpr_function
def comparing(n):
    """The largest of each of a thread's two rows into every $k: n numbers, the rows by turns of two.

    Three at once, as integers: floats compare so if the largest is not negative, else as unsigned ones, the other way.
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
def comparing_registers(n):
    return ",".join(["=r"] * n + ["r"] * n)


@gluon.jit
def largest(y):
    """The largest of a thread's numbers in each row: [M, N/8, 4, 2] → [M, 4]."""
    N: gl.constexpr = y.shape[0] * y.shape[1] * 8 // 128
    y = gl.inline_asm_elementwise(comparing(N), comparing_registers(N), [y], gl.float32, True, N)
    y = first_octet(y)
    y, _ = gl.split(y)
    return y


@gluon.constexpr_function
def fading(n):
    """$k ·= fade for a thread's n numbers, of two rows by turns of two, unless all rows of the warp have fade 1."""
    check = f"setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.f32 q, ${2 * n + 2}, 0f3F800000; or.pred p, p, q;"
    multiply = " ".join(f"mul.f32 ${k}, ${k}, ${2 * n + k};" for k in range(n))
    return f"{{ .reg .pred p, q; {check} vote.sync.any.pred p, p, -1; @!p bra.uni KEEP; {multiply} KEEP: }}"


@gluon.constexpr_function
def fading_registers(n):
    return ",".join(["=f"] * n + [str(k) for k in range(n)] + ["f"] * n)


@gluon.jit
def faded(o, fade):
    """o·fade [M, 4]; skipped by the warps where fade is 1 in every row."""
    N: gl.constexpr = o.shape[0] * o.shape[1] // 128
    x = cells(o)
    fade = per_lane(gl.convert_layout(fade, gl.SliceLayout(2, gl.SliceLayout(1, x.type.layout))))
    x, fade = gl.broadcast(x, fade)
    x = gl.inline_asm_elementwise(fading(N), fading_registers(N), [x, fade], gl.float32, True, N)
    return gl.convert_layout(gl.reshape(x, o.shape), o.type.layout)


@gluon.constexpr_function
def rounding(dtype, clipped):
    """$0: $1 and $2 in 16 bits."""
    kind = "bf16" if dtype == gl.bfloat16 else "f16"
    return f"cvt.rn.{'relu.' if clipped else ''}{kind}x2.f32 $0, $2, $1;"


@gluon.jit
def rounded(u, dtype: gl.constexpr, F: gl.constexpr, HERE: gl.constexpr):
    """u in 16 bits; a signed one clipped at 0. HERE: in this place, where ptxas would else move numbers around."""
    CODE: gl.constexpr = rounding(dtype, F.signed is not None)
    if F.signed is None and not HERE:
        p = u.to(dtype)
    elif dtype == gl.bfloat16:
        p = gl.inline_asm_elementwise(CODE, "=r,r,r", [u], gl.bfloat16, False, 2)
    else:
        p = gl.inline_asm_elementwise(CODE, "=r,r,r", [u], gl.float16, False, 2)
    return p
