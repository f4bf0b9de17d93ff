"""The engine in plain torch: attention over some of the keys, a block of queries at a time, on any device and dtype.

The fused engines (`attention.partial` of each backend) have the same functions:

    forward    Part(o, m, z) and the statistics' sums, for ratio and pointwise maps
    solve      (high = the largest gain·s, τ − high) of this part alone; how many keys lie above τ, their gain·s − high
    summed     (F, Σg′) at a given τ, of the keys that `solve` kept
    measure    (F, Σg′) at a given τ, of all keys
    weigh      Part(Σp·v, Σp, Σg′) at a given τ
    slopes     Σ g′·dp at a given τ
    backward   Gradients of this part, from the state of its whole rows
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import masks
from regard._core import philox
from regard._core.problem import Gradients, Part, Problem, Upstream, Whole
from regard.parallel.gradients import unexpanded_shape
from regard.parallel.merge import FIELDS
from regard.statistics import State, Terms, solve_shift

SCORES = 1 << 22  # in one block, about


@dataclass
class Block:
    """The logits of some queries: s [B, H, m, N] (0 where hidden), the visible pairs, and cap(x) before bias."""

    problem: Problem
    rows: slice
    s: Tensor
    visible: Tensor
    capped: Tensor
    keys: Tensor
    values: Tensor

    @property
    def positions(self) -> tuple[Tensor, Tensor]:
        """Positions of queries [m, 1] or [B, H, m, 1] and of keys [N] in the whole sequence."""
        first, p = self.rows.start + self.problem.first_query, self.problem
        i = torch.arange(first, first + self.s.shape[2], device=self.s.device, dtype=self.s.dtype)[:, None]
        if p.interval is not None:
            i = p.interval[2, :, :, self.rows, None].to(self.s.dtype)
        return i, torch.arange(p.first_key, p.first_key + self.s.shape[3], device=self.s.device, dtype=self.s.dtype)

    def dropout_factors(self) -> Tensor | None:
        """Return 1/(1 − p) where dropout keeps a weight, 0 elsewhere; None without dropout."""
        p = self.problem
        if not p.dropout_p:
            return None
        total = p.queries or p.q.shape[2]
        shape = (*self.s.shape[:3], p.first_key + self.s.shape[3])
        keep = philox.keep(p.seed.cpu(), shape, p.dropout_p, self.rows.start + p.first_query, total)
        return keep[..., p.first_key :].to(self.s) / (1.0 - p.dropout_p)


def blocks(problem: Problem) -> Iterator[Block]:
    """Yield the problem a block of queries at a time."""
    batch, heads, queries, _ = problem.q.shape
    keys = problem.k.shape[2]
    step = max(1, SCORES // max(1, batch * heads * keys))
    k, v = problem.k.to(problem.accumulator), problem.v.to(problem.accumulator)
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        q = problem.q[:, :, rows].to(problem.accumulator)
        count = rows.stop - rows.start
        visible = _visible(problem, rows, count, keys)
        unseen = ~visible.any(2)  # keys that no query sees must not leak, not even as NaN
        unseen = unseen.unflatten(1, (k.shape[1], -1)).all(2)[..., None] if heads else unseen[..., None]
        own_k, own_v = (x.masked_fill(unseen, 0.0) for x in (k, v))
        s = problem.scale * _matmul_heads(q, own_k.mT)
        if problem.softcap is not None:
            s = problem.softcap * torch.tanh(s / problem.softcap)
        capped = s
        if problem.bias is not None:
            s = s + problem.bias[:, :, rows].to(s.dtype)
        if problem.temperature is not None:
            s = s / problem.temperature[:, :, rows, None]
        visible = visible & (s != -math.inf)
        yield Block(problem, rows, s.masked_fill(~visible, 0.0), visible, capped, own_k, own_v)


def _visible(problem: Problem, rows: slice, count: int, keys: int) -> Tensor:
    left, right = problem.reach
    first = problem.first_query - problem.first_key + rows.start
    visible = masks.window(count, keys, left, right, first=first, device=problem.q.device)[None, None]
    if problem.key_lengths is not None:
        ends = (problem.key_lengths - problem.first_key).clamp(0, keys)
        visible = visible & masks.padding(ends, keys)[:, None, None]
    if problem.interval is not None:
        lo, hi, _ = problem.interval[..., rows] - problem.first_key
        visible = visible & masks.interval(lo, hi, keys)
    if problem.mask is not None:
        visible = visible & problem.mask[:, :, rows]
    if problem.bias is not None:
        visible = visible & (problem.bias[:, :, rows] != -math.inf)
    return visible.expand(*problem.q.shape[:2], count, keys)


def _matmul_heads(x: Tensor, y: Tensor) -> Tensor:
    """Return x [B, H, m, C] · y [B, G, C, n] for grouped heads: [B, H, m, n]."""
    batch, heads, rows, _ = x.shape
    groups = y.shape[1]
    together = heads // max(1, groups) * rows
    return (x.reshape(batch, groups, together, x.shape[-1]) @ y).reshape(batch, heads, rows, y.shape[-1])


def _matmul_keys(x: Tensor, y: Tensor, groups: int) -> Tensor:
    """Return Σ xᵀ·y over rows and the heads of a group, x [B, H, m, n], y [B, H, m, C]: [B, G, n, C]."""
    together = x.shape[1] // max(1, groups) * x.shape[2]
    x, y = (z.reshape(z.shape[0], groups, together, z.shape[-1]) for z in (x, y))
    return x.mT @ y


def forward(problem: Problem) -> Part:
    """Return the part of a ratio or pointwise map."""
    o, m, z, sums = _allocate(problem)
    terms = Terms(problem.choice)
    for block in blocks(problem):
        shift = solve_shift(block.s, block.visible, problem.choice)
        u, v, _, _ = (x.masked_fill(~block.visible, 0.0) for x in terms(block.s, shift))
        total = v.sum(-1, keepdim=True)
        inverse = torch.where(total == 0, 0.0, 1.0 / total) if problem.choice.family == "ratio" else 1.0
        kept = block.dropout_factors()
        o[:, :, block.rows] = _matmul_heads(u if kept is None else u * kept, block.values) * inverse
        m[:, :, block.rows], z[:, :, block.rows] = shift.squeeze(-1), total.squeeze(-1)
        _store_sums(block, shift, sums)
    return Part(o, m, z, sums=sums)


def solve(problem: Problem, room: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return (high, τ − high, (support sizes, the `room` largest gain·s − high)) of these keys alone."""
    _, high, c, _ = _allocate(problem)
    counts, support = torch.zeros_like(high, dtype=torch.int64), high.new_full((*high.shape, room), -math.inf)
    gain, keys = _gain(problem), problem.k.shape[2]
    for block in blocks(problem):
        x = (gain * block.s).masked_fill(~block.visible, -math.inf)
        top = x.amax(-1, keepdim=True) if keys else torch.full_like(x.sum(-1, keepdim=True), -math.inf)
        tau = solve_shift(block.s, block.visible, problem.choice) - top
        x = x - top.masked_fill(top == -math.inf, 0.0)
        high[:, :, block.rows], c[:, :, block.rows] = top.squeeze(-1), tau.squeeze(-1)
        counts[:, :, block.rows] = (x > tau).sum(-1)
        support[:, :, block.rows, : min(room, keys)] = x.topk(min(room, keys)).values
    return high, c.masked_fill(high == -math.inf, 0.0), (counts, support)


def summed(problem: Problem, kept: tuple[Tensor, Tensor], offset: Tensor, c: Tensor) -> Tensor:
    """Return (F, Σg′) [2, B, H, M] at τ = high + c over the keys that `solve` kept."""
    _, support = kept
    terms = Terms(problem.choice)
    t = (support + (offset - c)[..., None]).clamp_min(0.0)
    slope = torch.where(t > 0, terms.tile["slope"](t, terms.theta), 0.0)
    return torch.stack([terms.tile["value"](t, terms.theta).sum(-1), slope.sum(-1)]).double()


def measure(problem: Problem, high: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return (F, Σg′) at τ = high + c over all keys."""
    _, value, slope, _ = _allocate(problem)
    for block in blocks(problem):
        u, du = _weigh_at(block, high, c)
        value[:, :, block.rows], slope[:, :, block.rows] = u.sum(-1), du.sum(-1)
    return value.double(), slope.double()


def weigh(problem: Problem, high: Tensor, c: Tensor) -> Part:
    """Return the part of a threshold map at τ = high + c."""
    o, value, slope, sums = _allocate(problem)
    for block in blocks(problem):
        u, du = _weigh_at(block, high, c)
        kept = block.dropout_factors()
        o[:, :, block.rows] = _matmul_heads(u if kept is None else u * kept, block.values)
        value[:, :, block.rows], slope[:, :, block.rows] = u.sum(-1), du.sum(-1)
        _store_sums(block, (high + c)[:, :, block.rows, None], sums)
    return Part(o, high.clone(), value, slope, sums)


def slopes(problem: Problem, do: Tensor, high: Tensor, c: Tensor) -> Tensor:
    """Return Σ g′·dp at τ = high + c."""
    _, total, _, _ = _allocate(problem)
    for block in blocks(problem):
        total[:, :, block.rows] = (_weigh_at(block, high, c)[1] * _weight_gradients(block, do)).sum(-1)
    return total


def backward(problem: Problem, whole: Whole, upstream: Upstream) -> Gradients:
    """Return the gradients of this part, given the state of its whole rows."""
    p, wide = problem, problem.accumulator
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (p.q, p.k, p.v))
    dtemperature = torch.zeros(p.q.shape[:3], dtype=wide, device=p.q.device) if upstream.temperature else None
    db = torch.zeros(unexpanded_shape(p.bias), dtype=wide, device=p.q.device) if upstream.bias else None
    terms = Terms(p.choice)
    for block in blocks(p):
        m, z, delta = (x[:, :, block.rows, None] for x in (whole.m, whole.z, whole.delta))
        dp, kept = _weight_gradients(block, upstream.o), block.dropout_factors()
        if p.choice.family == "ratio":
            inverse = torch.where(z == 0, 0.0, 1.0 / z)
            u, _, du, _ = terms(block.s, m)
            dz = terms.tile["denominator_slope"](torch.exp(block.s - m), block.s, torch.exp(-m).expand(block.s.shape))
            weights, ds = u * inverse, (du * dp - dz * delta) * inverse
        elif p.choice.family == "threshold":
            weights, du = _weigh_at(block, whole.m, whole.c)
            ds = du * (dp - delta)
        else:
            weights, _, du, _ = terms(block.s, m)
            ds = du * dp
        if whole.tilt is not None:
            lift, beta, gamma, mean = (x[..., None] for x in whole.tilt[..., block.rows])
            ds = ds + weights * (lift - beta * (block.s - m)) + gamma * (block.s - mean)
        ds, weights = (x.masked_fill(~block.visible, 0.0) for x in (ds, weights))
        if p.temperature is not None:
            t = p.temperature[:, :, block.rows, None]
            if dtemperature is not None:
                dtemperature[:, :, block.rows] = -(ds * block.s).sum(-1) / t.squeeze(-1)
            ds = ds / t
        if db is not None:
            target = db if db.shape[2] == 1 else db[:, :, block.rows]
            target += ds.sum_to_size(target.shape)
        if p.softcap is not None:
            ds = (ds * (1.0 - (block.capped / p.softcap) ** 2)).masked_fill(~block.visible, 0.0)
        q, do = (x[:, :, block.rows].to(wide) for x in (p.q, upstream.o))
        dq[:, :, block.rows] = p.scale * _matmul_heads(ds, block.keys)
        dk += p.scale * _matmul_keys(ds, q, p.k.shape[1])
        dv += _matmul_keys(weights if kept is None else weights * kept, do, p.k.shape[1])
    return Gradients(dq, dk, dv, db, dtemperature)


def _allocate(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    rows, like = problem.q.shape[:3], dict(dtype=problem.accumulator, device=problem.q.device)
    sums = torch.empty((len(FIELDS), *rows), dtype=torch.float64, device=problem.q.device) if problem.stats else None
    o = torch.empty((*rows, problem.v.shape[-1]), **like)
    return o, torch.empty(rows, **like), torch.empty(rows, **like), sums


def _store_sums(block: Block, shift: Tensor, sums: Tensor | None) -> None:
    if sums is None:
        return
    i, j = block.positions
    state = State.of(block.s.double(), block.visible, block.problem.choice, shift.double(), i.double(), j.double())
    for name, row in zip(FIELDS, sums, strict=True):
        row[:, :, block.rows] = getattr(state, name).squeeze(-1)


def _gain(problem: Problem) -> float:
    terms = Terms(problem.choice)
    return terms.tile["gain"](terms.theta)


def _weigh_at(block: Block, high: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return (p, g′) at τ = high + c, 0 where hidden; the difference from the maximum is exact."""
    terms = Terms(block.problem.choice)
    t = (terms.tile["gain"](terms.theta) * block.s - high[:, :, block.rows, None]) - c[:, :, block.rows, None]
    t = t.clamp_min(0.0).masked_fill(~block.visible, 0.0)
    u = terms.tile["value"](t, terms.theta).to(t.dtype)
    du = torch.where(t > 0, terms.tile["slope"](t, terms.theta), 0.0).to(t.dtype)
    return u, du


def _weight_gradients(block: Block, do: Tensor) -> Tensor:
    dp = _matmul_heads(do[:, :, block.rows].to(block.s.dtype), block.values.mT)
    kept = block.dropout_factors()
    return dp if kept is None else dp * kept
