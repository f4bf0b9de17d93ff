"""Keys stay, queries travel: for threshold maps, and for decoding, where every rank has the queries already.

A threshold τ belongs to the whole row, so each rank evaluates F(τ) = Σ g and F′ on its own keys, and an all-reduce of
two numbers per row and step makes them whole. A ring would have to carry k round once per step. The start is

    τ₀ = max over ranks of the τ that solves the rank's own keys       (more keys only raise τ, so τ₀ is not beyond it)

from where Newton's steps, on a convex falling F, rise to τ without passing it. What a rank's own solution leaves
without weight has none in the whole row either, so that the steps, and the weights after them, look at each rank's own
support alone. Only if one of them has more than ROOM keys are all keys swept again, at every step and to weigh; to
weigh also where statistics are wanted, which count every visible key.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from regard._core.problem import Part, Problem, Upstream, Whole
from regard.normalizers._language import speak
from regard.parallel.gradients import KeyGradients, RowGradients, rows_of, upstream_of
from regard.parallel.group import Line
from regard.parallel.layout import Spans
from regard.parallel.merge import Total, join, nothing
from regard.parallel.plan import Plan

ROOM = 128  # keys of a support that are kept
STEPS = 64
NEWTON = (
    16  # steps: from τ₀ it needs 2 to 6. Where F is not convex (α > 2) it may not arrive, and the bracket is halved
)
CLOSE = {torch.float64: 1e-11}  # |F − 1| before the last step; 1e-5 for the others, and the step squares it


@dataclass
class Solved:
    """The thresholds of whole rows, and what this rank's keys gave for them."""

    high: Tensor  # [B, H, M]: the largest gain·s
    c: Tensor  # τ − high
    pairs: list[tuple[slice, slice, Problem]]
    kept: list | None = None  # of each pair (what its own solution kept, its own high − the row's); None: no room
    broken: Tensor | None = None  # [B, H, M], where a score was NaN or infinite: such rows are NaN throughout

    def part(self, plan: Plan, index: int) -> Part:
        here, _, pair = self.pairs[index]
        high, c = self.high[:, :, here], self.c[:, :, here]
        if not lean(plan, pair, self):
            part = plan.engine.weigh(pair, *(x.to(pair.accumulator) for x in (high, c)))
        else:
            assert self.kept is not None
            part = plan.engine.gathered(pair, *self.kept[index], high, c, plan.pulls)
        if self.broken is not None:
            for x in (part.o, part.z[..., None], part.slopes[..., None]):
                x.masked_fill_(self.broken[:, :, here, None], math.nan)
        return part


def lean(plan: Plan, rows: Problem, solved: Solved) -> bool:
    """Do weights come from what was kept, with all that gradients need, in place of a second sweep?"""
    able = hasattr(plan.engine, "gathered") and solved.kept is not None
    return able and not rows.stats and not rows.dropout_p


def parts(plan: Plan, rows: Problem, queries: Spans) -> tuple[list[Total], Tensor | None, Tensor | None]:
    """This rank's keys for these rows: (a total per query chunk, and for threshold maps high and c [B, H, M])."""
    totals = [Total(rows.choice) for _ in queries]
    wide, rises, high, c = rows.accumulator, False, None, None
    if rows.choice.family != "threshold":
        for here, _, pair in plan.pairs(rows, queries, **_own(plan)):
            join(totals, queries, here, plan.engine.forward(pair))
    else:
        solved = solve(plan, rows, queries)
        for index, (here, _, _) in enumerate(solved.pairs):
            join(totals, queries, here, solved.part(plan, index))
        high, c = solved.high.to(wide), solved.c.to(wide)
        rises = plan.pulls and lean(plan, rows, solved)
    for total, (here, chunk) in zip(totals, plan.rows(rows, queries), strict=True):
        if total.o is None:
            total.add(nothing(chunk, plan.mixes, None if high is None else high[:, :, here], rises))
    return totals, high, c


def solve(plan: Plan, rows: Problem, queries: Spans) -> Solved:
    """The whole rows' thresholds, by all ranks together."""
    line, shape = plan.line, rows.q.shape[:3]
    pairs = list(plan.pairs(rows, queries, **_own(plan)))
    bounds = torch.full((2, *shape), -math.inf, dtype=torch.float64, device=rows.q.device)
    found, crowded = [], bounds.new_zeros(1)
    for here, _, pair in pairs:
        high, c, kept = plan.engine.solve(pair, ROOM)
        high = high.masked_fill(high.isnan(), math.inf)  # the maximum of a NaN is the backend's affair
        wide = high.double()  # where τ is told apart from it
        own = torch.stack([wide, torch.where(wide == -math.inf, -math.inf, wide + c)])
        bounds[..., here] = torch.maximum(bounds[..., here], own)
        crowded = torch.maximum(crowded, (kept[0] > ROOM).any())
        found.append((kept, high))
    told = line.all_reduce(torch.cat([bounds.reshape(-1), crowded]), "newton", 0, dist.ReduceOp.MAX)
    bounds, crowded = told[:-1].view(bounds.shape), bool(told[-1])
    broken, dead = bounds[0] == math.inf, bounds[0].isinf()
    high, tau = bounds.masked_fill(dead, 0.0)
    solved = Solved(high, (tau - high).clamp(-1.0, 0.0), pairs, broken=broken if bool(broken.any()) else None)
    if not crowded:
        places = [here for here, _, _ in pairs]
        solved.kept = [(kept, own.double() - high[:, :, here]) for here, (kept, own) in zip(places, found, strict=True)]
    solved.c = _newton(line, rows, solved.c, dead, functools.partial(_sums, plan, solved))
    return solved


def _sums(plan: Plan, solved: Solved, c: Tensor) -> Tensor:
    """This rank's (F, F′) [2, B, H, M]: from the keys that were kept, as no other can be in a row's support, or all."""
    total = c.new_zeros((2, *c.shape))
    for index, (here, _, pair) in enumerate(solved.pairs):
        if solved.kept is not None:
            total[..., here] += plan.engine.summed(pair, *solved.kept[index], c[:, :, here])
        else:
            at = (x[:, :, here].to(pair.accumulator) for x in (solved.high, c))
            total[..., here] += torch.stack(plan.engine.measure(pair, *at))
    return total


def _newton(line: Line, rows: Problem, c: Tensor, dead: Tensor, sums) -> Tensor:
    """c with F(high + c) = 1, from below, but for rounding; sums(c) are this rank's (F, F′)."""
    choice = rows.choice
    gain = float(speak(choice.gain)(choice.theta or 0.0))
    low, ceiling = torch.full_like(c, -1.0), torch.zeros_like(c)
    for step in range(1, STEPS):
        value, slope = line.all_reduce(sums(c), "newton", step)
        over = (value - 1.0).masked_fill(dead, 0.0)
        low, ceiling = torch.where(over >= 0, c, low), torch.where(over < 0, c, ceiling)
        far = value.clamp_min(1e-300)
        rise = (far - far ** (1.0 - gain)) if choice.is_power else over * gain
        moved = c + rise / slope.where(slope > 0, 1.0)
        inside = (moved >= low) & (moved <= ceiling) & (slope > 0) & (step < NEWTON)
        c = torch.where(over == 0, c, torch.where(inside, moved, 0.5 * (low + ceiling)))
        if not bool((over.abs() > CLOSE.get(rows.q.dtype, 1e-5)).any()):
            break
    return c


def backward(
    plan: Plan, rows: Problem, queries: Spans, whole: Whole, upstream: Upstream, keys: KeyGradients, known: bool = False
):
    """(dq, dtemperature, dbias) of these rows from this rank's keys, dbias in its columns; dk and dv join `keys`.

    known: is δ there? Otherwise a threshold map's is made here, in a sweep and an all-reduce of its own.
    """
    pairs = list(plan.pairs(rows, queries, **_own(plan)))
    if whole.c is not None and not known:  # a threshold map whose δ nobody knows
        total = torch.zeros_like(whole.m)
        for here, _, pair in pairs:
            own = plan.engine.slopes(pair, upstream.o[:, :, here], whole.m[:, :, here], whole.c[:, :, here])
            total[:, :, here] += own
        total = plan.line.all_reduce(total, "delta")
        whole = replace(whole, delta=torch.where(whole.z == 0, 0.0, total / whole.z))
    sums = RowGradients(rows, upstream)
    for here, there, pair in pairs:
        grads = plan.engine.backward(pair, rows_of(whole, here), upstream_of(upstream, here))
        sums.add(grads, here, there)
        keys.add(grads, there)
    return sums.q, sums.heat, sums.bias


def _own(plan: Plan) -> dict:
    return dict(keys=plan.keys[plan.line.rank], k=plan.problem.k, v=plan.problem.v, own_columns=True)
