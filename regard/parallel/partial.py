"""A part of the keys in plain torch, a block of queries at a time: any device, any dtype, any map with tile functions.

What the fused engines (`attention.partial` of each backend) do, said as one reads it:

    forward    Part(o, m, z) and the statistics' sums, for ratio and pointwise maps
    solve      (high = the largest gain·s, τ − high) of this part alone; how many keys lie above τ, their gain·s − high
    summed     (F, Σg′) at a given τ, of the keys that `solve` kept
    measure    (F, Σg′) at a given τ, of all keys
    weigh      Part(Σp·v, Σp, Σg′) at a given τ
    slopes     Σ g′·dp at a given τ
    backward   Gradients of this part, from what is known of its whole rows
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
from regard.parallel.merge import FIELDS
from regard.statistics import State, Terms, solve_shift

SCORES = 1 << 22  # in one block, about


@dataclass
class Block:
    """The logits of some queries: s [B, H, m, N] (0 where hidden), who is seen, and cap(x) before bias."""

    problem: Problem
    rows: slice
    s: Tensor
    seen: Tensor
    capped: Tensor
    keys: Tensor
    values: Tensor

    @property
    def positions(self) -> tuple[Tensor, Tensor]:
        first, p = self.rows.start + self.problem.first_query, self.problem
        i = torch.arange(first, first + self.s.shape[2], device=self.s.device, dtype=self.s.dtype)[:, None]
        return i, torch.arange(p.first_key, p.first_key + self.s.shape[3], device=self.s.device, dtype=self.s.dtype)

    def kept(self) -> Tensor | None:
        """1/(1 − p) where dropout keeps a weight, 0 elsewhere."""
        p = self.problem
        if not p.dropout_p:
            return None
        total = p.queries or p.q.shape[2]
        shape = (*self.s.shape[:3], p.first_key + self.s.shape[3])
        keep = philox.keep(p.seed.cpu(), shape, p.dropout_p, self.rows.start + p.first_query, total)
        return keep[..., p.first_key :].to(self.s) / (1.0 - p.dropout_p)


def blocks(problem: Problem) -> Iterator[Block]:
    batch, heads, queries, _ = problem.q.shape
    keys = problem.k.shape[2]
    step = max(1, SCORES // max(1, batch * heads * keys))
    k, v = problem.k.to(problem.accumulator), problem.v.to(problem.accumulator)
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        q = problem.q[:, :, rows].to(problem.accumulator)
        count = rows.stop - rows.start
        seen = _seen(problem, rows, count, keys)
        unseen = ~seen.any(2)  # what no query sees cannot leak, not even as NaN
        unseen = unseen.unflatten(1, (k.shape[1], -1)).all(2)[..., None] if heads else unseen[..., None]
        own_k, own_v = (x.masked_fill(unseen, 0.0) for x in (k, v))
        s = problem.scale * _per_head(q, own_k.mT)
        if problem.softcap is not None:
            s = problem.softcap * torch.tanh(s / problem.softcap)
        capped = s
        if problem.bias is not None:
            s = s + problem.bias[:, :, rows].to(s.dtype)
        if problem.temperature is not None:
            s = s / problem.temperature[:, :, rows, None]
        seen = seen & (s != -math.inf)
        yield Block(problem, rows, s.masked_fill(~seen, 0.0), seen, capped, own_k, own_v)


def _seen(problem: Problem, rows: slice, count: int, keys: int) -> Tensor:
    left, right = problem.reach
    first = problem.first_query - problem.first_key + rows.start
    seen = masks.window(count, keys, left, right, first=first, device=problem.q.device)[None, None]
    if problem.key_lengths is not None:
        ends = (problem.key_lengths - problem.first_key).clamp(0, keys)
        seen = seen & masks.padding(ends, keys)[:, None, None]
    if problem.mask is not None:
        seen = seen & problem.mask[:, :, rows]
    if problem.bias is not None:
        seen = seen & (problem.bias[:, :, rows] != -math.inf)
    return seen.expand(*problem.q.shape[:2], count, keys)


def _per_head(x: Tensor, y: Tensor) -> Tensor:
    """x [B, H, m, C] · y [B, G, C, n] for grouped heads: [B, H, m, n]."""
    batch, heads, rows, _ = x.shape
    groups = y.shape[1]
    together = heads // max(1, groups) * rows
    return (x.reshape(batch, groups, together, x.shape[-1]) @ y).reshape(batch, heads, rows, y.shape[-1])


def _per_key(x: Tensor, y: Tensor, groups: int) -> Tensor:
    """Σ over rows and the heads of a group of xᵀ·y, x [B, H, m, n], y [B, H, m, C]: [B, G, n, C]."""
    together = x.shape[1] // max(1, groups) * x.shape[2]
    x, y = (z.reshape(z.shape[0], groups, together, z.shape[-1]) for z in (x, y))
    return x.mT @ y


def forward(problem: Problem) -> Part:
    o, m, z, sums = _room(problem)
    terms = Terms(problem.choice)
    for block in blocks(problem):
        shift = solve_shift(block.s, block.seen, problem.choice)
        u, v, _, _ = (x.masked_fill(~block.seen, 0.0) for x in terms(block.s, shift))
        total = v.sum(-1, keepdim=True)
        inverse = torch.where(total == 0, 0.0, 1.0 / total) if problem.choice.family == "ratio" else 1.0
        kept = block.kept()
        o[:, :, block.rows] = _per_head(u if kept is None else u * kept, block.values) * inverse
        m[:, :, block.rows], z[:, :, block.rows] = shift.squeeze(-1), total.squeeze(-1)
        _measure(block, shift, sums)
    return Part(o, m, z, sums=sums)


def solve(problem: Problem, room: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    _, high, c, _ = _room(problem)
    counts, support = torch.zeros_like(high, dtype=torch.int64), high.new_full((*high.shape, room), -math.inf)
    gain, keys = _gain(problem), problem.k.shape[2]
    for block in blocks(problem):
        x = (gain * block.s).masked_fill(~block.seen, -math.inf)
        top = x.amax(-1, keepdim=True) if keys else torch.full_like(x.sum(-1, keepdim=True), -math.inf)
        tau = solve_shift(block.s, block.seen, problem.choice) - top
        x = x - top.masked_fill(top == -math.inf, 0.0)
        high[:, :, block.rows], c[:, :, block.rows] = top.squeeze(-1), tau.squeeze(-1)
        counts[:, :, block.rows] = (x > tau).sum(-1)
        support[:, :, block.rows, : min(room, keys)] = x.topk(min(room, keys)).values
    return high, c.masked_fill(high == -math.inf, 0.0), (counts, support)


def summed(problem: Problem, kept: tuple[Tensor, Tensor], offset: Tensor, c: Tensor) -> Tensor:
    _, support = kept
    terms = Terms(problem.choice)
    t = (support + (offset - c)[..., None]).clamp_min(0.0)
    slope = torch.where(t > 0, terms.tile["slope"](t, terms.theta), 0.0)
    return torch.stack([terms.tile["value"](t, terms.theta).sum(-1), slope.sum(-1)]).double()


def measure(problem: Problem, high: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    _, value, slope, _ = _room(problem)
    for block in blocks(problem):
        u, _, du, _ = _at(block, high, c)
        value[:, :, block.rows], slope[:, :, block.rows] = u.sum(-1), du.sum(-1)
    return value.double(), slope.double()


def weigh(problem: Problem, high: Tensor, c: Tensor) -> Part:
    o, value, slope, sums = _room(problem)
    for block in blocks(problem):
        u, _, du, _ = _at(block, high, c)
        kept = block.kept()
        o[:, :, block.rows] = _per_head(u if kept is None else u * kept, block.values)
        value[:, :, block.rows], slope[:, :, block.rows] = u.sum(-1), du.sum(-1)
        _measure(block, (high + c)[:, :, block.rows, None], sums)
    return Part(o, high.clone(), value, slope, sums)


def slopes(problem: Problem, do: Tensor, high: Tensor, c: Tensor) -> Tensor:
    _, total, _, _ = _room(problem)
    for block in blocks(problem):
        total[:, :, block.rows] = (_at(block, high, c)[2] * _dp(block, do)).sum(-1)
    return total


def backward(problem: Problem, whole: Whole, upstream: Upstream) -> Gradients:
    p, wide = problem, problem.accumulator
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (p.q, p.k, p.v))
    heat = torch.zeros(p.q.shape[:3], dtype=wide, device=p.q.device) if upstream.temperature else None
    db = _bias_room(p.bias, wide) if upstream.bias else None
    terms = Terms(p.choice)
    for block in blocks(p):
        m, z, delta = (x[:, :, block.rows, None] for x in (whole.m, whole.z, whole.delta))
        dp, kept = _dp(block, upstream.o), block.kept()
        if p.choice.family == "ratio":
            inverse = torch.where(z == 0, 0.0, 1.0 / z)
            u, _, du, _ = terms(block.s, m)
            fall = terms.tile["denominator_slope"](torch.exp(block.s - m), block.s, torch.exp(-m).expand(block.s.shape))
            weights, ds = u * inverse, (du * dp - fall * delta) * inverse
        elif p.choice.family == "threshold":
            weights, _, du, _ = _at(block, whole.m, whole.c)
            ds = du * (dp - delta)
        else:
            weights, _, du, _ = terms(block.s, m)
            ds = du * dp
        if whole.tilt is not None:
            lift, beta, gamma, mean = (x[..., None] for x in whole.tilt[..., block.rows])
            ds = ds + weights * (lift - beta * (block.s - m)) + gamma * (block.s - mean)
        ds, weights = (x.masked_fill(~block.seen, 0.0) for x in (ds, weights))
        if p.temperature is not None:
            t = p.temperature[:, :, block.rows, None]
            if heat is not None:
                heat[:, :, block.rows] = -(ds * block.s).sum(-1) / t.squeeze(-1)
            ds = ds / t
        if db is not None:
            target = db if db.shape[2] == 1 else db[:, :, block.rows]
            target += ds.sum_to_size(target.shape)
        if p.softcap is not None:
            ds = (ds * (1.0 - (block.capped / p.softcap) ** 2)).masked_fill(~block.seen, 0.0)
        q, do = (x[:, :, block.rows].to(wide) for x in (p.q, upstream.o))
        dq[:, :, block.rows] = p.scale * _per_head(ds, block.keys)
        dk += p.scale * _per_key(ds, q, p.k.shape[1])
        dv += _per_key(weights if kept is None else weights * kept, do, p.k.shape[1])
    return Gradients(dq, dk, dv, db, heat)


def _room(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    rows, like = problem.q.shape[:3], dict(dtype=problem.accumulator, device=problem.q.device)
    sums = torch.empty((len(FIELDS), *rows), dtype=torch.float64, device=problem.q.device) if problem.stats else None
    o = torch.empty((*rows, problem.v.shape[-1]), **like)
    return o, torch.empty(rows, **like), torch.empty(rows, **like), sums


def _bias_room(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros in the shape of the bias before it was expanded."""
    shape = [1 if stride == 0 else size for size, stride in zip(bias.shape, bias.stride(), strict=True)]
    return torch.zeros(shape, dtype=dtype, device=bias.device)


def _measure(block: Block, shift: Tensor, sums: Tensor | None) -> None:
    if sums is None:
        return
    i, j = block.positions
    state = State.of(block.s.double(), block.seen, block.problem.choice, shift.double(), i.double(), j.double())
    for name, row in zip(FIELDS, sums, strict=True):
        row[:, :, block.rows] = getattr(state, name).squeeze(-1)


def _gain(problem: Problem) -> float:
    terms = Terms(problem.choice)
    return terms.tile["gain"](terms.theta)


def _at(block: Block, high: Tensor, c: Tensor):
    """(p, p, g′, g′²) at τ = high + c, 0 where hidden; the difference from the maximum is exact."""
    terms = Terms(block.problem.choice)
    t = (terms.tile["gain"](terms.theta) * block.s - high[:, :, block.rows, None]) - c[:, :, block.rows, None]
    t = t.clamp_min(0.0).masked_fill(~block.seen, 0.0)
    u = terms.tile["value"](t, terms.theta).to(t.dtype)
    du = torch.where(t > 0, terms.tile["slope"](t, terms.theta), 0.0).to(t.dtype)
    return u, u, du, du * du


def _dp(block: Block, do: Tensor) -> Tensor:
    dp = _per_head(do[:, :, block.rows].to(block.s.dtype), block.values.mT)
    kept = block.kept()
    return dp if kept is None else dp * kept
