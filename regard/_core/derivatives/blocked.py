"""Derivatives of attention by the float64 reference, some rows at a time: memory is O(rows · N), never N × N.

With f the output of some rows, as a function of the tensors x that have derivatives,

    jvp   f′(x)·t      the tangent of f for a tangent t of x
    vjp   f′(x)ᵀ·u     the gradient of x for an upstream gradient u

Both consist of plain torch operations, so that they have derivatives themselves. RowBlock are independent: tangents of
their outputs are joined, gradients of what they share are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from regard import reference
from regard._call.problem import Problem
from regard._core.derivatives.autograd import LEARNED, places_of, spread
from regard._facts import widen

SCORES = 1 << 22  # of the rows that are taken at once
PLACES = places_of(tuple(LEARNED))  # of the tensors that have derivatives, in TENSORS
Tensors = Sequence[Tensor | None]


def jvp(function: Callable, given: Sequence[Tensor], tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """J·t of a function that returns a tuple: the vjp is linear in u, and its own vjp is J·t.

    torch.func.jvp would do where no level of forward mode is open; torch cannot nest the two.
    """
    out, transpose, *_ = torch.func.vjp(function, *given)
    return torch.func.vjp(lambda *u: transpose(u), *map(torch.zeros_like, out))[1](tuple(tangents))


def vjp(function: Callable, given: Sequence[Tensor], upstream: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Jᵀ·u of a function that returns a tuple."""
    return torch.func.vjp(function, *given)[1](tuple(upstream))


class RowBlock:
    """The output of rows first … last − 1 of a problem, and its first derivatives, as functions of `given`."""

    def __init__(self, options: Problem, tensors: Tensors, first: int, last: int):
        self.options, self.tensors, self.first, self.last = options, tensors, first, last
        self.places = [at for at in PLACES if tensors[at] is not None]

    def attend(self, *given: Tensor) -> tuple[Tensor]:
        """o of the rows; `given` are the tensors of `places`."""
        tensors = list(self.tensors)
        for at, x in zip(self.places, given, strict=True):
            tensors[at] = x
        return (reference.of_rows(self.options.with_tensors(tensors), self.first, self.last)[0],)

    def gradient(self, do: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """What the rows add to the gradients of `given`, for the upstream gradient of all rows."""
        return vjp(self.attend, given, (self.take(do),))

    def take(self, x: Tensor) -> Tensor:
        """The rows of x [B, H, M, …]."""
        return x[:, :, self.first : self.last]


def _cut_rows(options: Problem, tensors: Tensors) -> Iterator[RowBlock]:
    q, k = tensors[0], tensors[1]
    assert q is not None and k is not None
    total = q.shape[2]
    step = max(1, SCORES // max(1, math.prod(q.shape[:2]) * k.shape[2]))
    for first in range(0, max(1, total), step):
        yield RowBlock(options, tensors, first, min(first + step, total))


class Derivatives:
    """Tangent and gradient of one call, and the derivatives of each; every tensor in the order of `TENSORS`."""

    def __init__(self, options: Problem, tensors: Tensors):
        self.options, self.kept = options, tensors
        wide = [widen(x) if at in PLACES and x is not None else x for at, x in enumerate(tensors)]
        self.rows = list(_cut_rows(options, wide))
        self.places = [at for at in PLACES if tensors[at] is not None]
        self.given: list[Tensor] = [wide[at] for at in self.places]  # type: ignore[misc]

    def _widen(self, tangents: Tensors) -> list[Tensor]:
        """Tangents of `given`, zeros where there is none."""
        found = [tangents[at] for at in self.places]
        return [torch.zeros_like(x) if t is None else t.to(x.dtype) for x, t in zip(self.given, found, strict=True)]

    def _place(self, found: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of `given` in the order of `TENSORS`, in the dtypes of the tensors."""
        kept: list[Any] = [self.kept[at] for at in self.places]
        return spread((dx.to(x.dtype) for dx, x in zip(found, kept, strict=True)), self.places)

    def _sum(self, of_rows: Callable[[RowBlock], tuple[Tensor, ...]]) -> list[Tensor]:
        """Σ of_rows(rows) over all rows, entry by entry."""
        total = list(of_rows(self.rows[0]))
        for rows in self.rows[1:]:
            total = [x + y for x, y in zip(total, of_rows(rows), strict=True)]
        return total

    def tangent(self, tangents: Tensors) -> Tensor:
        """o′ for tangents of the tensors."""
        along = self._widen(tangents)
        return torch.cat([jvp(rows.attend, self.given, along)[0] for rows in self.rows], 2)

    def tangent_jvp(self, tangents: Tensors, moved: Tensors, moved_tangents: Tensors) -> Tensor:
        """The tangent of o′ where the tensors move by `moved` and their tangents by `moved_tangents`."""
        along, count = self._widen(tangents), len(self.given)
        inputs, change = (*self.given, *along), (*self._widen(moved), *self._widen(moved_tangents))

        def of_rows(rows: RowBlock) -> Tensor:
            return jvp(lambda *x: jvp(rows.attend, x[:count], x[count:]), inputs, change)[0]

        return torch.cat([of_rows(rows) for rows in self.rows], 2)

    def tangent_vjp(self, tangents: Tensors, upstream: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of the tensors and of their tangents for an upstream gradient of o′."""
        inputs, count = (*self.given, *self._widen(tangents)), len(self.given)

        def of_rows(rows: RowBlock) -> tuple[Tensor, ...]:
            return vjp(lambda *x: jvp(rows.attend, x[:count], x[count:]), inputs, (widen(rows.take(upstream)),))

        total = self._sum(of_rows)
        return self._place(total[:count]), self._place(total[count:])

    def gradient_jvp(self, do: Tensor, d_do: Tensor | None, moved: Tensors) -> list[Tensor | None]:
        """The tangents of the gradients where do moves by `d_do` and the tensors by `moved`."""
        inputs = (widen(do), *self.given)
        change = (torch.zeros_like(inputs[0]) if d_do is None else widen(d_do), *self._widen(moved))
        return self._place(self._sum(lambda rows: jvp(rows.gradient, inputs, change)))

    def gradient_vjp(self, do: Tensor, upstream: Tensors) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of do and of the tensors for upstream gradients of the gradients."""
        inputs, given = (widen(do), *self.given), self._widen(upstream)
        d_do, *total = self._sum(lambda rows: vjp(rows.gradient, inputs, given))
        return d_do.to(do.dtype), self._place(total)
