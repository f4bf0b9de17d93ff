"""Merges parts of rows, (m, z, o) of some of the keys, and sums the gradients of pairs of chunks.

`Total` adds what enters the denominator once at the end.

ratio       m = max(m₁, m₂),  z = z₁e^(m₁−m) + z₂e^(m₂−m),  o = (z₁e^(m₁−m)·o₁ + z₂e^(m₂−m)·o₂) / z
pointwise   all sums add
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard._call.problem import Gradients, Part, Problem, Upstream, Whole
from regard.normalizers import Choice
from regard.normalizers._language import speak, torch_words
from regard.parallel.layout import Spans, locate_spans
from regard.parallel.plan import ShardPlan


@dataclass
class Total:
    """The merged parts of some rows so far; reuses the first part's o. `m` is −inf where no key has weight yet."""

    choice: Choice
    o: Any = None
    m: Any = None
    z: Any = None

    def add(self, part: Part) -> None:
        """Merge one more part."""
        m = part.m.masked_fill(part.z == 0, -math.inf) if self.choice.family == "ratio" else part.m
        if self.o is None:
            self.o, self.m, self.z = part.o, m, part.z
        elif self.choice.family == "ratio":
            top = torch.maximum(self.m, m)
            safe = top.masked_fill(top == -math.inf, 0.0)
            old, new = self.z * torch.exp(self.m - safe), part.z * torch.exp(m - safe)
            self.m, self.z = top, old + new
            share = torch.where(self.z == 0, 0.0, new / self.z)  # keeps NaN
            self.o.lerp_(part.o, share[..., None])
        else:
            self.o += part.o
            self.z = self.z + part.z

    def finish(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
        """Return (o, m, z) of whole rows after the last part: adds sink and rest to Z; empty rows are 0."""
        o, m, z = self.o, self.m, self.z
        if self.choice.family == "pointwise":
            return o, torch.zeros_like(m), torch.zeros_like(z)
        empty = m == -math.inf
        logits = sink_logits(problem)
        if self.choice.exponential and not logits:  # nothing to add: o is final, and 0 in empty rows
            return o, m.masked_fill(empty, 0.0), z
        if not self.choice.exponential:
            m = m.masked_fill(empty, 0.0)
            if self.choice.shift == "max0":
                m = m.clamp_min(0.0)
            z = z * torch.exp(self.m - m) + speak(self.choice.rest, torch_words)(torch.exp(-m))
            kept = torch.where(z == 0, 0.0, self.z * torch.exp(self.m - m) / z)
        else:
            top = m
            for logit in logits:
                top = torch.maximum(top, logit)
            own = z * torch.exp(m - top)
            z = own
            for logit in logits:
                z = z + torch.exp(logit - top)
            kept, m = own / z, top
        kept, m, z = (x.masked_fill(empty, 0.0) for x in (kept, m, z))
        return o * kept[..., None], m, z


def merge_pairs(plan: ShardPlan, chunks: Spans, pairs: Iterable[tuple[slice, slice, Problem]]) -> list[Total]:
    """Return the totals of the query chunks over pairs of chunks, (rows, keys, problem) each."""
    totals = [Total(plan.problem.choice) for _ in chunks]
    for here, _, pair in pairs:
        _add_part(totals, chunks, here, plan.engine.forward(pair))
    for total, (_, rows) in zip(totals, plan.rows(plan.problem, chunks), strict=True):
        if total.o is None:
            total.add(_empty_part(rows))
    return totals


def _add_part(totals: list[Total], chunks: Spans, here: slice, part: Part) -> None:
    """Merge a part of the rows `here` into the totals of the chunks inside them."""
    for total, (_, rows) in zip(totals, locate_spans(chunks), strict=True):
        if rows == here:
            total.add(part)
        elif here.start <= rows.start < rows.stop <= here.stop:
            own = slice(rows.start - here.start, rows.stop - here.start)
            total.add(Part(*(x[:, :, own] for x in (part.o, part.m, part.z))))


def _empty_part(rows: Problem) -> Part:
    """Return the part of rows that see none of its keys."""
    shape, like = rows.q.shape[:3], dict(dtype=rows.accumulator, device=rows.q.device)
    zero = torch.zeros(shape, **like)
    return Part(torch.zeros((*shape, rows.v.shape[-1]), **like), zero, zero)


def sink_logits(problem: Problem) -> list[Tensor]:
    """Return the logits [B, H, M] that enter Z of the softmax family besides the keys: a sink, softmax1's constant."""
    found = [] if problem.sink is None else [problem.sink.to(problem.accumulator)]
    if problem.choice.softmax_family:
        rest = float(speak(problem.choice.rest)(1.0))
        if rest > 0:
            rows = problem.q.shape[:3]
            found.append(problem.q.new_full((1,), math.log(rest), dtype=problem.accumulator).expand(rows))
    return found


class RowGradients:
    """dq, dtemperature [B, H, M], and dbias in the bias's shape before it was expanded."""

    def __init__(self, rows: Problem, upstream: Upstream) -> None:
        like = dict(dtype=rows.accumulator, device=rows.q.device)
        self.q = torch.zeros(rows.q.shape, **like)
        self.temperature = torch.zeros(rows.q.shape[:3], **like) if upstream.temperature else None
        self.bias = None
        if upstream.bias:
            sizes = zip(rows.bias.shape, rows.bias.stride(), strict=True)
            self.bias = torch.zeros([1 if stride == 0 else size for size, stride in sizes], **like)

    def add(self, grads: Gradients, here: slice, columns: slice) -> None:
        """Add a pair's gradients: `here` are its rows, `columns` its columns of the bias."""
        self.q[:, :, here] += grads.q
        if self.temperature is not None:
            self.temperature[:, :, here] += grads.temperature
        if self.bias is not None:
            target = self.bias if self.bias.shape[2] == 1 else self.bias[:, :, here]
            target = target if target.shape[3] == 1 else target[..., columns]
            target += grads.bias.sum_to_size(target.shape)


class KeyGradients:
    """dk and dv of one rank's keys, in the accumulator's dtype: two views of one tensor, which is sent."""

    def __init__(self, problem: Problem, k: Tensor | None = None, v: Tensor | None = None) -> None:
        k, v = (problem.k, problem.v) if k is None else (k, v)
        self.flat = torch.zeros(k.numel() + v.numel(), dtype=problem.accumulator, device=k.device)
        self.k, self.v = self.flat[: k.numel()].view(k.shape), self.flat[k.numel() :].view(v.shape)

    def add(self, grads: Gradients, there: slice) -> None:
        """Add the gradients of the keys `there`."""
        self.k[:, :, there] += grads.k
        self.v[:, :, there] += grads.v


def slice_rows(whole: Whole, here: slice) -> Whole:
    """Return the state of the rows `here`."""
    return Whole(*(x[:, :, here] for x in (whole.m, whole.z, whole.delta, whole.o)))


def slice_upstream(upstream: Upstream, here: slice) -> Upstream:
    """Return the upstream gradients of the rows `here`, contiguous, as GPU kernels take them."""
    stats = {name: x[:, :, here].contiguous() for name, x in upstream.stats.items()}
    return replace(upstream, o=upstream.o[:, :, here].contiguous(), stats=stats)
