"""A part of the keys by the Triton kernels: what `regard.parallel` computes on each rank before parts are merged.

A part is a problem of its own once its reach is told in its own positions: with the first query `ahead` of the first
key, query i sees keys i + ahead − left … i + ahead + right. Statistics are finished per part and mixed afterwards
(`regard.parallel.merge_statistics`). Threshold maps and dropout go by plain torch.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from regard._backends.gpu.attention import launch as attention
from regard._core.problem import Forward, Gradients, Part, Problem, Upstream, Whole


def takes(problem: Problem) -> bool:
    """Ratio and pointwise maps; of their statistics those that mix, which is all for softmax and sigmoid."""
    choice = problem.choice
    mixes = choice.family == "pointwise" or (choice.family == "ratio" and choice.exponential)
    return choice.family != "threshold" and not problem.dropout_p and (mixes or not problem.stats)


def forward(problem: Problem) -> Part:
    p = placed(problem)
    found = attention.forward(p)
    stats = dict(zip(p.stats, found.stats, strict=True)) if p.stats else None
    return Part(found.o.to(p.accumulator), found.shift, found.z, stats=stats, first=problem.first_key)


def backward(problem: Problem, whole: Whole, upstream: Upstream) -> Gradients:
    values = whole.values or {}
    p = replace(placed(problem), stats=tuple(values))
    stats = torch.stack(list(values.values())) if values else whole.m.new_empty((0, *whole.m.shape))
    known = Forward(whole.o.contiguous(), whole.m.contiguous(), whole.z.contiguous(), stats)
    given = replace(upstream, o=upstream.o.contiguous(), stats={n: x.contiguous() for n, x in upstream.stats.items()})
    return attention.backward(p, known, given)


def placed(problem: Problem) -> Problem:
    """The same problem with its reach in its own positions; `first_query` is left where distances need it."""
    p, ahead = problem, problem.first_query - problem.first_key
    (left, right), queries, keys = p.reach, p.q.shape[2], p.k.shape[2]
    left = None if left is None or left - ahead >= queries - 1 else left - ahead
    right = None if right is None or right + ahead >= keys - 1 else right + ahead
    lengths = None if p.key_lengths is None else (p.key_lengths - p.first_key).clamp(0, keys)
    return replace(
        p,
        causal=right == 0,
        left=left,
        right=None if right == 0 else right,
        key_lengths=lengths,
        first_query=ahead if "distance" in p.stats else 0,
        first_key=0,
        queries=None,
    )
