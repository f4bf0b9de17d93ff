"""Primitives written in LLVM's own language: single instructions, then what works on whole vectors.

The first are one instruction each, without a branch or a call. LLVM finds vectors in plain loops by itself; the others
are patterns that it does not find: packing the entries above a bound, and sixteen interleaved rows at once.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


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


def _append_kept(context, builder, kind, values, kept, out, count):
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


def _splat(builder, value, lanes):
    """A vector with `value` in every lane."""
    vector = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))


def _load_vector(context, builder, kind, array, start):
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
        row = _load_vector(context, builder, x, args[0], args[1])
        row = builder.fsub(row, _splat(builder, args[2], row.type.count))
        kept = builder.fcmp_ordered(">", row, _splat(builder, args[3], row.type.count))
        return _append_kept(context, builder, out, row, kept, args[4], args[5])

    index = types.intp
    return index(x, index, x.dtype, x.dtype, out, index), build


@intrinsic
def compress_index(typing, x, start, bound, out, count):
    """Append to out[count:] the indices, as `bits`, of those of x[start:start + L] that exceed bound; the new count."""

    def build(context, builder, signature, args):
        row = _load_vector(context, builder, x, args[0], args[1])
        lanes, whole = row.type.count, ir.IntType(x.dtype.bitwidth)
        kept = builder.fcmp_ordered(">", row, _splat(builder, args[2], lanes))
        start = builder.trunc(args[1], whole) if whole.width < 64 else args[1]
        offsets = ir.Constant(ir.VectorType(whole, lanes), list(range(lanes)))
        indices = builder.add(_splat(builder, start, lanes), offsets)
        return _append_kept(context, builder, out, indices, kept, args[3], args[4])

    index = types.intp
    return index(x, index, x.dtype, out, index), build


SIDE = 16  # rows in one vector
UNROLL = 4  # chains of dependent additions that run beside each other


def _fold_rows(context, builder, kind, x, n, totals, step, merge, change=None):
    """Fold step(totals, entry) over the n entries of SIDE interleaved rows; the totals stay in registers.

    Every UNROLL-th entry goes to the same totals; `merge` makes one of two. `change` replaces an entry first, for good.
    """
    vector = ir.VectorType(context.get_value_type(kind.dtype), SIDE)
    data = context.make_array(kind)(context, builder, x).data
    chains = [[cgutils.alloca_once_value(builder, total) for total in totals] for _ in range(UNROLL)]

    def add_entry(places, index):
        place = builder.gep(data, [builder.mul(index, ir.Constant(n.type, SIDE))])
        place = builder.bitcast(place, vector.as_pointer())
        entry = builder.load(place, align=4)
        if change is not None:
            entry = change(entry)
            builder.store(entry, place, align=4)
        for place, total in zip(places, step([builder.load(place) for place in places], entry), strict=True):
            builder.store(total, place)

    unroll = ir.Constant(n.type, UNROLL)
    whole = builder.mul(builder.sdiv(n, unroll), unroll)
    with cgutils.for_range_slice(builder, ir.Constant(n.type, 0), whole, unroll) as (index, _):
        for k, places in enumerate(chains):
            add_entry(places, builder.add(index, ir.Constant(n.type, k)))
    with cgutils.for_range_slice(builder, whole, n, ir.Constant(n.type, 1)) as (index, _):
        add_entry(chains[0], index)
    found = [[builder.load(place) for place in places] for places in chains]
    while len(found) > 1:
        found = [merge(a, b) for a, b in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def _row_pointer(context, builder, kind, array, row):
    """A pointer to row `row` of SIDE entries of an array, as a vector."""
    vector = ir.VectorType(context.get_value_type(kind.dtype), SIDE)
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [ir.Constant(ir.IntType(64), row * SIDE)]), vector.as_pointer())


def _vector_call(builder, name, kind, values):
    name = f"{name}.v{SIDE}f{kind.bitwidth}"
    function = ir.FunctionType(values[0].type, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), values, fastmath=("nsz",))


@intrinsic
def side_interleave(typing, x, start, n, out):
    """out[j·SIDE + l] ← x[start + l·n + j] for the columns j in whole blocks of SIDE; no others."""

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

        def merge(a, b):
            return step(a, b[0])

        (top,) = _fold_rows(context, builder, x, args[0], args[1], [low], step, merge)
        builder.store(top, _row_pointer(context, builder, out, args[2], 0), align=4)
        return context.get_dummy_value()

    return types.void(x, types.intp, out), build


def _moments(context, builder, kind, array, n, level, order, out, change=None):
    """out[k·SIDE + l] ← Σ_j tᵏ for k = 0 … order over t = x[j·SIDE + l] − level[l] > 0."""
    vector = level.type
    zero, one = ir.Constant(vector, [0.0] * SIDE), ir.Constant(vector, [1.0] * SIDE)

    def step(totals, entry):
        t = builder.fsub(entry, level)
        above = builder.fcmp_ordered(">", t, zero)
        more = [builder.fadd(totals[0], one), builder.fadd(totals[1], t)]
        if order == 2:
            more.append(_vector_call(builder, "llvm.fma", kind.dtype, [t, t, totals[2]]))
        return [builder.select(above, new, old) for new, old in zip(more, totals, strict=True)]  # masked additions

    def merge(a, b):
        return [builder.fadd(left, right) for left, right in zip(a, b, strict=True)]

    totals = _fold_rows(context, builder, kind, array, n, [zero] * (order + 1), step, merge, change)
    for row, total in enumerate(totals):
        builder.store(total, _row_pointer(context, builder, kind, out, row), align=4)
    return context.get_dummy_value()


@intrinsic
def side_moments(typing, x, n, tau, order, out):
    """out[k·SIDE + l] ← Σ_j tᵏ for k = 0 … order over t = x[j·SIDE + l] − tau[l] > 0; order: 1 or 2, a literal."""
    if not isinstance(order, types.IntegerLiteral):
        return None

    def build(context, builder, signature, args):
        level = builder.load(_row_pointer(context, builder, tau, args[2], 0), align=4)
        return _moments(context, builder, x, args[0], args[1], level, order.literal_value, args[4])

    return types.void(x, types.intp, tau, order, out), build


@intrinsic
def side_begin(typing, x, n, top, factor, order, out):
    """x[j·SIDE + l] ← (x[j·SIDE + l] − top[l])·factor, and `side_moments` of that at τ = −1."""
    if not isinstance(order, types.IntegerLiteral):
        return None

    def build(context, builder, signature, args):
        highest = builder.load(_row_pointer(context, builder, top, args[2], 0), align=4)
        scale, level = _splat(builder, args[3], SIDE), ir.Constant(highest.type, [-1.0] * SIDE)

        def change(entry):
            return builder.fmul(builder.fsub(entry, highest), scale)

        return _moments(context, builder, x, args[0], args[1], level, order.literal_value, args[5], change)

    return types.void(x, types.intp, top, x.dtype, order, out), build
