"""`Total` merges parts of rows: (m, z, o) of some of the keys, and at the end what enters the denominator once.

    ratio       m = max(m₁, m₂),  z = z₁e^(m₁−m) + z₂e^(m₂−m),  o = (z₁e^(m₁−m)·o₁ + z₂e^(m₂−m)·o₂) / z
    pointwise   all sums add

The sums of the statistics merge by `regard.statistics.State.merge`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from regard._core.problem import Part, Problem
from regard.normalizers import Choice
from regard.normalizers._language import speak, torch_words
from regard.parallel import merge_statistics
from regard.parallel.layout import Spans, locate_spans
from regard.statistics import State

FIELDS = tuple(field.name for field in fields(State))


@dataclass
class Total:
    """The merged parts of some rows so far; reuses the first part's o. `m` is −inf where no key has weight yet."""

    choice: Choice
    o: Any = None
    m: Any = None
    z: Any = None
    state: State | None = None
    merged: Any = None  # {name: statistic} in place of `state`, from engines that finish statistics per part

    def add(self, part: Part) -> None:
        """Merge one more part."""
        m = part.m.masked_fill(part.z == 0, -math.inf) if self.choice.family == "ratio" else part.m
        other = None if part.stats is None else merge_statistics.with_first_key(part.stats, part.first)
        if self.o is None:
            self.o, self.m, self.z = part.o, m, part.z
            self.merged = other
        elif self.choice.family == "ratio":
            top = torch.maximum(self.m, m)
            safe = top.masked_fill(top == -math.inf, 0.0)
            old, new = self.z * torch.exp(self.m - safe), part.z * torch.exp(m - safe)
            self.m, self.z = top, old + new
            share = torch.where(self.z == 0, 0.0, new / self.z)  # keeps NaN
            self.o.lerp_(part.o, share[..., None])
            if other is not None:
                self.merged = merge_statistics.merge(self.merged, other, old, new, False)
        else:
            self.o += part.o
            self.z = self.z + part.z
            if other is not None:
                self.merged = merge_statistics.merge(self.merged, other, self.merged["mass"], other["mass"], True)
        if part.sums is not None:
            state = State(**{name: x[..., None] for name, x in zip(FIELDS, part.sums, strict=True)})
            self.state = state if self.state is None else self.state.merge(state, self.choice)

    def statistics(self, problem: Problem, m: Tensor, z: Tensor) -> Mapping[str, Tensor]:
        """Return the statistics of whole rows; m and z are from `finish`."""
        if self.merged is None:
            assert self.state is not None  # the engine leaves sums
            return self.state.finish(self.choice, None if problem.sink is None else problem.sink.double()[..., None])
        sinks = None
        if self.choice.family == "ratio":
            sinks = torch.zeros_like(z)
            for logit in sink_logits(problem):
                sinks = sinks + torch.exp(logit - m) / z
        return merge_statistics.finish(self.merged, problem.stats, m, z, sinks)

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


def add_part(totals: list[Total], chunks: Spans, here: slice, part: Part) -> None:
    """Merge a part of the rows `here` into the totals of the chunks inside them."""
    for total, (_, rows) in zip(totals, locate_spans(chunks), strict=True):
        if rows == here:
            total.add(part)
        elif here.start <= rows.start < rows.stop <= here.stop:
            total.add(_slice_part(part, slice(rows.start - here.start, rows.stop - here.start)))


def _slice_part(part: Part, here: slice) -> Part:
    """Return the rows `here` of a part."""
    o, m, z = (x[:, :, here] for x in (part.o, part.m, part.z))
    sums = None if part.sums is None else part.sums[..., here]
    stats = None if part.stats is None else {name: x[:, :, here] for name, x in part.stats.items()}
    return replace(part, o=o, m=m, z=z, sums=sums, stats=stats)


def empty_part(rows: Problem, finishes_statistics: bool) -> Part:
    """Return the part of rows that see none of its keys; its sums, or its statistics if the engine finishes them."""
    shape, like = rows.q.shape[:3], dict(dtype=rows.accumulator, device=rows.q.device)
    zero, o = torch.zeros(shape, **like), torch.zeros((*shape, rows.v.shape[-1]), **like)
    if not rows.stats:
        return Part(o, zero, zero)
    if finishes_statistics:
        lowest = torch.full_like(zero, -math.inf)
        named = merge_statistics.required(rows.stats)
        stats = {name: lowest if name in ("max_logit", "logsumexp") else zero for name in named}
        return Part(o, zero, zero, stats=stats)
    sums = torch.zeros((len(FIELDS), *shape), dtype=torch.float64, device=rows.q.device)
    sums[FIELDS.index("top")] = -math.inf
    return Part(o, zero, zero, sums=sums)


def sink_logits(problem: Problem) -> list[Tensor]:
    """Return the logits [B, H, M] that enter Z of the softmax family besides the keys: a sink, softmax1's constant."""
    found = [] if problem.sink is None else [problem.sink.to(problem.accumulator)]
    if problem.choice.softmax_family:
        rest = float(speak(problem.choice.rest)(1.0))
        if rest > 0:
            rows = problem.q.shape[:3]
            found.append(problem.q.new_full((1,), math.log(rest), dtype=problem.accumulator).expand(rows))
    return found
