"""Attention over a part of the keys by the GPU kernels, for `regard.parallel`, which merges the parts of all ranks.

A part is a problem of its own once its window is expressed in its own positions. Threshold maps, statistics and dropout
need whole rows (`regard.parallel.gather`).
"""

from __future__ import annotations

from dataclasses import replace

from regard._backends.gpu.attention import launch as attention
from regard._call.problem import Forward, Gradients, Part, Problem, Upstream, Whole


def forward(problem: Problem) -> Part:
    """Compute the part of each row that these keys give."""
    p = localize(problem)
    found = attention.forward(p)
    return Part(found.o.to(p.accumulator), found.shift, found.z)


def backward(problem: Problem, whole: Whole, upstream: Upstream) -> Gradients:
    """Compute the gradients that these keys give, from what is known of the whole rows."""
    stats = whole.m.new_empty((0, *whole.m.shape))
    known = Forward(whole.o.contiguous(), whole.m.contiguous(), whole.z.contiguous(), stats)
    return attention.backward(localize(problem), known, upstream)


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
