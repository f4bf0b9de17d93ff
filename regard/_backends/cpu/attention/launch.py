"""o = normaliser((cap(scale·q kᵀ) + bias) / temperature)·v on the CPU, one block of queries at a time.

    forward    S = q kᵀ by BLAS;  S ← u, row by row;  o = (u·v)/Z by BLAS
    backward   S and u again, dP = do·vᵀ;  S ← p, dP ← dS, row by row;  dq = dS·k,  dk += dSᵀ·q,  dv += pᵀ·do

No buffer has more than one block of queries' rows. Blocks multiply only the keys that their queries can see.

>>> import torch
>>> from regard import normalizers
>>> from regard._backends.cpu.attention import launch as attention
>>> from regard._core.problem import Problem
>>> q = k = torch.zeros(1, 1, 3, 2)
>>> v = torch.tensor([[[[0.0], [1.0], [5.0]]]])
>>> problem = Problem(q, k, v, normalizers.get("softmax"), 1.0, causal=True, stats=("entropy",))
>>> result = attention.forward(problem)
>>> result.o.flatten(), result.stats.flatten()
(tensor([0.0000, 0.5000, 2.0000]), tensor([0.0000, 0.6931, 1.0986]))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from regard._backends.cpu import cores
from regard._backends.cpu.attention import kernels
from regard._backends.cpu.attention.blocks import Block, Blocks, Scratch, Task
from regard._core import philox
from regard._core.problem import Forward, Gradients, Problem, Upstream
from regard.statistics import DIFFERENTIABLE, State

FIELDS = tuple(field.name for field in fields(State))
ROWS = 4096  # whose statistics are finished together


def forward(problem: Problem) -> Forward:
    """o [B, H, M, E], the row state and the statistics named in `problem.stats`; see `regard._core.problem`."""
    problem = in_range(detached(problem))
    o, (shift, z), sums = weighed(problem, problem.q.dtype)
    return Forward(o, shift.clone(), z.clone(), _statistics(problem, sums))


def weighed(problem: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """o in the given dtype, (shift, z) [2, B, H, M], and the sums [17, B, H, M] that statistics are made of.

    Among the sums the shift of a threshold map is τ − gain·max.
    """
    blocks, wide, rows = Blocks(problem), problem.accumulator, problem.q.shape[:3]
    o = torch.empty((*rows, problem.v.shape[-1]), dtype=dtype)
    states = torch.empty((2, *rows), dtype=wide)
    sums = torch.empty((len(FIELDS), *rows) if problem.stats else (0, 0, 0, 0), dtype=torch.float64)
    kernel = kernels.forward(problem.choice, problem.stats, wide)
    theta = problem.choice.theta or 0.0

    def work(task: Task, scratch: Scratch) -> None:
        k, v = blocks.keys_of(task)
        for block in blocks.of(task):
            s = scratch("s", *block.shape)  # [g, rows, n]
            blocks.scores(block, blocks.wide(problem.q, block), k, s)
            state = scratch("state", 4, block.count)
            sink, inverse = state[0], state[1]
            sink.fill_(-math.inf) if problem.sink is None else block.of(sink).copy_(problem.sink[block.rows])
            found = torch.empty((len(sums), block.count), dtype=torch.float64)
            kernel(block.flat(s), *blocks.geometry(block), theta, *state.numpy(), found.numpy())
            drop(blocks, block, s)
            product = scratch("o", *block.shape[:2], v.shape[-1])
            torch.bmm(s, v[:, block.keys], out=product)
            torch.mul(block.of(product), block.of(inverse)[..., None], out=o[block.rows])
            states[:, *block.rows] = state[2:].view(2, *block.heads)
            if problem.stats:
                sums[:, *block.rows] = found.view(len(sums), *block.heads)

    blocks.run(work)
    return o, states, sums


def backward(problem: Problem, forward: Forward, upstream: Upstream) -> Gradients:
    """Gradients of q, k and v, and of the bias, temperature and sink where `upstream` asks for them.

    Those of temperature and sink are in the accumulator's type. The bias's has size 1 where the bias has stride 0.
    """
    problem = in_range(detached(problem))
    rows = Rows(problem, forward, upstream)
    grads = pulled(problem, upstream, rows, problem.q.dtype)
    grads.temperature = (
        rows.temperature_gradient() if upstream.temperature and problem.temperature is not None else None
    )
    grads.sink = rows.sink_gradient() if upstream.sink and problem.sink is not None else None
    return grads


def pulled(problem: Problem, upstream: Upstream, rows: Callable, dtype: torch.dtype) -> Gradients:
    """The gradients of q, k, v in the given dtype, and of the bias; `rows` turns (s, dp) of a block into (p, ds)."""
    wide = problem.accumulator
    db = _zeros_like_unexpanded(problem.bias, wide) if upstream.bias and problem.bias is not None else None
    blocks = Blocks(problem, [db is None or db.shape[dim] == problem.q.shape[dim] for dim in range(3)])
    dq = torch.empty(problem.q.shape, dtype=dtype)
    dk, dv = (KeySums(blocks, x, dtype) for x in (problem.k, problem.v))

    def work(task: Task, scratch: Scratch) -> None:
        k, v = blocks.keys_of(task)
        for block in blocks.of(task):
            q, do = blocks.wide(problem.q, block), blocks.wide(upstream.o, block)
            p, ds = scratch("p", *block.shape), scratch("ds", *block.shape)  # [g, rows, n]
            capped = scratch("capped", *block.shape) if problem.softcap is not None else None
            blocks.scores(block, q, k, p, capped)
            torch.bmm(do, v[:, block.keys].mT, out=ds)
            drop(blocks, block, ds)
            rows(blocks, block, p, ds, scratch)
            drop(blocks, block, p)
            if problem.temperature is not None:
                block.of(ds).div_(problem.temperature[block.rows][..., None])
            if db is not None:
                _add_to_bias(db, block, block.of(ds))
            if capped is not None:
                slope = capped.div_(problem.softcap).square_().neg_().add_(1.0)
                ds.mul_(slope.masked_fill_(ds == 0.0, 0.0))  # where nothing is seen the score may be NaN
            product = scratch("dq", *q.shape)
            torch.baddbmm(product, ds, k[:, block.keys], beta=0, alpha=problem.scale, out=product)
            dq[block.rows] = block.of(product)
            dk.add(task, block, ds, q, problem.scale)
            dv.add(task, block, p, do)

    blocks.run(work)
    return Gradients(dq, dk.total(), dv.total(), None if db is None else db.to(problem.bias.dtype))


class KeySums:
    """Σ over all queries of sᵀ·x, [B, G, N, C], in one sum per part of the queries.

    Where many queries add to it the sum is kept transposed: BLAS is faster then by more than turning it back costs.
    """

    def __init__(self, blocks: Blocks, like: Tensor, dtype: torch.dtype):
        self.turned, self.dtype = blocks.queries * blocks.share >= 512, dtype
        self.parts = torch.zeros((blocks.parts, *(like.mT if self.turned else like).shape), dtype=blocks.dtype)

    def add(self, task: Task, block: Block, s: Tensor, x: Tensor, scale: float = 1.0) -> None:
        """s [g, rows, n] and x [g, rows, C] of a block."""
        own = self.parts[task.part, task.b, task.g0 : task.g1]
        if self.turned:
            own[..., block.keys].baddbmm_(x.mT, s, alpha=scale)
        else:
            own[:, block.keys].baddbmm_(s.mT, x, alpha=scale)

    def total(self) -> Tensor:
        whole = self.parts[0] if len(self.parts) == 1 else self.parts.sum(0)
        return (whole.mT if self.turned else whole).to(self.dtype).contiguous()


class Rows:
    """The backward row kernel of a problem, and the row sums that it leaves."""

    def __init__(self, problem: Problem, forward: Forward, upstream: Upstream):
        self.problem, self.forward, self.theta = problem, forward, problem.choice.theta or 0.0
        wide = problem.accumulator
        gradients = [upstream.stats.get(name) for name in DIFFERENTIABLE]
        self.watched = problem.choice.softmax_family and any(g is not None and bool(g.any()) for g in gradients)
        self.from_scores = self.watched or upstream.temperature or problem.choice.slope_of_weight is None
        self.kernel = kernels.backward(problem.choice, wide, from_scores=self.from_scores, watched=self.watched)
        shape = problem.q.shape[:3]
        self.delta, self.pull = torch.zeros((2, *shape), dtype=wide)
        self.gradients = None
        if self.watched:
            zero = torch.zeros((), dtype=wide).expand(shape)
            self.gradients = torch.stack([zero if g is None else g.detach().to(wide).expand(shape) for g in gradients])

    def __call__(self, blocks: Blocks, block: Block, s: Tensor, dp: Tensor, scratch: Scratch) -> None:
        """s ← p, dp ← ds."""
        state = scratch("state", 7, block.count)
        shift, z, delta, pull = state[:4]
        block.of(shift).copy_(self.forward.shift[block.rows])
        block.of(z).copy_(self.forward.z[block.rows])
        arrays = [x.numpy() for x in (shift, z, delta)]
        if self.from_scores:
            if self.gradients is not None:
                state[4:].view(3, *block.heads).copy_(self.gradients[:, *block.rows])
            arrays += [state[4:].numpy(), pull.numpy()]
        self.kernel(block.flat(s), block.flat(dp), *blocks.geometry(block), self.theta, *arrays)
        self.delta[block.rows] = block.of(delta)
        if self.from_scores:
            self.pull[block.rows] = block.of(pull)

    def temperature_gradient(self) -> Tensor:
        """s = y/T, so that dT = −Σ ds·s / T."""
        return -self.pull / self.problem.temperature

    def sink_gradient(self) -> Tensor:
        """The sink's own weight p_sink = exp(sink − m)/Z takes from all others: −p_sink·Σ p·dp; it joins logsumexp."""
        z = self.forward.z
        weight = torch.where(z > 0, torch.exp(self.problem.sink - self.forward.shift) / z.where(z > 0, 1.0), 0.0)
        own = -self.delta if self.gradients is None else self.gradients[DIFFERENTIABLE.index("logsumexp")] - self.delta
        return (weight * own).to(self.problem.accumulator)


def _statistics(problem: Problem, sums: Tensor) -> Tensor:
    """[len(stats), B, H, M] from the sums of every row."""
    rows = problem.q.shape[:3]
    stats = torch.empty((len(problem.stats), *rows), dtype=problem.accumulator)
    if not problem.stats or not rows.numel():
        return stats
    sums, flat = sums.view(len(FIELDS), -1, 1), stats.view(len(problem.stats), -1)
    sink = None if problem.sink is None else problem.sink.double().reshape(-1, 1)

    def work(start: int, own: dict) -> None:
        here = slice(start, start + ROWS)
        state = State(**{name: field[here] for name, field in zip(FIELDS, sums, strict=True)})
        above = -state.shift if problem.choice.family == "threshold" else None  # told from the maximum on: logits round
        found = state.finish(problem.choice, None if sink is None else sink[here], above=above)
        for name, values in zip(problem.stats, flat, strict=True):
            values[here] = found[name]

    cores.each(range(0, rows.numel(), ROWS), work)
    return stats


def drop(blocks: Blocks, block: Block, s: Tensor) -> None:
    """Dropout of weights, or of their gradients, by the words of `regard._core.philox`."""
    problem = blocks.problem
    if problem.dropout_p > 0.0:
        queries = blocks.queries if problem.queries is None else problem.queries  # of the whole sequence
        base = (block.b * blocks.heads + block.h0) * queries
        seed = np.uint64(int(problem.seed) & 0xFFFFFFFFFFFFFFFF)
        bound, factor = np.uint64(philox.threshold(problem.dropout_p)), 1.0 / (1.0 - problem.dropout_p)
        query, key = blocks.start
        place = block.i0 + query, block.queries, block.j0 + key, base, queries
        kernels.drop(problem.accumulator)(block.flat(s), *place, seed, bound, factor)


def _zeros_like_unexpanded(bias: Tensor, dtype: torch.dtype) -> Tensor:
    shape = [1 if stride == 0 else size for size, stride in zip(bias.shape, bias.stride(), strict=True)]
    return torch.zeros(shape, dtype=dtype)


def _add_to_bias(db: Tensor, block: Block, ds: Tensor) -> None:
    """db += ds [heads, rows, n], summed over the dimensions where db has size 1."""
    here = [slice(None) if size == 1 else place for size, place in zip(db.shape[1:], block.scores[1:], strict=True)]
    target = db[0 if db.shape[0] == 1 else block.b][*here]
    target += ds.sum_to_size(target.shape)


def detached(problem: Problem) -> Problem:
    names = ("q", "k", "v", "bias", "mask", "temperature", "sink")
    given = {name: getattr(problem, name) for name in names}
    return replace(problem, **{name: x.detach() for name, x in given.items() if x is not None})


def in_range(problem: Problem) -> Problem:
    """Temperatures raised to where no logit s/T overflows: the weights of such rows are those of T → 0 either way.

    |s| is bounded by the norms of q and k, the soft cap and the bias; what is not finite is the row's own affair. The
    rows' largest and mean logit and their logsumexp are those at the temperature as raised.
    """
    t = problem.temperature
    if t is None or not t.numel() or bool(t.amin() > 1e-20):
        return problem

    def largest(x: Tensor) -> Tensor:
        return x.where(x.abs() < math.inf, 0.0).amax(-1) if x.shape[-1] else x.sum(-1)

    q, k = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64) for x in (problem.q, problem.k))
    keys = largest(k).repeat_interleave(q.shape[1] // k.shape[1], 1)[..., None]  # [B, H, 1]
    bound = abs(problem.scale) * q * keys
    if problem.softcap is not None:
        bound = bound.clamp_max(problem.softcap)
    if problem.bias is not None:
        bound = bound + largest(problem.bias).abs()
    least = (bound / torch.finfo(problem.accumulator).max * 2.0**8).to(t.dtype)
    return replace(problem, temperature=torch.where((least > t) & (t > 0.0), least, t))
