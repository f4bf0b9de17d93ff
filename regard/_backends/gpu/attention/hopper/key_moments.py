"""Sums over keys that no score is needed for: a row's logits have Σy = q·Σk and Σy² = qᵀ·(Σ k·kᵀ)·q.

`key_products` sums k and k·kᵀ over each part of the keys of a head. `key_forms` joins the parts from the first on and
leaves Σ k·kᵀ of all of them, or after each, as three bfloat16 matrices whose sum it is to float32's precision: a tensor
core multiplies q by them as by a tile of keys. What the products lose is small beside |q|²·Σ|k|², the `reach` of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.tiles import View
from regard._backends.gpu.launcher import launch, launch_key
from regard._core.problem import Problem

KEYS = 64  # at a time
SPAN = 1024  # keys of a part where rows are causal, or twice, four times … as many,
PARTS = 16  # so that there are at most so many
PROGRAMS = 264  # that sum the keys, about
LEAST = 2048  # keys from which on it pays,
LEAST_BEHIND = {64: 8192, 128: 32768}  # by head width where rows are causal


class Forms(NamedTuple):
    """By head and part, from the first key to the end of the part: Σ k·kᵀ in three matrices, Σ k, Σ|k|²."""

    products: Any  # [B·G, parts, 3·D, D] bfloat16, the least first
    sums: Any  # [B·G, parts, D]
    lengths: Any  # [B·G, parts]


def span_of(p: Problem) -> int:
    """For which keys of a row are moments cheaper so? −1: all, 0: none, or those before the last multiple of it."""
    behind, keys = p.reach[1] is not None, min(p.q.shape[-2], p.k.shape[-2])
    if p.q.dtype != torch.bfloat16 or keys < (LEAST_BEHIND[p.q.shape[-1]] if behind else LEAST):
        return 0
    return SPAN << ((keys - 1) // (PARTS * SPAN)).bit_length() if behind else -1


@triton.jit
def key_products(k, products, sums, keys, heads, size, D: tl.constexpr, N: tl.constexpr):
    """Σ k·kᵀ [D, D] and Σ k [D] of one part of the keys of one head."""
    part, head = tl.program_id(0) % tl.cdiv(keys, size), tl.program_id(0) // tl.cdiv(keys, size)
    total = tl.zeros([D, D], tl.float32)
    along = tl.zeros([64, D], tl.float32)
    ones = tl.full([64, N], 1.0, k.ptr.dtype.element_ty)
    for start in range(part * size, tl.minimum(part * size + size, keys), N):
        # a tensor core cuts what it adds: few terms to a sum leave it little to cut
        here = tiles.load_block(k, head // heads, head % heads, start, 0, keys, N, D, D, False)
        total += tl.dot(tl.trans(here), here)
        along += tl.dot(ones, here)
    d = tl.arange(0, D)
    at = tiles.wide(tl.program_id(0))
    tl.store(products + at * (D * D) + d[:, None] * D + d[None, :], total)
    tl.store(sums + at * D + d, tl.sum(tl.where(tl.arange(0, 64)[:, None] == 0, along, 0.0), 0))


@triton.jit
def key_forms(products, sums, forms, parts, D: tl.constexpr, M: tl.constexpr, EVERY: tl.constexpr):
    """M rows of a head's three matrices, and its sums: after EVERY part, or after the last."""
    head, slab = tl.program_id(0) // (D // M), tl.program_id(0) % (D // M)
    first = tiles.wide(head) * parts
    e = tl.arange(0, D)
    cell = (slab * M + tl.arange(0, M))[:, None] * D + e[None, :]
    total, along, long = tl.zeros([M, D], tl.float32), tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    for part in range(0, parts, 4):
        some = (  # four parts are under way at a time
            at_part(products, first, part, parts, D * D, cell),
            at_part(products, first, part + 1, parts, D * D, cell),
            at_part(products, first, part + 2, parts, D * D, cell),
            at_part(products, first, part + 3, parts, D * D, cell),
        )
        for one in tl.static_range(4):
            total += some[one]
            if slab == 0:
                along += at_part(sums, first, part + one, parts, D, e)
                long += at_part(products, first, part + one, parts, D * D, e * (D + 1))
            if EVERY:
                if part + one < parts:
                    keep(total, along, long, forms, first + part + one, cell, slab, D)
    if not EVERY:
        keep(total, along, long, forms, tiles.wide(head), cell, slab, D)


@triton.jit
def at_part(x, first, part, parts, SIZE: tl.constexpr, cell):
    """Numbers of a part; 0 beyond the last."""
    return tl.where(part < parts, tl.load(x + (first + tl.minimum(part, parts - 1)) * SIZE + cell), 0.0)


@triton.jit
def keep(total, along, long, forms, to, cell, slab, D: tl.constexpr):
    where = forms.products + to * (3 * D * D) + cell
    high = total.to(tl.bfloat16)
    middle = (total - high.to(tl.float32)).to(tl.bfloat16)
    low = total - high.to(tl.float32) - middle.to(tl.float32)
    tl.store(where, low.to(tl.bfloat16))
    tl.store(where + D * D, middle)
    tl.store(where + 2 * D * D, high)
    if slab == 0:
        tl.store(forms.sums + to * D + tl.arange(0, D), along)
        tl.store(forms.lengths + to, tl.sum(long, 0))


def forms_of(p: Problem, span: int) -> Forms:
    """Of all keys, if span is −1; else of the first span, 2·span, … keys."""
    (b, g, n, d), behind = p.k.shape, span > 0
    if behind:
        n, size = (min(n, p.q.shape[-2]) - 1) // span * span, span  # the last part lies behind no row
    else:
        size = triton.cdiv(triton.cdiv(n, max(1, PROGRAMS // (b * g))), KEYS) * KEYS
    parts = triton.cdiv(n, size)
    states = parts if behind else 1
    number = dict(dtype=torch.float32, device=p.k.device)
    products, sums = torch.empty(b * g, parts, d, d, **number), torch.empty(b * g, parts, d, **number)
    forms = Forms(
        torch.empty(b * g, states, 3 * d, d, dtype=torch.bfloat16, device=p.k.device),
        torch.empty(b * g, states, d, **number),
        torch.empty(b * g, states, **number),
    )
    kind, k = launch_key(p), View(p.k, p.k.stride())
    launch(kind, key_products, b * g * parts, (k, products, sums, n, g, size), (d, KEYS), num_warps=4, num_stages=3)
    launch(kind, key_forms, b * g * (d // 16), (products, sums, forms, parts), (d, 16, behind), num_warps=4)
    return forms
