"""`Total` merges parts of rows: (m, z, o) of some of the keys, and at the end what enters the denominator once.

ratio       m = max(m₁, m₂),  z = z₁e^(m₁−m) + z₂e^(m₂−m),  o = (z₁e^(m₁−m)·o₁ + z₂e^(m₂−m)·o₂) / z
pointwise   all sums add
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._call.problem import Part, Problem
from regard.normalizers import Choice
from regard.normalizers._language import speak, torch_words
from regard.parallel.layout import Spans, locate_spans
from regard.parallel.plan import Plan


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


def merge_pairs(plan: Plan, chunks: Spans, pairs: Iterable[tuple[slice, slice, Problem]]) -> list[Total]:
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
