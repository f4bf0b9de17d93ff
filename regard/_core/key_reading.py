"""Weights by key: Σ_i p_ij (`received`), the k largest of each row (`top_keys(k)`), and the weights of chosen rows.

    >>> import regard, torch
    >>> q = k = v = torch.eye(4).reshape(1, 1, 4, 4)
    >>> _, stats = regard.attention(q, k, v, is_causal=True, return_stats=("received", "top_keys(2)"))
    >>> stats.received.shape, stats.top_keys.index.shape
    (torch.Size([1, 1, 4]), torch.Size([1, 1, 4, 2]))
    >>> stats.top_keys.index[0, 0, 0].tolist()          # the first query sees one key
    [0, -1]

The GPU's fused kernels read them from the row state of their forward; elsewhere blocks of queries are weighed by the
reference, so that nothing is N × N. They carry no gradients; those of the output are as ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import reference
from regard._call.arguments import AttentionOptions
from regard._call.problem import Forward, Problem
from regard._core import dtensor, plans
from regard._core.dispatch import has_transform, why_not_fused
from regard._core.execute import apply_policy, execute, finish
from regard._core.ops.backends import ATTENTION, backend_module
from regard._core.prepare import PreparedCall, prepare
from regard._facts import is_plain_eager, is_within_vmap, reference_dtype
from regard.statistics import Statistics

NAMES = re.compile(r"received|top_keys\((\d+)\)")
LARGEST = 2**22  # weights of a block of queries that the reference makes at a time
MOST = 1024  # keys of a row


class TopKeys(NamedTuple):
    """The keys of most weight of every row, in falling order."""

    # (…, Hq, Lq, k) int64: positions among the keys; −1 beyond the last key that has weight
    index: Tensor  # type: ignore[assignment]  # hides tuple.index
    weight: Tensor  # (…, Hq, Lq, k)


class Reading(NamedTuple):
    """What a call asks for beside the statistics of rows."""

    others: Any  # `return_stats` without these names
    received: bool
    most: int  # keys of a row, 0 if none are asked for
    rows: list[int] | None  # whose weights are asked for


def asks_for_keys(wanted: Any) -> bool:
    """True if `return_stats` names something by key."""
    if type(wanted) is bool or wanted is None:
        return False
    names = (wanted,) if isinstance(wanted, str) else wanted
    return any(isinstance(name, str) and name.startswith(("received", "top_keys")) for name in names)


def attend_with_keys(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, return_weights: Any
) -> tuple[Tensor, Statistics]:
    """The output and statistics of a call, with what is asked for by key among them."""
    if torch.compiler.is_compiling() or any(map(dtensor.is_dtensor, (q, k, v))):
        raise ValueError("received, top_keys and return_weights are not read inside torch.compile or of DTensors")
    if options.dropout_p:
        raise ValueError("received, top_keys and return_weights need dropout_p=0: weights are read before dropout")
    has_plan = return_weights is options.gate is None and is_plain_eager()
    key = plans.call_key(q, k, v, options) if has_plan else None
    if torch.is_grad_enabled() and key is not None and (q.requires_grad or k.requires_grad or v.requires_grad):
        key = None
    if key is not None and key in plans.plans:
        return plans.plans[key](q, k, v)  # type: ignore[return-value]
    reading = split_reading(options.return_stats, return_weights, q.shape[-2])
    call = apply_policy(prepare(q, k, v, options._replace(return_stats=reading.others)))
    if has_transform(call.problem) or is_within_vmap():
        raise ValueError("received, top_keys and return_weights are not read inside a torch.func transform")
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in call.inputs)
    forward = None
    if is_fused(call, reading):
        if key is not None and plans.takes_plain_tensors(call):
            problem = replace(call.problem.without_tensors(), kind=object(), interval=call.problem.interval)
            plan = partial(run_fused, problem, plans.after_tensors(problem), reading, call.wanted)
            plans.keep_plan(key, plan, call)
            return plan(q, k, v)
        with torch.no_grad():
            forward = backend_module(ATTENTION, "triton").forward(call.problem)
    if forward is None or learns:
        out, stats = execute(call)
    else:
        out, stats = finish(call, forward.o, forward.stats, call.problem.stats)
    with torch.no_grad():
        fill(stats, call.problem, call.lead, reading, forward)
    return out, stats


def run_fused(
    options: Problem, rest: tuple, reading: Reading, wanted: tuple[str, ...] | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Statistics]:
    """A call without gradients by the GPU's kernels."""
    problem = Problem(q, k, v, *rest)
    with torch.no_grad():
        forward = backend_module(ATTENTION, "triton").forward(problem)
        stats = Statistics.of_stacked(forward.stats, options.stats, wanted, options.choice) if wanted else Statistics()
        fill(stats, problem, q.shape[:2], reading, forward)
    return forward.o, stats


def split_reading(wanted: Any, return_weights: Any, queries: int) -> Reading:
    """Take the names by key out of `return_stats`, and check them and the rows."""
    others, received, most = wanted, False, 0
    if asks_for_keys(wanted):
        others = []
        for name in (wanted,) if isinstance(wanted, str) else wanted:
            found = NAMES.fullmatch(name) if isinstance(name, str) else None
            if found is None and asks_for_keys(name if isinstance(name, str) else None):
                raise ValueError(f"return_stats: {name!r} is neither 'received' nor 'top_keys(8)', 8 keys of each row")
            if found is None:
                others.append(name)
            elif found[1] is None:
                received = True
            elif most or not 1 <= int(found[1]) <= MOST:
                raise ValueError(f"return_stats: top_keys(k) once, with k from 1 to {MOST}, got {name!r}")
            else:
                most = int(found[1])
        others = tuple(others)
    return Reading(others or (), received, most, check_rows(return_weights, queries))


def check_rows(given: Any, queries: int) -> list[int] | None:
    """The rows of `return_weights`, each 0 … queries − 1."""
    if given is None:
        return None
    rows = given.tolist() if isinstance(given, Tensor) else [given] if isinstance(given, int) else given
    if isinstance(rows, (str, bool)) or not all(type(row) is int for row in rows):
        raise TypeError(f"return_weights must be rows: an int or a sequence of ints, got {given!r}")
    if any(not -queries <= row < queries for row in rows):
        raise ValueError(f"return_weights: rows from {-queries} to {queries - 1} exist, got {list(rows)}")
    return [row % queries for row in rows]


def is_fused(call: PreparedCall, reading: Reading) -> bool:
    """True if the GPU's kernels can read what is asked for."""
    if not call.problem.q.is_cuda or not (reading.received or reading.most) or call.path.backend == "reference":
        return False
    from regard._backends.gpu.attention import key_reading as kernels

    return why_not_fused(call.problem, True) is None and reading.most <= kernels.MOST and call.problem.q.numel() > 0


def fill(stats: Statistics, problem: Problem, lead: tuple[int, ...], reading: Reading, forward: Forward | None) -> None:
    """Add what is asked for to the statistics; lead: the leading dims of the output."""
    if forward is not None:
        kernels = backend_module(ATTENTION, "triton")
        received, *top = kernels.read_keys(problem, forward, reading.received, reading.most)
    else:
        received, top = read_dense(problem, reading)
    if reading.received:
        stats["received"] = received.reshape(*lead, received.shape[-1])
    if reading.most:
        stats["top_keys"] = TopKeys(*(x.reshape(*lead, *x.shape[-2:]) for x in top))  # type: ignore[assignment]
    if reading.rows is not None:
        parts = [reference.weights_of_rows(problem, first, last) for first, last in find_runs(reading.rows)]
        empty = problem.q.new_zeros((*problem.q.shape[:2], 0, problem.k.shape[2]))
        weights = torch.cat(parts or [empty], 2).to(problem.accumulator)
        stats["weights"] = weights.reshape(*lead, *weights.shape[-2:])


def find_runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of the runs of consecutive rows.

    >>> list(find_runs([3, 4, 5, 0, 9]))
    [(3, 6), (0, 1), (9, 10)]
    """
    first = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1:
            yield rows[first], rows[at - 1] + 1
            first = at


def read_dense(problem: Problem, reading: Reading) -> tuple[Any, Any]:
    """(received, top keys) from the reference's weights of blocks of queries."""
    if not (reading.received or reading.most):
        return None, None
    batch, heads, queries, _ = problem.q.shape
    keys = problem.k.shape[2]
    size = max(1, LARGEST // max(1, batch * heads * keys))
    like: dict[str, Any] = dict(dtype=problem.accumulator, device=problem.q.device)
    received = torch.zeros(batch, heads, keys, dtype=reference_dtype(problem.q.device), device=problem.q.device)
    index = torch.full((batch, heads, queries, reading.most), -1, dtype=torch.int64, device=problem.q.device)
    weight = torch.zeros(index.shape, **like)
    for first in range(0, queries, size):
        rows = slice(first, min(first + size, queries))
        p = reference.weights_of_rows(problem, rows.start, rows.stop)
        received += p.sum(2)
        if reading.most:
            found = p.topk(min(reading.most, keys), -1)
            there = slice(0, found.indices.shape[-1])
            weight[:, :, rows, there] = found.values.to(weight.dtype)
            index[:, :, rows, there] = found.indices.masked_fill(~(weight[:, :, rows, there] > 0), -1)
    return received.to(problem.accumulator), TopKeys(index, weight)
