"""Derivatives of attention by the float64 reference, some rows at a time: memory is O(rows · N), never N × N.

With f the output of some rows, as a function of the tensors x that have derivatives,

    push   f′(x)·t      what a tangent t of x adds to f
    pull   f′(x)ᵀ·u     the gradient of x for an upstream gradient u

Both consist of plain torch operations, so that they can be pushed and pulled again. Rows are independent: tangents of
their outputs are joined, gradients of what they share are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from regard import reference
from regard._core.autograd import LEARNED
from regard._core.dtypes import widen
from regard._core.problem import TENSORS, Problem

SCORES = 1 << 22  # of the rows that are taken at once
PLACES = (0, 1, 2, *LEARNED.values())  # of the tensors that have derivatives, in TENSORS
Tensors = Sequence[Tensor | None]


def push(function: Callable, given: Sequence[Tensor], tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """J·t of a function that returns a tuple: the pull is linear in u, and its own pull is J·t.

    torch.func.jvp would do where no level of forward mode is open; torch cannot nest the two.
    """
    out, transpose = torch.func.vjp(function, *given)  # type: ignore[misc]
    _, push_forward = torch.func.vjp(lambda *u: transpose(u), *map(torch.zeros_like, out))  # type: ignore[misc]
    return push_forward(tuple(tangents))


def pull(function: Callable, given: Sequence[Tensor], upstream: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Jᵀ·u of a function that returns a tuple."""
    return torch.func.vjp(function, *given)[1](tuple(upstream))


class Rows:
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

    def take(self, x: Tensor) -> Tensor:
        return x[:, :, self.first : self.last]


def _cut_rows(options: Problem, tensors: Tensors) -> Iterator[Rows]:
    q, k = tensors[0], tensors[1]
    assert q is not None and k is not None
    total = q.shape[2]
    step = max(1, SCORES // max(1, math.prod(q.shape[:2]) * k.shape[2]))
    for first in range(0, total, step):
        yield Rows(options, tensors, first, min(first + step, total))


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
        placed: list[Tensor | None] = [None] * len(TENSORS)
        for at, x in zip(self.places, found, strict=True):
            placed[at] = x.to(self.kept[at].dtype)  # type: ignore[union-attr]
        return placed

    def tangent(self, tangents: Tensors) -> Tensor:
        """o′ for tangents of the tensors."""
        along = self._widen(tangents)
        return torch.cat([push(rows.attend, self.given, along)[0] for rows in self.rows], 2)

    def push_tangent(self, tangents: Tensors, moved: Tensors, moved_tangents: Tensors) -> Tensor:
        """The tangent of o′ where the tensors move by `moved` and their tangents by `moved_tangents`."""
        along, count = self._widen(tangents), len(self.given)
        inputs, change = (*self.given, *along), (*self._widen(moved), *self._widen(moved_tangents))

        def of_rows(rows: Rows) -> Tensor:
            return push(lambda *x: push(rows.attend, x[:count], x[count:]), inputs, change)[0]

        return torch.cat([of_rows(rows) for rows in self.rows], 2)

    def pull_tangent(self, tangents: Tensors, upstream: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of the tensors and of their tangents for an upstream gradient of o′."""
        along, count = self._widen(tangents), len(self.given)
        total = [torch.zeros_like(x) for x in (*self.given, *along)]
        for rows in self.rows:
            u = (widen(rows.take(upstream)),)
            own = pull(lambda *x, rows=rows: push(rows.attend, x[:count], x[count:]), (*self.given, *along), u)
            total = [x + y for x, y in zip(total, own, strict=True)]
        return self._place(total[:count]), self._place(total[count:])

    def push_gradient(self, do: Tensor, d_do: Tensor | None, moved: Tensors) -> list[Tensor | None]:
        """The tangents of the gradients where do moves by `d_do` and the tensors by `moved`."""
        inputs = (widen(do), *self.given)
        change = (torch.zeros_like(inputs[0]) if d_do is None else widen(d_do), *self._widen(moved))
        total = [torch.zeros_like(x) for x in self.given]
        for rows in self.rows:
            own = push(lambda u, *x, rows=rows: pull(rows.attend, x, (rows.take(u),)), inputs, change)
            total = [x + y for x, y in zip(total, own, strict=True)]
        return self._place(total)

    def pull_gradient(self, do: Tensor, upstream: Tensors) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of do and of the tensors for upstream gradients of the gradients."""
        u, inputs = self._widen(upstream), (widen(do), *self.given)
        total = [torch.zeros_like(x) for x in inputs]
        for rows in self.rows:
            own = pull(lambda u, *x, rows=rows: pull(rows.attend, x, (rows.take(u),)), inputs, u)
            total = [x + y for x, y in zip(total, own, strict=True)]
        return total[0].to(do.dtype), self._place(total[1:])
