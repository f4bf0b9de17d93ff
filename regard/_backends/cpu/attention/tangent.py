"""o′ = p′·v + p·v′ on the CPU, one block of queries at a time, with the forward's row state.

S = q kᵀ and S′ = q′kᵀ + q k′ᵀ by BLAS;  S ← p, S′ ← p′, row by row;  o′ = p′·v + p·v′ by BLAS

    ratio       p′ = a·s′ − p·β     β = Σ b·s′, with a = u′/Z and b = v′/Z
    threshold   p′ = g′·(s′ − β)    β = Σ g′·s′ / Σ g′
    pointwise   p′ = f′·s′
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from regard._backends.cpu.attention import kernels
from regard._backends.cpu.attention.backward_rows import finish_delta, ratio_factor
from regard._backends.cpu.attention.blocks import Block, Scratch, Task, make_blocks
from regard._backends.cpu.attention.forward_rows import CHUNK, finite_inverse, visible_columns, zero_unseen
from regard._backends.cpu.jit.compile import cache_by_normalizer, precision_of, prim, real, tile
from regard._call.problem import Along, Forward, Problem
from regard.normalizers import Normalizer


@cache_by_normalizer
def _tangent_kernel(normalizer: Normalizer, precision: str) -> Callable:
    """The kernel that turns logits and their tangents into weights and theirs."""
    return kernels.template_kernel(normalizer, precision, write_tangents)


def compute_tangent(problem: Problem, forward: Forward, along: Along) -> Tensor:
    """o′ [B, H, M, E] in q's dtype, for tangents of q, k and v."""
    blocks, moved = make_blocks(problem), make_blocks(_move(problem, along))
    out = torch.empty_like(forward.o)
    kernel = _tangent_kernel(problem.choice.normalizer, precision_of(problem.accumulator))
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


def write_tangents(s, ds, geometry, parameter, shift, z):
    """s ← p and ds ← p′, from the logits and their tangents."""
    theta = real(parameter)
    for r in range(s.shape[0]):
        _, first, last = visible_columns(geometry, r, s.shape[1])
        zero_unseen(s[r], first, last)
        zero_unseen(ds[r], first, last)
        x, g = s[r, first:last], ds[r, first:last]
        inverse = finite_inverse(z[r])
        m, c = tile.row_shift(x, shift[r], theta)
        beta = real(0.0)
        if tile.is_coupled:
            beta = sum_slopes(x, g, m, c, theta, inverse)
        for j in range(len(x)):
            hidden = x[j] == real(-math.inf)
            y = prim.where(hidden, 0.0, x[j])
            p = tile.weight(y, m, c, theta) * ratio_factor(inverse)
            rise = tile.weight_slope(y, m, c, theta) * ratio_factor(inverse)
            g[j] = prim.where(hidden, 0.0, rise * g[j] - fall_of(p, rise) * beta)
            x[j] = prim.where(hidden, 0.0, p)


def sum_slopes(x, g, m, c, theta, inverse):
    """β of a row."""
    total = np.float64(0.0)
    for start in range(0, len(x), CHUNK):
        chunk, dchunk = x[start : start + CHUNK], g[start : start + CHUNK]
        part = real(0.0)
        for j in range(len(chunk)):
            hidden = chunk[j] == real(-math.inf)
            y = prim.where(hidden, 0.0, chunk[j])
            slope = tile.norm_slope(y, m, c, theta) * ratio_factor(inverse)
            part = prim.accumulate(part, prim.where(hidden, 0.0, slope * dchunk[j]))
        total += part
    return finish_delta(total, inverse)


def fall_of(p, rise):
    """What β takes from a weight: p of a ratio, its slope of a threshold normaliser."""
    if tile.is_ratio:
        return p
    return rise
