"""Reads `torch.einsum` equations of attention: "bhid,bhjd->bhij" for scores, "bhij,bhjd->bhid" for outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """q and k of one product, each with its letters, and the letters of the result: batch …, query, key."""

    q: tuple[str, Tensor]
    k: tuple[str, Tensor]
    result: str
    width: str


def _terms(args: tuple) -> tuple[str, str, str] | None:
    """Returns the letters of both operands and of the result; None for what is no product of two tensors."""
    if len(args) == 2 and isinstance(args[1], (tuple, list)):
        args = (args[0], *args[1])
    equation = args[0] if args else None
    if not isinstance(equation, str) or len(args) != 3 or "->" not in equation or "." in equation:
        return None
    inputs, _, result = equation.replace(" ", "").partition("->")
    first, comma, second = inputs.partition(",")
    return (first, second, result) if comma and "," not in second else None


def parse_scores(args: tuple) -> Scores | None:
    """Returns q and k of an equation with one contracted letter, whose result ends in the query and the key letter."""
    terms = _terms(args)
    if terms is None or len(terms[2]) < 3:
        return None
    first, second, result = terms
    batch, m, n = result[:-2], result[-2], result[-1]
    contracted = set(first) & set(second) - set(result)
    tensors = {first: args[-2], second: args[-1]} if len(args) == 3 else dict(zip(terms[:2], args[1], strict=True))
    query = next((one for one in (first, second) if m in one and n not in one), None)
    key = next((one for one in (first, second) if n in one and m not in one), None)
    if query is None or key is None or len(contracted) != 1:
        return None
    width = contracted.pop()
    if set(query) != {*batch, m, width} or not set(key) <= {*batch, n, width}:
        return None
    return Scores((query, tensors[query]), (key, tensors[key]), result, width)


def query_rows(scores: Scores) -> Tensor:
    """Returns q as [batch …, M, D]."""
    letters, q = scores.q
    return q.permute(*(letters.index(one) for one in scores.result[:-1] + scores.width))


def key_rows(scores: Scores) -> Tensor:
    """Returns k as [batch …, N, D], with size 1 where it lacks a letter of the batch."""
    return _arrange(scores.k[0], scores.k[1], scores.result[:-2] + scores.result[-1] + scores.width)


def _arrange(letters: str, x: Tensor, order: str) -> Tensor:
    present = [one for one in order if one in letters]
    x = x.permute(*(letters.index(one) for one in present))
    for at, one in enumerate(order):
        if one not in letters:
            x = x.unsqueeze(at)
    return x


def parse_values(args: tuple, p: Tensor) -> tuple[Tensor, Callable, Callable] | None:
    """Returns (v [batch …, N, E], result's layout → [batch …, M, E], and back) of weights times values."""
    terms = _terms(args)
    if terms is None:
        return None
    operands: Any = args[1:] if len(args) == 3 else args[1]
    at = 0 if operands[0].ndim == p.ndim and operands[0].shape == p.shape and len(terms[0]) == p.ndim else 1
    weights, values, result = terms[at], terms[1 - at], terms[2]
    batch, m, n = weights[:-2], weights[-2], weights[-1]
    width = set(values) & set(result) - set(weights)
    if n not in values or n in result or m in values or len(width) != 1:
        return None
    e = width.pop()
    if set(result) != {*batch, m, e} or not set(values) <= {*batch, n, e}:
        return None
    v = _arrange(values, operands[1 - at], batch + n + e)
    order = [result.index(one) for one in batch + m + e]
    back = [order.index(place) for place in range(len(order))]
    return v, partial(torch.permute, dims=order), partial(torch.permute, dims=back)
