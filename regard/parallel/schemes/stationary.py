"""Each rank computes with its own keys only: for threshold maps, and for decoding, where every rank has the queries.

A threshold τ belongs to the whole row, so each rank evaluates F(τ) = Σ g and F′ on its own keys, and each step sums
two numbers per row over the ranks. (A ring would have to carry k round once per step.) The start is

    τ₀ = max over ranks of the τ that solves the rank's own keys       (more keys only raise τ, so τ₀ ≤ τ)

from where Newton's steps on the convex, falling F rise to τ without passing it. A key without weight in its rank's own
solution has none in the whole row, so steps need only each rank's own support. All keys are swept again for the
weights, and at every step if a support has more than ROOM keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from regard._core.problem import Part, Problem, Upstream, Whole
from regard.normalizers._language import speak
from regard.parallel.gradients import KeyGradients, RowGradients, slice_rows, slice_upstream
from regard.parallel.group import RankGroup
from regard.parallel.layout import Spans
from regard.parallel.merge import Total, add_part, empty_part
from regard.parallel.plan import Plan

ROOM = 128  # keys of a support that are kept
STEPS = 64  # of Newton's, at most; 2 to 6 are usual
CLOSE = {torch.float64: 1e-11}  # |F − 1| before the last step; 1e-5 for the others, and the step squares it


@dataclass
class Solved:
    """The thresholds of whole rows, and what this rank's keys gave for them."""

    high: Tensor  # [B, H, M]: the largest gain·s
    c: Tensor  # τ − high
    pairs: list[tuple[slice, slice, Problem]]
    kept: list | None = None  # per pair (what `solve` kept, its high − the row's); None if over ROOM
    broken: Tensor | None = None  # [B, H, M]: rows with a NaN or infinite score, which become NaN

    def part(self, plan: Plan, index: int) -> Part:
        """Return the part of one pair at the whole rows' thresholds."""
        here, _, pair = self.pairs[index]
        part = plan.engine.weigh(pair, *(x[:, :, here].to(pair.accumulator) for x in (self.high, self.c)))
        if self.broken is not None:
            for x in (part.o, part.z[..., None], part.slopes[..., None]):
                x.masked_fill_(self.broken[:, :, here, None], math.nan)
        return part


def compute_parts(plan: Plan, rows: Problem, queries: Spans) -> tuple[list[Total], Tensor | None, Tensor | None]:
    """Return (a total per query chunk over this rank's keys; for threshold maps high and c [B, H, M], else None)."""
    totals = [Total(rows.choice) for _ in queries]
    wide, high, c = rows.accumulator, None, None
    if rows.choice.family != "threshold":
        for here, _, pair in plan.pairs(rows, queries, **_own_keys(plan)):
            add_part(totals, queries, here, plan.engine.forward(pair))
    else:
        solved = solve(plan, rows, queries)
        for index, (here, _, _) in enumerate(solved.pairs):
            add_part(totals, queries, here, solved.part(plan, index))
        high, c = solved.high.to(wide), solved.c.to(wide)
    for total, (here, chunk) in zip(totals, plan.rows(rows, queries), strict=True):
        if total.o is None:
            total.add(empty_part(chunk, plan.finishes_statistics, None if high is None else high[:, :, here]))
    return totals, high, c


def solve(plan: Plan, rows: Problem, queries: Spans) -> Solved:
    """Return the thresholds of whole rows, solved by all ranks together."""
    group, shape = plan.group, rows.q.shape[:3]
    pairs = list(plan.pairs(rows, queries, **_own_keys(plan)))
    bounds = torch.full((2, *shape), -math.inf, dtype=torch.float64, device=rows.q.device)
    found, crowded = [], bounds.new_zeros(1)
    for here, _, pair in pairs:
        high, c, kept = plan.engine.solve(pair, ROOM)
        high = high.masked_fill(high.isnan(), math.inf)  # backends differ in the maximum of a NaN
        wide = high.double()  # float64 keeps τ apart from it
        own = torch.stack([wide, torch.where(wide == -math.inf, -math.inf, wide + c)])
        bounds[..., here] = torch.maximum(bounds[..., here], own)
        crowded = torch.maximum(crowded, (kept[0] > ROOM).any())
        found.append((kept, high))
    reduced = group.all_reduce(torch.cat([bounds.reshape(-1), crowded]), "newton", 0, dist.ReduceOp.MAX)
    bounds, crowded = reduced[:-1].view(bounds.shape), bool(reduced[-1])
    broken, empty = bounds[0] == math.inf, bounds[0].isinf()
    high, tau = bounds.masked_fill(empty, 0.0)
    solved = Solved(high, (tau - high).clamp(-1.0, 0.0), pairs, broken=broken if bool(broken.any()) else None)
    if not crowded:
        places = [here for here, _, _ in pairs]
        solved.kept = [(kept, own.double() - high[:, :, here]) for here, (kept, own) in zip(places, found, strict=True)]
    solved.c = _newton(group, rows, solved.c, empty, functools.partial(_sums, plan, solved))
    return solved


def _sums(plan: Plan, solved: Solved, c: Tensor) -> Tensor:
    """Return this rank's (F, F′) [2, B, H, M], from the kept keys if they hold every support, else from all."""
    total = c.new_zeros((2, *c.shape))
    for index, (here, _, pair) in enumerate(solved.pairs):
        if solved.kept is not None:
            total[..., here] += plan.engine.summed(pair, *solved.kept[index], c[:, :, here])
        else:
            at = (x[:, :, here].to(pair.accumulator) for x in (solved.high, c))
            total[..., here] += torch.stack(plan.engine.measure(pair, *at))
    return total


def _newton(group: RankGroup, rows: Problem, c: Tensor, empty: Tensor, sums: Callable[[Tensor], Tensor]) -> Tensor:
    """Return c with F(high + c) = 1, approached from below; sums(c) gives this rank's (F, F′)."""
    choice = rows.choice
    gain = float(speak(choice.gain)(choice.theta or 0.0))
    for step in range(1, STEPS):
        value, slope = group.all_reduce(sums(c), "newton", step)
        over = (value - 1.0).masked_fill(empty, 0.0)
        far = value.clamp_min(1e-300)
        rise = (far - far ** (1.0 - gain)) if choice.is_power else over * gain
        moved = (c + rise / slope.where(slope > 0, 1.0)).clamp(-1.0, 0.0)
        c = torch.where((over == 0) | (slope <= 0), c, moved)
        if not bool((over.abs() > CLOSE.get(rows.q.dtype, 1e-5)).any()):
            break
    return c


def backward(
    plan: Plan, rows: Problem, queries: Spans, whole: Whole, upstream: Upstream, keys: KeyGradients
) -> tuple[Tensor, Tensor | None]:
    """Return (dq, dtemperature) of these rows from this rank's keys, and add dk and dv to `keys`."""
    pairs = list(plan.pairs(rows, queries, **_own_keys(plan)))
    if whole.c is not None:  # δ of a threshold map takes a sweep and an all-reduce of its own
        total = torch.zeros_like(whole.m)
        for here, _, pair in pairs:
            own = plan.engine.slopes(pair, upstream.o[:, :, here], whole.m[:, :, here], whole.c[:, :, here])
            total[:, :, here] += own
        total = plan.group.all_reduce(total, "delta")
        whole = replace(whole, delta=torch.where(whole.z == 0, 0.0, total / whole.z))
    sums = RowGradients(rows, upstream)
    for here, there, pair in pairs:
        grads = plan.engine.backward(pair, slice_rows(whole, here), slice_upstream(upstream, here))
        sums.add(grads, here, there)
        keys.add(grads, there)
    return sums.q, sums.temperature


def _own_keys(plan: Plan) -> dict:
    return dict(keys=plan.keys[plan.group.rank], k=plan.problem.k, v=plan.problem.v, own_columns=True)
