"""Primitives that are one LLVM instruction: no branch, no call; sums in any order."""

from __future__ import annotations

from llvmlite import ir
from numba import types
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
