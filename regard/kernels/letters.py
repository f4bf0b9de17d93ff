"""Sums that the programs of a row send one another: letters [rows, 2 turns, PARTS, 3] of words, −1 until they come.

A letter is (top, z in two floats). No word of it is −1, so that each says itself that it has come, and nobody counts.
Gluon.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from regard.kernels.rows_exact import halves


@gluon.jit
def publish(top, z, turn: gl.constexpr, letters, row, C: gl.constexpr):
    """Tell the row's other programs (top, z) of this part."""
    near, rest = halves(z.to(gl.float64))
    place = letters + ((row * 2 + turn) * C.PARTS + gl.program_id(0) % C.PARTS) * 3
    gl.atomic_xchg(place, word(top), sem="relaxed", scope="gpu")
    gl.atomic_xchg(place + 1, word(near), sem="relaxed", scope="gpu")
    gl.atomic_xchg(place + 2, word(rest), sem="relaxed", scope="gpu")


@gluon.jit
def word(x):
    """The bits of a float, which are never −1."""
    bits = x.to(gl.int32, bitcast=True)
    return gl.where(bits == -1, 0x7FC00000, bits)


@gluon.jit
def read(turn: gl.constexpr, letters, row, C: gl.constexpr):
    """The words of all parts of a row, as far as they have come."""
    WORDS: gl.constexpr = 3 * C.PARTS
    words = ()
    for i in gl.static_range(WORDS):
        words += (gl.load(letters + (row * 2 + turn) * WORDS + i, volatile=True),)
    return words


@gluon.jit
def missing(words, C: gl.constexpr):
    """Has a word not come?"""
    WORDS: gl.constexpr = 3 * C.PARTS
    some = words[0] == -1
    for i in gl.static_range(1, WORDS):
        some = some | (words[i] == -1)
    return some
