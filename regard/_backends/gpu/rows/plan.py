"""The table of row kernels, in order of preference, with the launch numbers of each.

`choose` takes the first kernel that supports the rows. All numbers are what was fastest on an H200.

>>> kernel, cut = choose(Rows("forward", "softmax", count=1000, length=50257, size=2, processors=132))
>>> kernel.name, cut.columns, cut.warps
('forward_ratio', 65536, 32)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

SHORT = 1024  # columns of rows that share a warp


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n.

    >>> [next_power_of_2(n) for n in (0, 1, 2, 3, 1000)]
    [1, 1, 2, 4, 1024]
    """
    return 1 << max(n - 1, 0).bit_length()


class Rows(NamedTuple):
    """The facts about a call on `count` rows of `length` numbers that decide which kernel computes it."""

    direction: str  # "forward", "from weights" or "from scores": what backward starts from
    kind: str  # the family, or of a ratio "softmax" if u = exp(s), "proportional" if u is to the scores
    count: int
    length: int
    size: int  # bytes of a number
    processors: int  # SMs

    @property
    def columns(self) -> int:
        """The length of a tile that holds a row."""
        return max(next_power_of_2(self.length), 16)

    @property
    def few(self) -> bool:
        """True if long rows are shared by several programs, so that every SM has work."""
        return self.processors > 2 * self.count

    def fits(self, longest: dict[int, int]) -> bool:
        """True if one program takes a whole row of at most longest[size] columns."""
        return self.columns <= longest[self.size] and not (self.few and self.columns > 8192)


class Cut(NamedTuple):
    """The launch numbers of a tile kernel: the tile of a program, and how many programs share a row."""

    columns: int
    warps: int
    rows: int = 1
    parts: int = 1
    meets: bool = False  # the programs of a row wait for one another; else two launches read it twice
    registers: int | None = None  # limit per thread, so that several programs share an SM
    again: bool = False  # the tile is read again from the cache instead of held
    step: int = 0  # columns that a program takes at a time
    lanes: int = 0  # columns side by side: in the lanes of a row, or in all threads
    ahead: int = 0  # prefetch into the L2 cache the tile of the program that many programs later

    def groups(self, vector: int, order: int) -> int:
        """Number of maxima that the threshold solver starts from, per part; 0 for a short row."""
        if self.columns <= 512 and self.parts == 1:
            return 0
        if self.columns == 65536 and order == 2:
            return 2048
        return min(self.columns // vector, 32 * self.warps, max(512 // next_power_of_2(self.parts), 16))


class RowKernel(NamedTuple):
    """A row of the table."""

    name: str
    module: str  # below regard._backends.gpu.rows
    takes: str  # in plain words, what `condition` says
    condition: Callable[[Rows], bool]
    cut: Callable[[Rows], Cut]
    published: int = 0  # numbers that each part of a shared row publishes

    def supports(self, rows: Rows) -> str | None:
        """None, or why the kernel cannot take the rows."""
        return None if self.condition(rows) else f"takes only {self.takes}"


def _share(rows: Rows, columns: int, warps: int, registers: int | None, **more) -> Cut:
    """Splits rows into parts of some columns.

    Waiting programs occupy SMs: at most an eighth of them, so that other streams cannot starve a row's last part.
    """
    parts = -(-rows.length // columns)
    meets = parts <= rows.processors // 8
    return Cut(columns, warps, parts=parts, meets=meets, registers=registers, **more)


def _pack(rows: Rows, most: int, held: int, **more) -> Cut:
    """Gives a program as many rows as `most` columns hold, at least one, and a thread `held` numbers."""
    count = max(1, min(most // rows.columns, next_power_of_2(rows.count)))
    return Cut(rows.columns, min(max(count * rows.columns // (32 * held), 1), 32), count, **more)


def _pack_warp(rows: Rows) -> Cut:
    """Gives a warp as many short rows as its lanes hold."""
    threads = max(rows.columns // 32, 1)
    return Cut(rows.columns, 1, min(32 // threads, next_power_of_2(rows.count)), lanes=threads * 16 // rows.size)


def _cut_exact(rows: Rows) -> Cut:
    # float64 exponentials take two registers each: one or two programs fill an SM, and later tiles wait in the L2 cache
    columns = rows.columns
    if columns <= SHORT:
        return _pack_warp(rows)
    if columns <= 8192:
        ahead = 16384 // columns * rows.processors
        return Cut(columns, columns // 1024, registers=128, lanes=columns, ahead=ahead)
    return _share(rows, 8192, 8, 128, lanes=8192, ahead=2 * rows.processors)


def _cut_pointwise(rows: Rows) -> Cut:
    if rows.few:
        return _share(rows, 8192, 8, 64, step=4096)
    half = rows.size == 2
    return Cut(rows.columns, 8, registers=40 if half else 32, step=4096 if half else 2048)


def _cut_ratio(rows: Rows) -> Cut:
    columns, half, pointwise = rows.columns, rows.size == 2, rows.kind == "pointwise"
    if columns <= 4096:
        return _pack(rows, 2048, 32)
    if rows.fits({2: 32768 if pointwise else 65536, 4: 32768, 8: 16384}):
        if half and columns == 32768 and rows.kind == "softmax":
            return Cut(columns, 16, registers=64, again=True)
        fills = half and columns == 32768 and not pointwise  # one program fills an SM
        ahead = rows.processors if fills else 0
        return _pack(rows, columns, 32, registers=64, again=columns == 65536, ahead=ahead)
    if half and not rows.few:
        return _share(rows, 32768, 16, 64, again=True)
    return _share(rows, 8192, 16 if rows.kind == "ratio" else 8, 64)


def _cut_threshold(rows: Rows) -> Cut:
    columns = rows.columns
    if not rows.fits({2: 65536, 4: 65536, 8: 16384}):
        return _share(rows, 8192, 8, None)
    again = rows.size == 2 or columns in (16384, 65536)
    return _pack(rows, columns, 64, registers=64 if again and columns > 16384 else None, again=again)


def _cut_backward(rows: Rows) -> Cut:
    columns, half = rows.columns, rows.size == 2
    fits = rows.fits({2: 32768, 4: 16384, 8: 8192})
    if rows.direction == "from weights":
        return _pack(rows, 2048, 32) if fits else _share(rows, 8192, 8, 80)
    if not fits:
        return _share(rows, 8192, 8 if half else 16, 64, again=half)
    most, held = (1024 if columns < 1024 else 2048), (32 if half and columns >= 1024 else 16)
    return _pack(rows, most, held, registers=64, again=half)


def _is_softmax32(rows: Rows) -> bool:
    return rows.kind == "softmax" and rows.size == 4 and rows.direction != "from scores"


def _is_threshold(rows: Rows) -> bool:
    return rows.kind == "threshold"


def _is_long_pointwise(rows: Rows) -> bool:
    longest = 8192 if rows.few else {2: 16384, 4: 32768, 8: 16384}[rows.size]
    return rows.kind == "pointwise" and rows.columns > longest


FORWARD = (
    RowKernel("forward_exact", "exact", "float32 softmax and softmax1", _is_softmax32, _cut_exact, 3),
    RowKernel(
        "forward_threshold_short", "threshold", "threshold rows of up to 1024 columns",
        lambda rows: _is_threshold(rows) and rows.columns <= SHORT, _pack_warp,
    ),
    RowKernel("forward_threshold", "threshold", "threshold rows", _is_threshold, _cut_threshold, 6),
    RowKernel(
        "forward_pointwise", "ratio",
        "pointwise rows of more than 32768 columns (16384 in 16 and 64 bits; 8192 if the rows are few)",
        _is_long_pointwise, _cut_pointwise, 2,
    ),
    RowKernel("forward_ratio", "ratio", "ratio and pointwise rows", lambda rows: True, _cut_ratio, 2),
)  # fmt: skip
BACKWARD = (
    RowKernel("backward_exact", "exact", "float32 softmax and softmax1", _is_softmax32, _cut_backward, 2),
    RowKernel("backward_threshold", "threshold", "threshold rows", _is_threshold, _cut_backward, 2),
    RowKernel("backward_ratio", "ratio", "ratio and pointwise rows", lambda rows: True, _cut_backward, 1),
)  # fmt: skip


@functools.lru_cache(4096)
def choose(rows: Rows) -> tuple[RowKernel, Cut]:
    """The first kernel that supports the rows, and its launch numbers."""
    kernel = next(k for k in (FORWARD if rows.direction == "forward" else BACKWARD) if k.supports(rows) is None)
    cut = kernel.cut(rows)
    if rows.size == 8:
        cut = cut._replace(registers=None)  # a float64 takes two registers
    return kernel, cut


def document_kernels() -> Iterator[str]:
    """The table of kernels for docs/developers/kernels-rows.md, line by line."""
    yield "| kernel | file below `rows/` | rows that it takes, if none above does |"
    yield "| --- | --- | --- |"
    for kernel in (*FORWARD, *BACKWARD):
        yield f"| `{kernel.name}` | `{kernel.module.replace('.', '/')}.py` | {kernel.takes} |"
