"""Keys stay, queries travel: for threshold maps, and for decoding, where every rank has the queries already.

A threshold τ belongs to the whole row, so each rank evaluates F(τ) = Σ g and F′ on its own keys, and an all-reduce of
two numbers per row and step makes them whole. A ring would have to carry k round once per step. The start is

    τ₀ = max over ranks of the τ that solves the rank's own keys       (more keys only raise τ, so τ₀ is not beyond it)

from where Newton's steps, on a convex falling F, rise to τ without passing it. What a rank's own solution leaves
without weight has none in the whole row either, so that the steps look at each rank's own support alone; only if one
of them has more than ROOM keys are all keys swept again at every step.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from regard.cpu._rows_threshold import is_power
from regard.normalizers._language import speak
from regard.parallel.gradients import KeyGradients, RowGradients, rows_of, upstream_of
from regard.parallel.layout import Spans
from regard.parallel.line import Line
from regard.parallel.merge import Total, join, nothing
from regard.parallel.plan import Plan
from regard.problem import Problem, Upstream, Whole
from regard.statistics import Terms

ROOM = 128  # keys of a support that are kept
STEPS = 64
NEWTON = (
    16  # steps: from τ₀ it needs 2 to 6. Where F is not convex (α > 2) it may not arrive, and the bracket is halved
)
CLOSE = {torch.float64: 1e-11}  # |F − 1| before the last step; 1e-5 for the others, and the step squares it
power = functools.cache(is_power)


def parts(plan: Plan, rows: Problem, queries: Spans) -> tuple[list[Total], Tensor | None, Tensor | None]:
    """This rank's keys for these rows: (a total per query chunk, and for threshold maps high and c [B, H, M])."""
    own = _own(plan)
    totals = [Total(rows.choice) for _ in queries]
    if rows.choice.family != "threshold":
        for here, _, pair in plan.pairs(rows, queries, **own):
            join(totals, queries, here, plan.engine.forward(pair))
        high = c = None
    else:
        high, c = solve(plan, rows, queries)
        for here, _, pair in plan.pairs(rows, queries, **own):
            join(totals, queries, here, plan.engine.weigh(pair, high[:, :, here], c[:, :, here]))
    for total, (here, chunk) in zip(totals, plan.rows(rows, queries), strict=True):
        if total.o is None:
            total.add(nothing(chunk, plan.mixes, None if high is None else high[:, :, here]))
    return totals, high, c


def solve(plan: Plan, rows: Problem, queries: Spans) -> tuple[Tensor, Tensor]:
    """(high, c): the largest gain·s of every whole row, and τ − high."""
    line, shape = plan.line, rows.q.shape[:3]
    pairs = list(plan.pairs(rows, queries, **_own(plan)))
    bounds = torch.full((2, *shape), -math.inf, dtype=torch.float64, device=rows.q.device)
    supports, crowded = [], bounds.new_zeros(1)
    for here, _, pair in pairs:
        high, c, counts, support = plan.engine.solve(pair, ROOM)
        found = torch.stack([high, torch.where(high == -math.inf, -math.inf, high + c)]).double()
        bounds[..., here] = torch.maximum(bounds[..., here], found)
        crowded = torch.maximum(crowded, (counts > ROOM).any())
        supports.append((here, high, support))
    told = line.all_reduce(torch.cat([bounds.reshape(-1), crowded]), "newton", 0, dist.ReduceOp.MAX)
    bounds, crowded = told[:-1].view(bounds.shape), bool(told[-1])
    dead = bounds[0] == -math.inf
    high, tau = bounds.masked_fill(dead, 0.0)
    if crowded:
        sums = functools.partial(_sums_of_keys, plan, pairs, high)
    else:
        moved = [(here, x + (own - high[:, :, here])[..., None]) for here, own, x in supports]
        sums = functools.partial(_sums_of_supports, rows, moved)
    c = _newton(line, rows, tau - high, dead, sums)
    return high.to(rows.accumulator), c.to(rows.accumulator)


def _newton(line: Line, rows: Problem, c: Tensor, dead: Tensor, sums) -> Tensor:
    """c with F(high + c) = 1, from below; sums(c) are this rank's (F, F′)."""
    choice = rows.choice
    gain = float(speak(choice.gain)(choice.theta or 0.0))
    low, ceiling = c, torch.zeros_like(c)
    for step in range(1, STEPS):
        value, slope = line.all_reduce(sums(c), "newton", step)
        over = (value - 1.0).masked_fill(dead, 0.0)
        low, ceiling = torch.where(over >= 0, c, low), torch.where(over < 0, c, ceiling)
        far = value.clamp_min(1e-300)
        rise = (far - far ** (1.0 - gain)) if power(choice.normalizer) else over * gain
        moved = c + rise / slope.where(slope > 0, 1.0)
        inside = (moved >= low) & (moved <= ceiling) & (slope > 0) & (step < NEWTON)
        c = torch.where(over == 0, c, torch.where(inside, moved, 0.5 * (low + ceiling)))
        if not bool((over.abs() > CLOSE.get(rows.q.dtype, 1e-5)).any()):
            break
    return c


def _sums_of_supports(rows: Problem, supports: list, c: Tensor) -> Tensor:
    """From the keys that each part's own solution left above its threshold: no other can be in the row's support."""
    terms, total = Terms(rows.choice), c.new_zeros((2, *c.shape))
    for here, x in supports:
        t = (x - c[:, :, here, None]).clamp_min(0.0)
        total[0][:, :, here] += terms.tile["value"](t, terms.theta).sum(-1)
        total[1][:, :, here] += torch.where(t > 0, terms.tile["slope"](t, terms.theta), 0.0).sum(-1)
    return total


def _sums_of_keys(plan: Plan, pairs: list, high: Tensor, c: Tensor) -> Tensor:
    """From all keys again, where a support found no room."""
    total = c.new_zeros((2, *c.shape))
    for here, _, pair in pairs:
        wide = pair.accumulator
        value, slope = plan.engine.measure(pair, high[:, :, here].to(wide), c[:, :, here].to(wide))
        total[0][:, :, here] += value
        total[1][:, :, here] += slope
    return total


def backward(plan: Plan, rows: Problem, queries: Spans, whole: Whole, upstream: Upstream, keys: KeyGradients):
    """(dq, dtemperature, dbias) of these rows from this rank's keys, dbias in its columns; dk and dv join `keys`."""
    pairs = list(plan.pairs(rows, queries, **_own(plan)))
    if whole.c is not None:  # a threshold map
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
