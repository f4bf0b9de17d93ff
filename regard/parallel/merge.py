"""Parts of a row become the row: (m, z, o) of two parts of the keys, and what joins the denominator once at the end.

    ratio       m = max(m₁, m₂),  z = z₁e^(m₁−m) + z₂e^(m₂−m),  o = (z₁e^(m₁−m)·o₁ + z₂e^(m₂−m)·o₂) / z
    threshold   at one τ everything adds; pointwise maps add too

The sums behind the statistics merge by `regard.statistics.State.merge`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from regard._core.problem import Part, Problem
from regard.normalizers import Choice
from regard.normalizers._language import speak, torch_words
from regard.parallel import merge_statistics
from regard.parallel.layout import Spans, placed
from regard.statistics import State, Statistics

FIELDS = tuple(field.name for field in fields(State))


@dataclass
class Total:
    """The parts of some rows so far, kept in the first one's o. `m` is −inf where nothing weighed anything yet."""

    choice: Choice
    o: Any = None
    m: Any = None
    z: Any = None
    slopes: Any = None
    rises: Any = None
    state: State | None = None
    mix: Any = None  # {name: tensor} in place of the state, from engines that finish statistics

    def add(self, part: Part) -> None:
        m = part.m.masked_fill(part.z == 0, -math.inf) if self.choice.family == "ratio" else part.m
        if self.o is None:
            self.o, self.m, self.z, self.slopes, self.rises = part.o, m, part.z, part.slopes, part.rises
            self.mix = None if part.stats is None else merge_statistics.started(part.stats, part.first)
        elif self.choice.family == "ratio":
            top = torch.maximum(self.m, m)
            safe = top.masked_fill(top == -math.inf, 0.0)
            old, new = self.z * torch.exp(self.m - safe), part.z * torch.exp(m - safe)
            self.m, self.z = top, old + new
            share = torch.where(self.z == 0, 0.0, new / self.z)  # a NaN stays
            self.o.lerp_(part.o, share[..., None])
            if part.stats is not None:
                self.mix = merge_statistics.mixed(
                    self.mix, merge_statistics.started(part.stats, part.first), old, new, False
                )
        else:
            self.o += part.o
            self.z = self.z + part.z
            self.slopes = None if self.slopes is None else self.slopes + part.slopes
            self.rises = None if self.rises is None else self.rises + part.rises
            if part.stats is not None:
                other = merge_statistics.started(part.stats, part.first)
                self.mix = merge_statistics.mixed(self.mix, other, self.mix["mass"], other["mass"], True)
        if part.sums is not None:
            state = State(**{name: x[..., None] for name, x in zip(FIELDS, part.sums, strict=True)})
            self.state = state if self.state is None else merged(self.state, state, self.choice)

    def statistics(self, problem: Problem, m: Tensor, z: Tensor, c: Tensor | None) -> Statistics:
        """Those named in `problem.stats`, of whole rows whose m and z `finish` gave; a threshold map's τ is m + c."""
        if self.mix is None:
            sink = None if problem.sink is None else problem.sink.double()[..., None]
            above = None
            if self.choice.family == "threshold" and c is not None:  # told from the maximum on: logits round
                top = self.state.top
                above = torch.where(top.abs() < math.inf, -c.double()[..., None], top - self.state.shift)
            return self.state.finish(self.choice, sink, above=above)
        silent = None
        if self.choice.family == "ratio":
            silent = torch.zeros_like(z)
            for logit in silent_logits(problem):
                silent = silent + torch.exp(logit - m) / z
        return merge_statistics.finished(self.mix, problem.stats, m, z, silent)

    def finish(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
        """(o, m, z) of whole rows, once every part is in: sink and rest join, dead rows are 0."""
        o, m, z = self.o, self.m, self.z
        if self.choice.family == "threshold":
            total = z[..., None]
            return torch.where(total == 0, 0.0, o / total), m, self.slopes
        if self.choice.family == "pointwise":
            return o, torch.zeros_like(m), torch.zeros_like(z)
        dead = m == -math.inf
        logits = silent_logits(problem)
        if self.choice.exponential and not logits:  # nothing joins: o is what it is, and 0 where dead
            return o, m.masked_fill(dead, 0.0), z
        if not self.choice.exponential:
            m = m.masked_fill(dead, 0.0)
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
        kept, m, z = (x.masked_fill(dead, 0.0) for x in (kept, m, z))
        return o * kept[..., None], m, z


def join(totals: list[Total], chunks: Spans, here: slice, part: Part) -> None:
    """A part of the rows `here` joins the totals of the chunks that lie in them."""
    for total, (_, rows) in zip(totals, placed(chunks), strict=True):
        if rows == here:
            total.add(part)
        elif here.start <= rows.start < rows.stop <= here.stop:
            total.add(_rows(part, slice(rows.start - here.start, rows.stop - here.start)))


def _rows(part: Part, here: slice) -> Part:
    o, m, z = (x[:, :, here] for x in (part.o, part.m, part.z))
    slopes = None if part.slopes is None else part.slopes[:, :, here]
    sums = None if part.sums is None else part.sums[..., here]
    stats = None if part.stats is None else {name: x[:, :, here] for name, x in part.stats.items()}
    rises = None if part.rises is None else part.rises[:, :, here]
    return replace(part, o=o, m=m, z=z, slopes=slopes, sums=sums, stats=stats, rises=rises)


def merged(first: State, second: State, choice: Choice) -> State:
    """Both parts' sums. A part without keys has no say in the shift."""
    if choice.family != "ratio":
        first = replace(first, shift=torch.where(first.n == 0, second.shift, first.shift))
    return first.merge(second, choice)


def nothing(rows: Problem, mixes: bool = False, high: Tensor | None = None, rises: bool = False) -> Part:
    """The part of rows in which nobody sees a key.

    mixes: with its statistics finished. high: m of these rows. rises: with Σg′·v, which is 0.
    """
    shape, like = rows.q.shape[:3], dict(dtype=rows.accumulator, device=rows.q.device)
    sums = None
    if rows.stats:
        sums = torch.zeros((len(FIELDS), *shape), dtype=torch.float64, device=rows.q.device)
        sums[FIELDS.index("top")] = -math.inf
    zero = torch.zeros(shape, **like)
    m = zero if high is None else high.to(zero.dtype)
    slopes = zero if rows.choice.family == "threshold" else None
    if rows.stats and mixes:
        bare = torch.full_like(zero, -math.inf)
        named = merge_statistics.needed(rows.stats)
        stats = {name: bare if name in ("max_logit", "logsumexp") else zero for name in named}
        return Part(torch.zeros((*shape, rows.v.shape[-1]), **like), m, zero, slopes, stats=stats)
    o = torch.zeros((*shape, rows.v.shape[-1]), **like)
    return Part(o, m, zero, slopes, sums, rises=torch.zeros_like(o) if rises else None)


def silent_logits(problem: Problem) -> list[Tensor]:
    """What joins Z of the softmax family beside the keys, as logits [B, H, M]: a sink, softmax1's silent key."""
    found = [] if problem.sink is None else [problem.sink.to(problem.accumulator)]
    if problem.choice.softmax_family:
        rest = float(speak(problem.choice.rest)(1.0))
        if rest > 0:
            rows = problem.q.shape[:3]
            found.append(problem.q.new_full((1,), math.log(rest), dtype=problem.accumulator).expand(rows))
    return found
