"""One warpgroup and its 64 rows of a tile of scores, in registers: weights and the sums of `statistics.Sums`.

A thread of the tensor core's result holds two rows, of every eight keys two neighbours. So a tile [M, N] is looked at
as cells [M, N/8, 4, 2], octet · lane · pair: sums run down a thread's octets, four lanes per row meet once, at the end,
and what depends on the octet is a constant in the instruction.

u is measured in a frame that follows the running maximum only when it falls LAZY behind: what was summed before is then
faded, and in the tiles between nothing is multiplied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from regard.kernels import tiles
from regard.kernels.forward_online import frame_of, terms
from regard.kernels.tiles import HIDDEN, LOG2E

LAZY = gl.constexpr(8.0)  # in powers of 2: u stays below 256, which every type holds
ROWS = gl.constexpr(64)


class Tally(NamedTuple):
    """What a warpgroup carries from tile to tile beside o and p: row numbers [M], then sums [M, 4]."""

    top: Any  # max y
    frame: Any
    z: Any
    log_u: Any
    square: Any
    distance: Any
    mean: Any  # Σ y
    m2: Any  # Σ y²
    first: Any  # in lane 0: y of the first key, once its tile has come


@gluon.jit
def zeros(N: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.zeros([ROWS, N], gl.float32, LAYOUT)


@gluon.jit
def nothing(N: gl.constexpr, LAYOUT: gl.constexpr, F: gl.constexpr):
    """The tally before any key; LAYOUT is that of a tile of N keys."""
    top = gl.full([ROWS], HIDDEN, gl.float32, gl.SliceLayout(1, LAYOUT))
    none = gl.sum(gl.sum(cells(zeros(N, LAYOUT)), 1), 2)
    return Tally(top, frame_of(top, top * 0.0 + 1.0, F), none, none, none, none, none, none, none)


@gluon.jit
def cells(x):
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def per_row(x, like):
    """[M] as [M, 1, 1, 1]."""
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, like.type.layout))))
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 1), 2), 3)


@gluon.jit
def octet(like):
    """0, 8, 16, … as [1, N/8, 1, 1]."""
    x = gl.arange(0, like.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, like.type.layout))))
    return 8 * gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 2), 3)


@gluon.jit
def within(like):
    """0 … 7, a key's place in its octet, as [1, 1, 4, 2]."""
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, like.type.layout))))
    lane = gl.expand_dims(gl.expand_dims(gl.expand_dims(lane, 0), 1), 3)
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, like.type.layout))))
    pair = gl.expand_dims(gl.expand_dims(gl.expand_dims(pair, 0), 1), 2)
    return 2 * lane + pair


@gluon.jit
def down(x):
    """Σ over a tile's keys, as far as one thread has them: [M, N/8, 4, 2] → [M, 4]."""
    return gl.sum(gl.sum(x, 1), 2)


@gluon.jit
def weigh(s, r, i, last, a, theta, start, r0, C: gl.constexpr, EDGE: gl.constexpr):
    """(u, fade of what came before, tally) of the products s = q·kᵀ with the keys from `start` on."""
    NEED: gl.constexpr = C.NEED
    F: gl.constexpr = C.F
    b2 = a * LOG2E
    y = cells(s)
    if EDGE:
        seen = octet(y) < per_row(last - start, y) - within(y)
        y = gl.where(seen, y, HIDDEN)
    top = r.top
    frame = r.frame
    if NEED.top or (F.family == "ratio" and F.shift != "none"):
        top = gl.maximum(top, gl.convert_layout(gl.max(largest(y), 1), top.type.layout))
        want = frame_of(top, b2, F)
        frame = gl.where(want > frame + LAZY, want, frame)
    u, v, power = weights(y, per_row(a, y), per_row(b2, y), per_row(frame, y), theta, F)
    first = r.first
    if NEED.first:
        head, _ = gl.split(first_octet(y))
        first = gl.where(start == 0, gl.convert_layout(head, first.type.layout), first)
    if EDGE:
        u = gl.where(seen, u, 0.0)
        v = gl.where(seen, v, 0.0)
        power = gl.where(seen, power, 0.0)
        y = gl.where(seen, y, 0.0)
    shift = r.frame - frame
    fade = gl.exp2(shift)
    LANES: gl.constexpr = gl.SliceLayout(1, r.z.type.layout)
    fall = gl.expand_dims(gl.convert_layout(fade, LANES), 1)
    sum_u = gl.sum(u, 1)  # [M, 4, 2]
    log_u, square, distance, mean, m2 = r.log_u, r.square, r.distance, r.mean, r.m2
    if NEED.log_u:
        log_u = (log_u + gl.expand_dims(gl.convert_layout(shift, LANES), 1) * r.z) * fall + down(u * power)
    if NEED.square:
        square = square * (fall * fall) + down(u * u)
    if NEED.moments:
        mean += down(y)
        m2 += down(y * y)
    if NEED.distance:
        distance = distance * fall + stretch(u, sum_u, per_row(i - start, y) - within(y), start, r0, C, EDGE)
    z = r.z
    if F.exponential:
        z = z * fall + gl.sum(sum_u, 2)
    elif F.family == "ratio":
        z = z * fall + gl.sum(gl.sum(v, 1), 2)
    r = Tally(top, frame, z, log_u, square, distance, mean, m2, first)
    return gl.reshape(u, s.shape), fade, r


@gluon.jit
def weights(y, a, b2, frame, theta, F: gl.constexpr):
    """(u, v, log2 e) of scores y in a frame, in the map's cheapest form; u may come signed, for `rounded` to clip."""
    if F.odds is not None:
        u = shared(F.odds(y * b2, theta))
        v = u
        power = u
    elif F.signed is not None:
        power = y * b2 - frame
        u = F.signed(gl.exp2(power), y * a, tiles.unshift(frame))
        v = gl.abs(u)
    else:
        u, v, power = terms(y, a, b2, frame, theta, F)
    return u, v, power


@gluon.constexpr_function
def sharing(n):
    """$k = 1/(1 + $k) of a thread's n numbers ≥ 0, of two rows by turns of two: one reciprocal for four of a row.

    With a′ = min((1 + a)·2⁻⁶³, 1), where the multiply-add saturates by itself, neither a′b′ nor (a′b′·2⁶³)·(c′d′·2⁶³)
    leaves float32's range. So no weight comes below 2⁻⁶³; a NaN makes its whole four NaN, or its neighbour's.
    """
    code = ".reg .b32 x, y, r;"
    for k in range(n):
        code += f" fma.rn.sat.f32 ${k}, ${k}, 0f20000000, 0f20000000;"
    for k in range(0, n, 8):
        for a, b, c, d in ((k, k + 1, k + 4, k + 5), (k + 2, k + 3, k + 6, k + 7)):
            code += f" mul.f32 x, ${a}, ${b}; mul.f32 x, x, 0f5F000000;"
            code += f" mul.f32 y, ${c}, ${d}; mul.f32 y, y, 0f5F000000;"
            code += " mul.f32 r, x, y; rcp.approx.ftz.f32 r, r; mul.f32 y, y, r; mul.f32 x, x, r;"
            code += f" mul.f32 r, y, ${b}; mul.f32 ${b}, y, ${a}; mov.b32 ${a}, r;"
            code += f" mul.f32 r, x, ${d}; mul.f32 ${d}, x, ${c}; mov.b32 ${c}, r;"
    return f"{{ {code} }}"


@gluon.constexpr_function
def in_place(n):
    return ",".join(["=r"] * n + [str(k) for k in range(n)])


@gluon.jit
def shared(odds):
    N: gl.constexpr = odds.shape[0] * odds.shape[1] * 8 // 128
    return gl.inline_asm_elementwise(sharing(N), in_place(N), [odds], gl.float32, True, N)


@gluon.jit
def rounded(u, dtype: gl.constexpr, F: gl.constexpr):
    """u in 16 bits; a signed one clipped at 0."""
    if F.signed is None:
        p = u.to(dtype)
    elif dtype == gl.bfloat16:
        p = gl.inline_asm_elementwise("cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [u], gl.bfloat16, True, 2)
    else:
        p = gl.inline_asm_elementwise("cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,r,r", [u], gl.float16, True, 2)
    return p


@gluon.jit
def stretch(u, sum_u, ahead, start, r0, C: gl.constexpr, EDGE: gl.constexpr):
    """Σ u·|i − j|, i − j = ahead − octet. Where the keys lie to one side of the rows the row's part leaves the sum;

    where they lie around it, a distance may be small and each is taken by itself.
    """
    if EDGE and C.BEHIND:
        far = down(u * (ahead - octet(u)).to(gl.float32))
    else:
        far = gl.sum(gl.sum(ahead.to(gl.float32), 1) * sum_u - gl.sum(u * octet(u).to(gl.float32), 1), 2)
        if not C.BEHIND:
            far = far * gl.where(start <= r0, 1.0, -1.0)
            if start == r0 // C.BN * C.BN:
                far = down(u * gl.abs(ahead - octet(u)).to(gl.float32))
    return far


@gluon.constexpr_function
def comparing(n):
    """The largest of each of a thread's two rows into every $k: n numbers, the rows by turns of two.

    Floats compare as integers, three in one instruction, if the largest is not negative; else once more, as floats.
    """
    code = ".reg .b32 a, b; .reg .pred p, q;"
    rows = {"a": [k for k in range(n) if k % 4 < 2], "b": [k for k in range(n) if k % 4 >= 2]}
    for kind, then in (
        ("s32", "setp.lt.s32 p, a, 0; setp.lt.s32 q, b, 0; or.pred p, p, q; @!p bra DONE;"),
        ("f32", "DONE:"),
    ):
        for name, row in rows.items():
            code += f" max.{kind} {name}, ${n + row[0]}, ${n + row[1]};"
            code += "".join(f" max.{kind} {name}, {name}, ${n + k};" for k in row[2:])
        code += f" {then}"
    return "{ " + code + "".join(f" mov.b32 ${k}, {name};" for name, row in rows.items() for k in row) + " }"


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


@gluon.jit
def pinned(r):
    """The same sums, finished here: left alone, ptxas moves them behind the wait that they are meant to fill."""
    CODE: gl.constexpr = """{ .reg .b32 x, y; .reg .pred p;
        xor.b32 x, $1, $2; xor.b32 y, $3, $4; xor.b32 x, x, $5; xor.b32 x, x, y; xor.b32 x, x, $6;
        setp.eq.b32 p, x, 0x7fabcdef; @p nanosleep.u32 1; mov.b32 $0, $1; }"""
    sums = [r.z, r.log_u, r.square, r.distance, r.mean, r.m2]
    z = gl.inline_asm_elementwise(CODE, "=r,r,r,r,r,r,r", sums, gl.float32, False, 1)
    return Tally(r.top, r.frame, z, r.log_u, r.square, r.distance, r.mean, r.m2, r.first)


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
    """o·fade [M]; skipped by the warps where fade is 1 in every row."""
    N: gl.constexpr = o.shape[0] * o.shape[1] // 128
    o, fade = gl.broadcast(o, gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, o.type.layout)), 1))
    return gl.inline_asm_elementwise(fading(N), fading_registers(N), [o, fade], gl.float32, True, N)
