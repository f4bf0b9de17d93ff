"""Reads `torch.einsum` equations of attention: "bhid,bhjd->bhij" for scores, "bhij,bhjd->bhid" for outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def _terms(args: tuple) -> tuple[str, str, str] | None:
    """Returns the letters of both operands and of the result; None for what is no product of two tensors."""
    equation = args[0] if args else None
    if not isinstance(equation, str) or len(args) != 3 or "->" not in equation or "." in equation:
        return None
    inputs, _, result = equation.replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    return first, second, result


def find_scores(args: tuple) -> tuple[Tensor, Tensor] | None:
    """Returns q [batch …, M, D] and k [batch …, N, D] of an equation with one contracted letter, in the result's order.

    The result ends in the query and the key letter; k has size 1 where it lacks a letter of the batch.
    """
    terms = _terms(args)
    if terms is None or len(terms[2]) < 3:
        return None
    first, second, result = terms
    batch, m, n = result[:-2], result[-2], result[-1]
    (q_letters, q), (k_letters, k) = sorted(zip(terms, args[1:], strict=False), key=lambda term: m not in term[0])
    contracted = set(first) & set(second) - set(result)
    if len(contracted) != 1 or n not in k_letters:
        return None
    d = contracted.pop()
    if set(q_letters) != {*batch, m, d} or not set(k_letters) <= {*batch, n, d}:
        return None
    return _arrange(q_letters, q, batch + m + d), _arrange(k_letters, k, batch + n + d)


def _arrange(letters: str, x: Tensor, order: str) -> Tensor:
    """Permutes x to the order, with size 1 for letters that it lacks."""
    x = x.permute(*(letters.index(one) for one in order if one in letters))
    for at, one in enumerate(order):
        if one not in letters:
            x = x.unsqueeze(at)
    return x


def find_values(args: tuple, p: Tensor) -> tuple[Tensor, Callable, Callable] | None:
    """Returns (v [batch …, N, E], result's layout → [batch …, M, E], and back) of weights times values."""
    terms = _terms(args)
    if terms is None:
        return None
    at = 0 if args[1].shape == p.shape and len(terms[0]) == p.ndim else 1
    weights, values, result = terms[at], terms[1 - at], terms[2]
    batch, m, n = weights[:-2], weights[-2], weights[-1]
    width = set(values) & set(result) - set(weights)
    if n not in values or n in result or m in values or len(width) != 1:
        return None
    e = width.pop()
    if set(result) != {*batch, m, e} or not set(values) <= {*batch, n, e}:
        return None
    order = [result.index(one) for one in batch + m + e]
    back = [order.index(place) for place in range(len(order))]
    v = _arrange(values, args[2 - at], batch + n + e)
    return v, partial(torch.permute, dims=order), partial(torch.permute, dims=back)
