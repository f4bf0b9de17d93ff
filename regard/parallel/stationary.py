"""Keys stay, queries travel: for threshold maps, and for decoding, where every rank has the queries already.

A threshold τ belongs to the whole row, so each rank evaluates F(τ) = Σ g and F′ on its own keys, and an all-reduce of
two numbers per row and step makes them whole. A ring would have to carry k round once per step. The start is

    τ₀ = max over ranks of the τ that solves the rank's own keys       (more keys only raise τ, so τ₀ is not beyond it)

from where Newton's steps, on a convex falling F, rise to τ without passing it.
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
from regard.parallel.merge import Total, nothing
from regard.parallel.plan import Plan
from regard.problem import Problem, Upstream, Whole

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
        for index, _, _, pair in plan.pairs(rows, queries, **own):
            totals[index].add(plan.engine.forward(pair))
        high = c = None
    else:
        high, c = solve(plan, rows, queries)
        for index, here, _, pair in plan.pairs(rows, queries, **own):
            totals[index].add(plan.engine.weigh(pair, high[:, :, here], c[:, :, here]))
    for total, (_, chunk) in zip(totals, plan.rows(rows, queries), strict=True):
        if total.o is None:
            total.add(nothing(chunk, plan.mixes))
    return totals, high, c


def solve(plan: Plan, rows: Problem, queries: Spans) -> tuple[Tensor, Tensor]:
    """(high, c): the largest gain·s of every whole row, and τ − high."""
    line, shape = plan.line, rows.q.shape[:3]
    bounds = torch.full((2, *shape), -math.inf, dtype=torch.float64, device=rows.q.device)
    pairs = list(plan.pairs(rows, queries, **_own(plan)))
    for _, here, _, pair in pairs:
        high, c = (x.double() for x in plan.engine.solve(pair))
        found = torch.stack([high, torch.where(high == -math.inf, -math.inf, high + c)])
        bounds[..., here] = torch.maximum(bounds[..., here], found)
    bounds = line.all_reduce(bounds, "newton", 0, dist.ReduceOp.MAX)
    dead = bounds[0] == -math.inf
    high, tau = bounds.masked_fill(dead, 0.0)
    low, ceiling = tau - high, torch.zeros_like(tau)
    c = low
    narrow = rows.accumulator
    choice, theta = rows.choice, rows.choice.theta or 0.0
    gain = float(speak(choice.gain)(theta))
    for step in range(1, STEPS):
        sums = torch.zeros((2, *shape), dtype=torch.float64, device=rows.q.device)
        for _, here, _, pair in pairs:
            value, slope = plan.engine.measure(pair, high[:, :, here].to(narrow), c[:, :, here].to(narrow))
            sums[0][:, :, here] += value
            sums[1][:, :, here] += slope
        value, slope = line.all_reduce(sums, "newton", step)
        over = (value - 1.0).masked_fill(dead, 0.0)
        low, ceiling = torch.where(over >= 0, c, low), torch.where(over < 0, c, ceiling)
        far = value.clamp_min(1e-300)
        rise = (far - far ** (1.0 - gain)) if power(choice.normalizer) else over * gain
        moved = c + rise / slope.where(slope > 0, 1.0)
        inside = (moved >= low) & (moved <= ceiling) & (slope > 0) & (step < NEWTON)
        c = torch.where(over == 0, c, torch.where(inside, moved, 0.5 * (low + ceiling)))
        if not bool((over.abs() > CLOSE.get(rows.q.dtype, 1e-5)).any()):
            break
    return high.to(narrow), c.to(narrow)


def backward(plan: Plan, rows: Problem, queries: Spans, whole: Whole, upstream: Upstream, keys: KeyGradients):
    """(dq, dtemperature, dbias) of these rows from this rank's keys, dbias in its columns; dk and dv join `keys`."""
    pairs = list(plan.pairs(rows, queries, **_own(plan)))
    if rows.choice.family == "threshold":
        total = torch.zeros_like(whole.m)
        for _, here, _, pair in pairs:
            own = plan.engine.slopes(pair, upstream.o[:, :, here], whole.m[:, :, here], whole.c[:, :, here])
            total[:, :, here] += own
        total = plan.line.all_reduce(total, "delta")
        whole = replace(whole, delta=torch.where(whole.z == 0, 0.0, total / whole.z))
    sums = RowGradients(rows, upstream)
    for _, here, there, pair in pairs:
        grads = plan.engine.backward(pair, rows_of(whole, here), upstream_of(upstream, here))
        sums.add(grads, here, there)
        keys.add(grads, there)
    return sums.q, sums.heat, sums.bias


def _own(plan: Plan) -> dict:
    return dict(keys=plan.keys[plan.line.rank], k=plan.problem.k, v=plan.problem.v, own_columns=True)
