"""The numba dialect of the tile language: `abs exp exp2 log log2 maximum minimum sqrt where`, and words for loops.

    exp(x) = 2ⁿ·P(r),   n = round(x / ln 2),   r = x − n·ln 2        straight-line code: no branch, no call

so that LLVM turns a loop over a row into vectors. Additions keep the order in which they are written, except in
`accumulate`, which says that a sum may be taken in any order: kernels can lean on s − m being exact and still sum
sixteen lanes at once.

This module needs numba; only compiled kernels import it.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

__all__ = ["abs", "accumulate", "exp", "exp2", "log", "log2", "maximum", "minimum", "sqrt", "where"]

STRICT = {"fastmath": {"contract"}, "error_model": "numpy", "forceinline": True}

abs = abs
sqrt = math.sqrt


def _extremum(name: str):
    @intrinsic
    def word(typing, a, b):
        real = typing.unify_types(a, b)

        def build(context, builder, signature, args):
            kind = context.get_value_type(real)
            function = builder.module.declare_intrinsic(name, [kind], ir.FunctionType(kind, [kind, kind]))
            values = [context.cast(builder, value, was, real) for value, was in zip(args, signature.args, strict=True)]
            return builder.call(function, values, fastmath=("nsz",))

        return real(a, b), build

    return word


maximum = _extremum("llvm.maximum")  # NaN if either is; a loop of these becomes vectors
minimum = _extremum("llvm.minimum")


@intrinsic
def where(typing, condition, a, b):
    """a if condition else b, both computed: never a branch."""
    kind = typing.unify_types(a, b)

    def build(context, builder, signature, args):
        values = [context.cast(builder, value, was, kind) for value, was in zip(args[1:], (a, b), strict=True)]
        return builder.select(args[0], *values)

    return kind(types.boolean, a, b), build


@intrinsic
def accumulate(typing, total, term):
    """total + term, where the order of the additions does not matter: a loop of these becomes vectors."""

    def build(context, builder, signature, args):
        term = context.cast(builder, args[1], signature.args[1], signature.args[0])
        return builder.fadd(args[0], term, flags=("reassoc", "nsz", "contract"))

    return total(total, term), build


@intrinsic
def multiply_add(typing, a, b, c):
    """a·b + c, rounded once."""

    def build(context, builder, signature, args):
        kind = context.get_value_type(a)
        function = builder.module.declare_intrinsic("llvm.fma", [kind], ir.FunctionType(kind, [kind] * 3))
        return builder.call(function, args)

    return a(a, a, a), build


@intrinsic
def bits(typing, x):
    """The bits of a float, as a signed integer of the same width."""
    whole = types.int32 if x == types.float32 else types.int64

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(whole))

    return whole(x), build


@intrinsic
def from_bits(typing, n):
    """The float whose bits are those of the signed integer."""
    real = types.float32 if n == types.int32 else types.float64

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(real))

    return real(n), build


def _pack(context, builder, kind, values, kept, out, count):
    """Write the kept lanes of `values` side by side at out[count:]; returns the new count."""
    lanes = values.type.count
    element = "f" if isinstance(values.type.element, (ir.FloatType, ir.DoubleType)) else "i"
    name = f"llvm.experimental.vector.compress.v{lanes}{element}{kind.dtype.bitwidth}"
    packing = ir.FunctionType(values.type, [values.type, kept.type, values.type])
    packed = builder.call(cgutils.get_or_insert_function(builder.module, packing, name), [values, kept, values])
    place = builder.gep(context.make_array(kind)(context, builder, out).data, [count])
    builder.store(packed, builder.bitcast(place, values.type.as_pointer()), align=1)
    number = builder.ctpop(builder.bitcast(kept, ir.IntType(lanes)))
    return builder.add(count, builder.zext(number, count.type))


def _spread(builder, value, lanes):
    vector = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))


def _block(context, builder, kind, array, start):
    """The vector x[start:start + L], 512 bits."""
    vector = ir.VectorType(context.get_value_type(kind.dtype), 512 // kind.dtype.bitwidth)
    place = builder.gep(context.make_array(kind)(context, builder, array).data, [start])
    return builder.load(builder.bitcast(place, vector.as_pointer()), align=1)


@intrinsic
def compress(typing, x, start, shift, bound, out, count):
    """Append to out[count:] those of x[start:start + L] − shift that exceed bound; returns the new count.

    L is 16 for float32 and 8 for float64. L entries are written, so `out` needs that much room behind its last one.
    """

    def build(context, builder, signature, args):
        row = _block(context, builder, x, args[0], args[1])
        row = builder.fsub(row, _spread(builder, args[2], row.type.count))
        kept = builder.fcmp_ordered(">", row, _spread(builder, args[3], row.type.count))
        return _pack(context, builder, out, row, kept, args[4], args[5])

    index = types.intp
    return index(x, index, x.dtype, x.dtype, out, index), build


@intrinsic
def compress_index(typing, x, start, bound, out, count):
    """Append to out[count:] the indices, as `bits`, of those of x[start:start + L] that exceed bound; the new count."""

    def build(context, builder, signature, args):
        row = _block(context, builder, x, args[0], args[1])
        lanes, whole = row.type.count, ir.IntType(x.dtype.bitwidth)
        kept = builder.fcmp_ordered(">", row, _spread(builder, args[2], lanes))
        start = builder.trunc(args[1], whole) if whole.width < 64 else args[1]
        offsets = ir.Constant(ir.VectorType(whole, lanes), list(range(lanes)))
        return _pack(context, builder, out, builder.add(_spread(builder, start, lanes), offsets), kept, args[3], args[4])

    index = types.intp
    return index(x, index, x.dtype, out, index), build


SIDE = 16  # rows side by side in the two words below


def _side_by_side(context, builder, kind, x, n, totals, step):
    """Fold step(totals, entry) over the n entries of SIDE interleaved rows; the totals stay in registers."""
    vector = ir.VectorType(context.get_value_type(kind.dtype), SIDE)
    data = context.make_array(kind)(context, builder, x).data
    places = [cgutils.alloca_once_value(builder, total) for total in totals]
    with cgutils.for_range(builder, n) as loop:
        entry = builder.gep(data, [builder.mul(loop.index, ir.Constant(n.type, SIDE))])
        entry = builder.load(builder.bitcast(entry, vector.as_pointer()), align=4)
        for place, total in zip(places, step([builder.load(place) for place in places], entry), strict=True):
            builder.store(total, place)
    return [builder.load(place) for place in places]


def _lanes(context, builder, kind, array, row):
    """Where row `row` of SIDE entries lies in an array, as a vector."""
    vector = ir.VectorType(context.get_value_type(kind.dtype), SIDE)
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [ir.Constant(ir.IntType(64), row * SIDE)]), vector.as_pointer())


def _vector_call(builder, name, kind, values):
    name = f"{name}.v{SIDE}f{kind.bitwidth}"
    function = ir.FunctionType(values[0].type, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), values, fastmath=("nsz",))


@intrinsic
def side_interleave(typing, x, start, n, out):
    """out[j·SIDE + l] ← x[start + l·n + j] for the columns j in whole blocks of SIDE; the rest is left to the caller."""

    def build(context, builder, signature, args):
        array, start, n, target = args
        real, whole = context.get_value_type(x.dtype), start.type
        vector = ir.VectorType(real, SIDE)
        data = context.make_array(x)(context, builder, array).data
        place = context.make_array(out)(context, builder, target).data
        side = ir.Constant(whole, SIDE)

        def vector_at(pointer, index):
            return builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())

        with cgutils.for_range(builder, builder.sdiv(n, side)) as loop:
            column = builder.mul(loop.index, side)
            rows = []
            for lane in range(SIDE):
                index = builder.add(builder.add(start, column), builder.mul(n, ir.Constant(whole, lane)))
                rows.append(builder.load(vector_at(data, index), align=4))
            for half in (1, 2, 4, 8):  # swap ever larger off-diagonal blocks
                swapped = list(rows)
                for a in range(SIDE):
                    if a & half:
                        continue
                    low = [lane if not lane & half else SIDE + lane - half for lane in range(SIDE)]
                    high = [lane + half if not lane & half else SIDE + lane for lane in range(SIDE)]
                    for into, order in ((a, low), (a + half, high)):
                        chosen = ir.Constant(ir.VectorType(ir.IntType(32), SIDE), order)
                        swapped[into] = builder.shuffle_vector(rows[a], rows[a + half], chosen)
                rows = swapped
            for lane, row in enumerate(rows):
                index = builder.mul(builder.add(column, ir.Constant(whole, lane)), side)
                builder.store(row, vector_at(place, index), align=4)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, out), build


@intrinsic
def side_maximum(typing, x, n, out):
    """out[l] ← max_j x[j·SIDE + l], NaN if any is."""

    def build(context, builder, signature, args):
        vector = ir.VectorType(context.get_value_type(x.dtype), SIDE)
        low = ir.Constant(vector, [float("-inf")] * SIDE)

        def step(totals, entry):
            return [_vector_call(builder, "llvm.maximum", x.dtype, [totals[0], entry])]

        (top,) = _side_by_side(context, builder, x, args[0], args[1], [low], step)
        builder.store(top, _lanes(context, builder, out, args[2], 0), align=4)
        return context.get_dummy_value()

    return types.void(x, types.intp, out), build


@intrinsic
def side_moments(typing, x, n, tau, out):
    """out[k·SIDE + l] ← Σ_j tᵏ for k = 0, 1, 2 over the t = x[j·SIDE + l] − tau[l] that are positive."""

    def build(context, builder, signature, args):
        vector = ir.VectorType(context.get_value_type(x.dtype), SIDE)
        zero, one = ir.Constant(vector, [0.0] * SIDE), ir.Constant(vector, [1.0] * SIDE)
        level = builder.load(_lanes(context, builder, tau, args[2], 0), align=4)

        def step(totals, entry):
            t = builder.fsub(entry, level)
            above = builder.fcmp_ordered(">", t, zero)
            t = builder.select(above, t, zero)
            square = _vector_call(builder, "llvm.fma", x.dtype, [t, t, totals[2]])
            return [builder.fadd(totals[0], builder.select(above, one, zero)), builder.fadd(totals[1], t), square]

        totals = _side_by_side(context, builder, x, args[0], args[1], [zero] * 3, step)
        for row, total in enumerate(totals):
            builder.store(total, _lanes(context, builder, out, args[3], row), align=4)
        return context.get_dummy_value()

    return types.void(x, types.intp, tau, out), build


@intrinsic
def widen_float16(typing, n):
    """The float32 equal to the float16 whose bits are `n`, an int16."""

    def build(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), build


@intrinsic
def narrow_float16(typing, x):
    """The bits, an int16, of the float16 nearest to a float32."""

    def build(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), build


def same(x): ...
def index_float32(j): ...
def index_float64(j): ...
def widen_bfloat16(n): ...
def narrow_bfloat16(x): ...


@overload(index_float32, jit_options=STRICT)
def _index_float32(j):
    return lambda j: np.int32(j)


@overload(index_float64, jit_options=STRICT)
def _index_float64(j):
    return lambda j: np.int64(j)


@overload(same, jit_options=STRICT)
def _same(x):
    return lambda x: x


@overload(widen_bfloat16, jit_options=STRICT)
def _widen_bfloat16(n):
    return lambda n: from_bits(np.int32(np.int32(n) << 16))


@overload(narrow_bfloat16, jit_options=STRICT)
def _narrow_bfloat16(x):
    def body(x):
        n = bits(x)
        nearest = (n + 0x7FFF + ((n >> 16) & 1)) >> 16  # ties to even
        return np.int16(nearest if x == x else 0x7FC0)

    return body


def exp(x): ...
def decay(x): ...  # exp(x) for x ≤ 0
def exp2(x): ...
def log(x): ...
def log2(x): ...


# exp(r) = 1 + r + C₂r² + … on |r| ≤ ln 2 / 2, minimax with error 3e-9; doubled, as the power of two is halved
E32 = tuple(np.float32(2 * c) for c in (1, 1, 0.49999994, 0.16666520, 0.041668393, 0.0083687808, 0.0013814467))
E64 = tuple(2.0 / math.factorial(k) for k in range(14))
MAGIC32, MAGIC64 = np.float32(1.5 * 2**23), 1.5 * 2**52  # adding it rounds to an integer, which its low bits then hold
LOG2E32, LOG2E64 = np.float32(1 / math.log(2)), 1 / math.log(2)
LN2_32, LN2_64 = np.float32(math.log(2)), math.log(2)
HIGH32, LOW32 = np.float32(0.693359375), np.float32(-2.12194440e-4)  # ln 2 in two parts; n·HIGH is exact
HIGH64, LOW64 = 6.93147180369123816490e-01, 1.90821492927058770002e-10
INF32, ZERO32 = np.float32(math.inf), np.float32(0)
SMALL32, LARGE32 = np.float32(-86.98), np.float32(88.722839)  # below: 0 (1.8e-38 is the smallest power); above: inf
SMALL64, LARGE64 = -707.7, 709.782712893384


@overload(decay, jit_options=STRICT)
def _decay(x):
    if x == types.float32:

        def body(x):
            t = x * LOG2E32 + MAGIC32
            n = t - MAGIC32
            r = (x - n * HIGH32) - n * LOW32
            half = from_bits(np.int32((bits(t) + 126) << 23))
            return where(x < SMALL32, ZERO32, _power_series32(r) * half)

        return body

    def body(x):
        t = x * LOG2E64 + MAGIC64
        n = t - MAGIC64
        r = (x - n * HIGH64) - n * LOW64
        half = from_bits((bits(t) + 1022) << 52)
        return where(x < SMALL64, 0.0, _power_series64(r) * half)

    return body


@overload(exp, jit_options=STRICT)
def _exp(x):
    infinity, large = (INF32, LARGE32) if x == types.float32 else (math.inf, LARGE64)
    return lambda x: where(x >= large, infinity, decay(x))


@overload(exp2, jit_options=STRICT)
def _exp2(x):
    if x == types.float32:

        def body(x):
            t = x + MAGIC32
            half = from_bits(np.int32((bits(t) + 126) << 23))
            return _bounded(x, _power_series32((x - (t - MAGIC32)) * LN2_32) * half, np.float32(-125.5), np.float32(128))

        return body

    def body(x):
        t = x + MAGIC64
        half = from_bits((bits(t) + 1022) << 52)
        return _bounded(x, _power_series64((x - (t - MAGIC64)) * LN2_64) * half, -1021.5, 1024.0)

    return body


def _bounded(x, y, low, high): ...
def _power_series32(r): ...
def _power_series64(r): ...
def _log_parts32(x): ...


@overload(_bounded, jit_options=STRICT)
def _bounded_body(x, y, low, high):
    zero, infinity = (ZERO32, INF32) if x == types.float32 else (0.0, math.inf)

    def body(x, y, low, high):
        y = zero if x < low else y
        return infinity if x >= high else y

    return body


@overload(_power_series32, jit_options=STRICT)
def _power_series32_body(r):
    def body(r):
        q = ((((E32[6] * r + E32[5]) * r + E32[4]) * r + E32[3]) * r + E32[2]) * (r * r)
        high = E32[0] + E32[1] * r
        return high + ((E32[1] * r - (high - E32[0])) + q)  # what rounding took from `high` comes back

    return body


@overload(_power_series64, jit_options=STRICT)
def _power_series64_body(r):
    def body(r):
        q = E64[13]
        for k in range(12, 1, -1):
            q = q * r + E64[k]
        return E64[0] + (E64[1] * r + q * (r * r))

    return body


# log(1 + f) = f − f²/2 + f³(…) for 1 + f between √½ and √2, minimax with relative error 6e-9
L32 = tuple(
    np.float32(c)
    for c in (0.33333331, -0.25000820, 0.20001227, -0.16623357, 0.14201757, -0.13160183, 0.12761578, -0.07634497)
)
TINY32, LIFT32, LIFTED32 = np.float32(2.0**-126), np.float32(2.0**24), np.float32(24)
HALF32, ROOT_HALF_BITS = np.float32(0.5), int(np.float32(math.sqrt(0.5)).view(np.int32))
ONE32, ONE_BITS = np.float32(1), int(np.float32(1).view(np.int32))


@overload(_log_parts32, jit_options=STRICT)
def _log_parts32_body(x):
    """(n, log(1 + f)) with x = 2ⁿ(1 + f)."""

    def body(x):
        small = x < TINY32
        lifted = x * LIFT32 if small else x
        n = np.int32(bits(lifted) - ROOT_HALF_BITS) >> 23
        f = from_bits(np.int32(bits(lifted) - (n << 23))) - ONE32
        p = L32[7]
        for k in range(6, -1, -1):
            p = p * f + L32[k]
        square = f * f
        return np.float32(np.int32(n)) - (LIFTED32 if small else ZERO32), f + (p * f * square - HALF32 * square)

    return body


def _log_edges(x, y): ...


@overload(_log_edges, jit_options=STRICT)
def _log_edges_body(x, y):
    def body(x, y):
        y = y if x > ZERO32 else (-INF32 if x == ZERO32 else np.float32(math.nan))
        return x if x == INF32 else y

    return body


@overload(log, jit_options=STRICT)
def _log(x):
    if x == types.float32:

        def body(x):
            n, l = _log_parts32(x)
            return _log_edges(x, n * HIGH32 + (n * LOW32 + l))

        return body
    return lambda x: math.log(x)


@overload(log2, jit_options=STRICT)
def _log2(x):
    if x == types.float32:

        def body(x):
            n, l = _log_parts32(x)
            return _log_edges(x, n + l * LOG2E32)

        return body
    return lambda x: math.log2(x)
