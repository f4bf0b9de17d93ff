"""Attention over a part of the keys by the GPU kernels, for `regard.parallel`, which merges the parts of all ranks.

A part is a problem of its own once its window is expressed in its own positions. Statistics are finished per part and
merged afterwards (`regard.parallel.merge_statistics`). Threshold maps and dropout are left to plain torch.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from regard._backends.gpu.attention import launch as attention
from regard._core.problem import Forward, Gradients, Part, Problem, Upstream, Whole


def takes(problem: Problem) -> bool:
    """True for ratio and pointwise maps without dropout whose statistics, if any, can be merged (softmax, sigmoid)."""
    choice = problem.choice
    mixes = choice.family == "pointwise" or (choice.family == "ratio" and choice.exponential)
    return choice.family != "threshold" and not problem.dropout_p and (mixes or not problem.stats)


def forward(problem: Problem) -> Part:
    """Compute the part of each row that these keys give."""
    p = localize(problem)
    found = attention.forward(p)
    stats = dict(zip(p.stats, found.stats, strict=True)) if p.stats else None
    return Part(found.o.to(p.accumulator), found.shift, found.z, stats=stats, first=problem.first_key)


def backward(problem: Problem, whole: Whole, upstream: Upstream) -> Gradients:
    """Compute the gradients that these keys give, from what is known of the whole rows."""
    values = whole.values or {}
    p = replace(localize(problem), stats=tuple(values))
    stats = torch.stack(list(values.values())) if values else whole.m.new_empty((0, *whole.m.shape))
    known = Forward(whole.o.contiguous(), whole.m.contiguous(), whole.z.contiguous(), stats)
    given = replace(upstream, o=upstream.o.contiguous(), stats={n: x.contiguous() for n, x in upstream.stats.items()})
    return attention.backward(p, known, given)


def localize(problem: Problem) -> Problem:
    """Return the problem with window and intervals in its own positions; `first_query` stays if distances need it."""
    p, ahead = problem, problem.first_query - problem.first_key
    (left, right), queries, keys = p.reach, p.q.shape[2], p.k.shape[2]
    left = None if left is None or left - ahead >= queries - 1 else left - ahead
    right = None if right is None or right + ahead >= keys - 1 else right + ahead
    lengths = None if p.key_lengths is None else (p.key_lengths - p.first_key).clamp(0, keys)
    interval = p.interval if p.interval is None or not p.first_key else p.interval - p.first_key
    return replace(
        p,
        causal=right == 0,
        left=left,
        right=None if right == 0 else right,
        key_lengths=lengths,
        interval=interval,
        first_query=ahead if "distance" in p.stats else 0,
        first_key=0,
        queries=None,
    )
