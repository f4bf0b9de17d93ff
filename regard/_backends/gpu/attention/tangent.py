"""Forward mode: o′ = Σ_j p′_j·v_j + p_j·v′_j in one sweep over the keys, with the forward's row state.

    s′ = ∂s/∂x · (q′·k + q·k′)
    ratio       o′ = Σ a·s′·v + Σ p·v′ − β·o,            β = Σ b·s′
    threshold   o′ = Σ g′·s′·v + Σ p·v′ − β·Σ g′·v,      β = Σ g′·s′ / Σ g′
    pointwise   o′ = Σ f′·s′·v + Σ p·v′

with a, b and g′ as in `backward/slopes.py`. Softmax, softmax1 and the threshold maps do not change where a constant is
added to every logit, so a constant part of s′ would cancel in the last term, after 16 bits have rounded it. They sum
s′ − μ, where μ is the mean of s′ over the first keys; of p the share 1 − Σp, which a sink or softmax1's extra key has,
moves with μ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from regard._backends.gpu.attention import key_loop, scores, tiles
from regard._backends.gpu.attention.backward.slopes import Rows, broadcast_rows, weigh
from regard._backends.gpu.attention.config import config_of, count_blocks, describe_keys, options, view
from regard._backends.gpu.attention.masks.dense import add_tile_map
from regard._backends.gpu.attention.masks.tables import add_key_index
from regard._backends.gpu.attention.tiles import LOG2E
from regard._backends.gpu.launcher import launch, launch_key
from regard._call.problem import Along, Forward, Problem


class MovingBlock(NamedTuple):
    """A block of queries whose tensors have tangents; the last fields are those of `still`, for `key_loop.sweep`."""

    still: Any  # key_loop.QueryBlock
    dq: Any  # views of the tangents; without a pointer: there is none
    dk: Any
    dv: Any
    dk_blocks: Any  # tensor descriptors where C.BULK
    dv_blocks: Any
    rows: Any  # slopes.Rows
    factor: Any  # [M], ∂s/∂(q·k) without the cap's slope
    mean: Any  # [M], μ
    b: Any
    h: Any
    lowest: Any
    highest: Any
    earliest: Any
    latest: Any


@triton.jit
def is_centred(C: tl.constexpr):
    """Return whether s′ − μ is summed: in 16 bits, for maps that a constant added to every logit does not change."""
    return (C.PRECISION == "ieee") and ((C.F.family == "threshold") or ((C.F.family == "ratio") and C.F.exponential))


@triton.jit
def load_moved(x, blocks, still, start, opt, DIM: tl.constexpr, PAD: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr):
    """Load a block of the tangents of keys or values."""
    g = still.h // opt.group
    if C.BULK and not EDGE:
        tile = tiles.load_bulk_block(blocks, still.b, g, start, C.BN, PAD)
    else:
        tile = tiles.load_block(x, still.b, g, start, still.lowest, still.highest, C.BN, DIM, PAD, not EDGE)
    return tile


@triton.jit
def score_tangents(still, q, dq, dk, dk_blocks, factor, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Score one key block: (y, visible, s′ [M, N]), s′ being 0 where a key is hidden."""
    keys, x, y, visible, j = key_loop.score_tile(still, start, opt, C, EDGE)
    dx = x * 0.0
    if dq.ptr is not None:
        dx = tiles.dot(q, tl.trans(keys), None, C)
    if dk.ptr is not None:
        moved = load_moved(dk, dk_blocks, still, start, opt, C.D, C.BD, C, EDGE)
        if dq.ptr is not None:
            dx = tiles.dot(still.q, tl.trans(moved), dx, C)
        else:
            dx = tiles.dot(still.q, tl.trans(moved), None, C)
    ds = scores.bend(dx * factor[:, None], x, visible, key_loop.place_of(still, C), j, opt, C)
    return y, visible, tl.where(visible, ds, 0.0)


@triton.jit
def multiply_values(weights, values, acc, C: tl.constexpr):
    """Return acc + weights·values; slopes times tangents may exceed what float16 holds, and tf32 has its digits."""
    if values.dtype == tl.float16:
        acc = tl.dot(weights, values.to(tl.float32), acc, input_precision="tf32", out_dtype=C.ACC)
    else:
        acc = tiles.dot(weights.to(values.dtype), values, acc, C)
    return acc


@triton.jit
def tangent_tile(state, block, start, opt, C: tl.constexpr, EDGE: tl.constexpr):
    """Add one key block to Σ a·s′·v + Σ p·v′, to Σ g′·v of a threshold map, and to Σ b·s′; q′ is part of the state."""
    acc, lifted, beta, q = state
    F: tl.constexpr = C.F
    still = block.still
    y, visible, ds = score_tangents(
        still, q, block.dq, block.dk, block.dk_blocks, block.factor, start, opt, C, EDGE
    )  # fmt: skip
    r = broadcast_rows(block.rows, False)
    p, up, down, _ = weigh(y, visible, r, still.theta, F, C.Z_IN_SHIFT, C.PRECISION != "ieee")
    if (block.dq.ptr is not None) or (block.dk.ptr is not None):
        values = key_loop.load_values(still, start, visible, opt, C, EDGE)
        if is_centred(C):
            ds = ds - block.mean[:, None]
        if F.family != "pointwise":
            beta += tiles.fold(down * ds, C)
        acc = multiply_values(up * ds, values, acc, C)
        if F.family == "threshold":
            lifted = tiles.dot(up.to(values.dtype), values, lifted, C)
    if block.dv.ptr is not None:
        moved = load_moved(block.dv, block.dv_blocks, still, start, opt, C.E, C.BE, C, EDGE)
        moved = key_loop.zero_hidden(moved, visible, opt, EDGE)
        acc = tiles.dot(p.to(moved.dtype), moved, acc, C)
    return acc, lifted, beta, q


@triton.jit
def forward_tangent(
    q, k, v, k_blocks, v_blocks, dq, dk, dv, dk_blocks, dv_blocks, o, d_o, shifts, sums, opt, C: tl.constexpr
):  # fmt: skip
    """Compute o′ of one block of queries."""
    F: tl.constexpr = C.F
    still, i0 = key_loop.load_query_block(q, k, v, k_blocks, v_blocks, opt, C)
    inside = still.i < opt.queries
    row = (tiles.wide(still.b) * opt.heads + still.h) * opt.queries + still.i
    shift = tl.load(shifts + row, mask=inside, other=0.0)
    z = tl.load(sums + row, mask=inside, other=1.0)
    inverse = tl.where(z > 0.0, 1.0 / z, z)  # a NaN stays
    if F.family == "ratio":
        shift = shift * LOG2E
    loop_shift = shift
    if C.Z_IN_SHIFT:
        loop_shift = tl.where(z == 0.0, 2.0**100, shift + tl.log2(z))
    zero = tiles.full(C.BM, 0.0, C.ACC)
    rows = Rows(still.a, loop_shift, inverse, zero, still.first, still.last, zero, zero, zero)
    factor = still.a
    if not C.LINEAR:
        factor = factor * tiles.number(opt.scale, C.ACC)
    moved = still.q
    if dq.ptr is not None:
        moved = tiles.load_block(dq, still.b, still.h, i0, 0, opt.queries, C.BM, C.D, C.BD, False)
    mean = zero
    if is_centred(C):
        start = still.lowest // C.BN * C.BN
        _, visible, ds = score_tangents(still, moved, dq, dk, dk_blocks, factor, start, opt, C, True)
        mean = tl.sum(ds, 1) / tl.maximum(tl.sum(visible.to(C.ACC), 1), 1.0)
    block = MovingBlock(
        still, dq, dk, dv, dk_blocks, dv_blocks, rows, factor, mean,
        still.b, still.h, still.lowest, still.highest, still.earliest, still.latest,
    )  # fmt: skip
    acc = tiles.zeros(C.BM, C.BE, C.ACC)
    state = acc, acc, tiles.zeros(C.BM, C.LANES, C.ACC), moved
    acc, lifted, lanes, _ = key_loop.sweep(state, block, i0, opt, tangent_tile, C)
    beta = tl.sum(lanes, 1)
    if F.family == "threshold":
        acc = acc - (beta * inverse)[:, None] * lifted
    if F.family == "ratio":
        if F.exponential:
            beta = beta - mean * find_silent_share(shift, inverse, still, inside, opt, C)
        out = tiles.load_block(o, still.b, still.h, i0, 0, opt.queries, C.BM, C.E, C.BE, False)
        acc = acc - beta[:, None] * out.to(C.ACC)
    tiles.store_block(d_o, still.b, still.h, i0, opt.queries, acc, C.BM, C.E, C.BE)


@triton.jit
def find_silent_share(shift, inverse, still, inside, opt, C: tl.constexpr):
    """Return 1 − Σp of rows u = exp(s − m): what a sink and softmax1's extra key have of Z."""
    F: tl.constexpr = C.F
    silent = F.rest(tiles.unshift(shift))
    if opt.sink.ptr is not None:
        sink = tiles.load_rows(opt.sink, still.b, still.h, still.i, inside, 0.0).to(C.ACC)
        silent += tl.exp2(tl.minimum(sink * LOG2E - shift, 0.0))
    return silent * inverse


def compute_tangent(p: Problem, forward: Forward, along: Along) -> torch.Tensor:
    """Return o′ for tangents of q, k and v; those that are None cost nothing."""
    d_o = torch.empty_like(forward.o)
    if not d_o.numel():
        return d_o
    if p.k.shape[-2] == 0:
        return d_o.zero_()
    given = [x for x in (along.q, along.k, along.v) if x is not None]
    simple = p.choice.family == "ratio" and p.choice.exponential and p.q.element_size() == 2
    config, how = config_of(p, "tangent", Z_IN_SHIFT=simple, others=tuple(given))
    opt = add_tile_map(p, config, add_key_index(p, options(p)))
    key = launch_key(p, *given, forward.o)
    key = key and (key, *(x is None for x in (along.q, along.k, along.v)))
    moved = replace(p, k=p.k if along.k is None else along.k, v=p.v if along.v is None else along.v)
    inputs = view(p.q), view(p.k), view(p.v), *describe_keys(p, config)
    tangents = view(along.q), view(along.k), view(along.v), *describe_keys(moved, config)
    arguments = *inputs, *tangents, view(forward.o), view(d_o), forward.shift, forward.z, opt
    launch(key, forward_tangent, count_blocks(p, config), arguments, (config,), **how)
    return d_o
