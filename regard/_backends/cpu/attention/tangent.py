"""o′ = p′·v + p·v′ on the CPU, one block of queries at a time, with the forward's row state.

S = q kᵀ and S′ = q′kᵀ + q k′ᵀ by BLAS;  S ← p, S′ ← p′, row by row;  o′ = p′·v + p·v′ by BLAS
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard._backends.cpu.attention import kernels
from regard._backends.cpu.attention.blocks import Block, Scratch, Task, make_blocks
from regard._backends.cpu.jit.compile import precision_of
from regard._call.problem import Along, Forward, Problem


def compute_tangent(problem: Problem, forward: Forward, along: Along) -> Tensor:
    """o′ [B, H, M, E] in q's dtype, for tangents of q, k and v."""
    blocks, moved = make_blocks(problem), make_blocks(_move(problem, along))
    out = torch.empty_like(forward.o)
    kernel = kernels.tangent_kernel(problem.choice.normalizer, precision_of(problem.accumulator))
    theta = problem.choice.theta or 0.0

    def compute_logit_tangents(block: Block, q: Tensor, k: Tensor, dk: Tensor, capped: Tensor | None, ds: Tensor):
        """ds [g, rows, n] ← the tangents of the block's logits."""
        products = []
        if along.q is not None:
            products.append((blocks.rows_of(along.q, block), block.take_keys(k).mT))
        if along.k is not None:
            products.append((q, block.take_keys(dk).mT))
        for at, (x, y) in enumerate(products):
            torch.baddbmm(ds, x, y, beta=at, alpha=problem.scale, out=ds)  # the first one overwrites
        if not products:
            ds.zero_()
        if capped is not None:
            ds.mul_(capped.div_(problem.softcap).square_().neg_().add_(1.0))
        if problem.temperature is not None:
            ds.view(*block.size, ds.shape[-1]).div_(block.take(problem.temperature)[..., None])

    def work(task: Task, scratch: Scratch) -> None:
        (k, v, are_finite), (dk, dv, _) = blocks.keys_of(task), moved.keys_of(task)
        for block in blocks.blocks_of(task, are_finite):
            q = blocks.rows_of(problem.q, block)
            p, dp = scratch("p", *block.shape), scratch("dp", *block.shape)  # [g, rows, n]
            capped = scratch("capped", *block.shape) if problem.softcap is not None else None
            blocks.compute_logits(block, q, k, p, capped)
            compute_logit_tangents(block, q, k, dk, capped, dp)
            state = block.row_array(forward.shift), block.row_array(forward.z)
            kernel(block.as_matrix(p), block.as_matrix(dp), block.geometry, theta, *state)
            product = torch.bmm(dp, block.take_keys(v))
            if along.v is not None:
                product.baddbmm_(p, block.take_keys(dv))
            block.take(out).copy_(product.view(*block.size, v.shape[-1]))

    blocks.run(work)
    return out


def _move(problem: Problem, along: Along) -> Problem:
    """The problem with tangents in the place of keys and values, where they have any."""
    return replace(problem, **{name: x for name in ("k", "v") if (x := getattr(along, name)) is not None})
