"""o = normaliser((cap(scale·q kᵀ) + bias) / temperature)·v on the CPU, one block of queries at a time.

    forward    S = q kᵀ by BLAS;  S ← u, row by row;  o = (u·v)/Z by BLAS
    backward   S and u again, dP = do·vᵀ;  S ← p, dP ← dS, row by row;  dq = dS·k,  dk += dSᵀ·q,  dv += pᵀ·do

No buffer has more than one block of queries' rows. Blocks multiply only the keys that their queries can see.

>>> import torch
>>> from regard import normalizers
>>> from regard._backends.cpu.attention import launch
>>> from regard._call.problem import Problem
>>> q = k = torch.zeros(1, 1, 3, 2)
>>> v = torch.tensor([[[[0.0], [1.0], [5.0]]]])
>>> problem = Problem(q, k, v, normalizers.get("softmax"), 1.0, causal=True, stats=("entropy",))
>>> result = launch.forward(problem)
>>> result.o.flatten(), result.stats.flatten()
(tensor([0.0000, 0.5000, 2.0000]), tensor([0.0000, 0.6931, 1.0986]))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from regard._backends.cpu.attention import kernels
from regard._backends.cpu.attention.blocks import Block, Blocks, Scratch, Task, make_blocks
from regard._backends.cpu.attention.dropout import apply_dropout
from regard._backends.cpu.attention.forward_rows import FIELDS
from regard._backends.cpu.attention.kernels import MAX_LANES, NO_SINK
from regard._backends.cpu.attention.tangent import compute_tangent
from regard._backends.cpu.jit.compile import precision_of
from regard._call.problem import Along, Forward, Gradients, Problem, Upstream
from regard.statistics import DIFFERENTIABLE, NAMES

INPUTS = ("q", "k", "v", "bias", "temperature", "sink", "row_bias", "relative", "theta", "score_params")


def forward(problem: Problem) -> Forward:
    """o [B, H, M, E], the row state and the statistics named in `problem.stats`; see `regard._call.problem`."""
    return Forward(*compute_forward(problem, problem.q.dtype))


def attend(problem: Problem) -> tuple[Tensor, Tensor]:
    """o and the statistics of a call that needs no gradient."""
    o, _, _, stats = compute_forward(problem, problem.q.dtype)
    return o, stats


def compute_forward(problem: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o in the given dtype, shift and z [B, H, M], and the statistics; tasks run without gradients."""
    blocks, wide, rows = make_blocks(problem), problem.accumulator, problem.q.shape[:3]
    o = torch.empty((*rows, problem.v.shape[-1]), dtype=dtype)
    shift, z = torch.empty(rows, dtype=wide), torch.empty(rows, dtype=wide)
    fields = FIELDS if problem.stats else 0
    stats = torch.empty((len(problem.stats), *rows), dtype=wide)
    normalizer = problem.choice.normalizer
    run = kernels.forward_kernel(normalizer, precision_of(wide), problem.stats)

    def work(task: Task, scratch: Scratch) -> None:
        k, v, are_finite = blocks.keys_of(task)
        for block in blocks.blocks_of(task, are_finite):
            s = scratch("s", *block.shape)  # [g, rows, n]
            blocks.compute_logits(block, blocks.rows_of(problem.q, block), k, s)
            inverse = scratch("inverse", *block.size, 1)
            sink = NO_SINK if problem.sink is None else block.row_array(problem.sink.to(wide).double())
            sums = np.empty((fields, block.count))
            state, theta = (block.row_output(shift), block.row_output(z)), parameter_array(problem, block)
            rows_out = inverse.numpy().reshape(-1), *state, sums
            run(block.as_matrix(s), block.geometry, theta, sink, *rows_out, packing_room(scratch, block))
            apply_dropout(blocks, block, s)
            product = torch.bmm(s, block.take_keys(v)).view(*block.size, v.shape[-1])
            torch.mul(product, inverse, out=block.take(o))
            block.store_rows(shift, state[0])
            block.store_rows(z, state[1])
            if problem.stats:
                finish, wanted = kernels.finish_kernel(normalizer, problem.stats)
                found = np.empty((len(wanted), block.count))
                finish(sums, theta, sink, wanted, kernels.BARE, found, np.empty(len(NAMES)))
                stats[(slice(None), *block.rows)] = torch.from_numpy(found).view(len(found), *block.size)

    blocks.run(work)
    return o, shift, z, stats


def backward(problem: Problem, forward: Forward, upstream: Upstream) -> Gradients:
    """Gradients of q, k and v, and of biases, temperature and sink where `upstream` asks for them.

    Those of temperature and sink are in the accumulator's dtype. The bias's has size 1 where the bias has stride 0.
    """
    problem = detach_problem(problem)
    rows = BackwardRows(problem, forward, upstream)
    gradients = compute_gradients(problem, upstream, rows, problem.q.dtype)
    if upstream.temperature and problem.temperature is not None:
        gradients.temperature = -rows.ds_dot_s / problem.temperature  # s = y/T, so that dT = −Σ ds·s / T
    if upstream.theta and problem.theta is not None:
        gradients.theta = rows.dtheta
    if upstream.sink and problem.sink is not None:
        gradients.sink = rows.sink_gradient()
    return gradients


def tangent(problem: Problem, forward: Forward, along: Along) -> Tensor:
    """o′ [B, H, M, E] for tangents of q, k and v."""
    given = (None if x is None else x.detach() for x in (along.q, along.k, along.v))
    saved = replace(forward, o=forward.o.detach())
    return compute_tangent(detach_problem(problem), saved, Along(*given))


def compute_gradients(problem: Problem, upstream: Upstream, rows: Callable, dtype: torch.dtype) -> Gradients:
    """The gradients of q, k, v in the given dtype, and of the bias; `rows` turns (s, dp) of a block into (p, ds)."""
    wide, dbias = problem.accumulator, None
    if upstream.bias and problem.bias is not None:
        strides = zip(problem.bias.shape, problem.bias.stride(), strict=True)
        dbias = torch.zeros([1 if stride == 0 else size for size, stride in strides], dtype=wide)
    owned = [dbias is None or dbias.shape[dim] == problem.q.shape[dim] for dim in range(3)]
    drow_bias, drelative = None, None
    if upstream.row_bias and problem.row_bias is not None:
        drow_bias = torch.zeros(problem.q.shape[:3], dtype=wide)
    if upstream.relative and problem.relative is not None:
        drelative = torch.zeros(problem.relative.shape, dtype=wide)
        owned[0] = owned[2] = False
    blocks = make_blocks(problem, owned)
    dq = torch.empty(problem.q.shape, dtype=dtype)
    dk, dv = (KeyGradient(blocks, x, dtype) for x in (problem.k, problem.v))

    def work(task: Task, scratch: Scratch) -> None:
        k, v, are_finite = blocks.keys_of(task)
        for block in blocks.blocks_of(task, are_finite):
            q, do = blocks.rows_of(problem.q, block), blocks.rows_of(upstream.o, block)
            p, ds = scratch("p", *block.shape), scratch("ds", *block.shape)  # [g, rows, n]
            kept = None if problem.softcap is problem.score is None else scratch("kept", *block.shape)
            blocks.compute_logits(block, q, k, p, kept)
            torch.bmm(do, block.take_keys(v).mT, out=ds)
            apply_dropout(blocks, block, ds)
            rows(block, p, ds)
            apply_dropout(blocks, block, p)
            ds_rows = ds.view(*block.size, ds.shape[-1])
            if problem.temperature is not None:
                ds_rows.div_(block.take(problem.temperature)[..., None])
            if dbias is not None:
                _add_to_bias(dbias, block, ds_rows)
            if drow_bias is not None:
                block.take(drow_bias).copy_(ds_rows.sum(-1))
            if drelative is not None:
                _add_to_relative(drelative, block, ds_rows, blocks.queries)
            if kept is not None:
                blocks.multiply_slopes(block, kept, ds)
            product = scratch("dq", *q.shape)
            torch.baddbmm(product, ds, block.take_keys(k), beta=0, alpha=problem.scale, out=product)
            block.take(dq).copy_(product.view(*block.size, q.shape[-1]))
            dk.add(task, block, ds, q, problem.scale)
            dv.add(task, block, p, do)

    blocks.run(work)
    dbias = None if dbias is None else dbias.to(problem.bias.dtype)
    return Gradients(dq, dk.total(), dv.total(), dbias, row_bias=drow_bias, relative=drelative)


def packing_room(scratch: Scratch, block: Block) -> np.ndarray:
    """The working space of `threshold_solver.solve_row` for the rows of a block."""
    return scratch("packed", block.shape[2] + 2 * MAX_LANES).numpy()


def parameter_array(problem: Problem, block: Block) -> np.ndarray:
    """The normaliser's parameter for each row of a block, or one for all of them; float64, as kernels were compiled."""
    if problem.theta is None:
        return np.array([problem.choice.theta or 0.0])
    return block.row_array(problem.theta.double())


class KeyGradient:
    """Σ over all queries of sᵀ·x, [B, G, N, C], in one sum per part of the queries.

    Where many queries add to it the sum is kept transposed, which BLAS computes faster.
    """

    def __init__(self, blocks: Blocks, like: Tensor, dtype: torch.dtype):
        self.is_transposed, self.dtype = blocks.queries * blocks.share >= 512, dtype
        shape = (like.mT if self.is_transposed else like).shape
        self.parts = torch.zeros((blocks.parts, *shape), dtype=blocks.dtype)

    def add(self, task: Task, block: Block, s: Tensor, x: Tensor, scale: float = 1.0) -> None:
        """Adds s [g, rows, n] and x [g, rows, C] of a block."""
        own = self.parts[task.part, task.b0 : task.b1, task.g0 : task.g1].flatten(0, 1)  # a view
        if self.is_transposed:
            own[..., block.keys].baddbmm_(x.mT, s, alpha=scale)
        else:
            own[:, block.keys].baddbmm_(s.mT, x, alpha=scale)

    def total(self) -> Tensor:
        whole = self.parts[0] if len(self.parts) == 1 else self.parts.sum(0)
        return (whole.mT if self.is_transposed else whole).to(self.dtype).contiguous()


class BackwardRows:
    """The backward row kernel of a problem, and the row sums that it leaves."""

    def __init__(self, problem: Problem, forward: Forward, upstream: Upstream):
        self.problem, self.forward = problem, forward
        wide, shape = problem.accumulator, problem.q.shape[:3]
        given = [upstream.stats.get(name) for name in DIFFERENTIABLE]
        has_stats = problem.choice.softmax_family and any(g is not None and bool(g.any()) for g in given)
        options = precision_of(wide), has_stats, upstream.theta and problem.theta is not None
        self.kernel = kernels.backward_kernel(problem.choice.normalizer, *options)
        self.delta, self.ds_dot_s, self.dtheta = torch.zeros((3, *shape), dtype=wide)
        zero = torch.zeros((), dtype=wide).expand(shape)
        given = [zero if g is None else g.detach().to(wide).expand(shape) for g in given]
        self.stat_gradients = torch.stack(given) if has_stats else zero[None]

    def __call__(self, block: Block, s: Tensor, dp: Tensor) -> None:
        """s ← p, dp ← ds."""
        delta, ds_dot_s, dtheta = (block.row_output(x) for x in (self.delta, self.ds_dot_s, self.dtheta))
        theta, given = parameter_array(self.problem, block), block.row_array(self.stat_gradients)
        state = block.row_array(self.forward.shift), block.row_array(self.forward.z)
        matrices = block.as_matrix(s), block.as_matrix(dp)
        self.kernel(*matrices, block.geometry, theta, *state, delta, dtheta, given, ds_dot_s)
        block.store_rows(self.delta, delta)
        block.store_rows(self.dtheta, dtheta)
        block.store_rows(self.ds_dot_s, ds_dot_s)

    def sink_gradient(self) -> Tensor:
        """The sink's weight p_sink = exp(sink − m)/Z takes from all others: −p_sink·Σ p·dp. It also joins logsumexp."""
        z, own, by_lse = self.forward.z, -self.delta, DIFFERENTIABLE.index("logsumexp")
        weight = torch.where(z > 0, torch.exp(self.problem.sink - self.forward.shift) / z.where(z > 0, 1.0), 0.0)
        if len(self.stat_gradients) > 1:
            own = own + self.stat_gradients[by_lse]
        return (weight * own).to(self.problem.accumulator)


def _add_to_bias(dbias: Tensor, block: Block, ds: Tensor) -> None:
    """dbias += ds [entries, heads, queries, n], summed over the dimensions where dbias has size 1."""
    places = zip(dbias.shape, (*block.rows, block.keys), strict=True)
    target = dbias[tuple(slice(None) if size == 1 else place for size, place in places)]
    target += ds.sum_to_size(target.shape)


def _add_to_relative(drelative: Tensor, block: Block, ds: Tensor, queries: int) -> None:
    """drelative [H, queries + keys − 1] += ds [entries, heads, rows, n], summed over entries and along diagonals."""
    count, n = ds.shape[2:]
    if not n:
        return
    width = count + n - 1
    skewed = torch.zeros(ds.shape[1], count, width, dtype=ds.dtype)  # row r starts at column count − 1 − r
    steps = count * width, width - 1 if count > 1 else 1, 1
    skewed.as_strided((ds.shape[1], count, n), steps, count - 1).copy_(ds.sum(0))
    drelative[block.rows[1], block.relative_columns(queries)] += skewed.sum(1)


def detach_problem(problem: Problem) -> Problem:
    """The problem without gradients."""
    given = {name: x for name in INPUTS if (x := getattr(problem, name)) is not None and x.requires_grad}
    return replace(problem, **{name: x.detach() for name, x in given.items()}) if given else problem
