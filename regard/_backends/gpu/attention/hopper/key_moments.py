"""Moments of the logits from sums over keys, without a score: Σy = q·Σk and Σy² = qᵀ·(Σ k·kᵀ)·q.

`sum_key_products` sums k and k·kᵀ over each part of a head's keys. `merge_key_products` adds up the parts and stores
Σ k·kᵀ of all keys, or of every prefix of parts, as three bfloat16 matrices that add up to float32 precision: a tensor
core multiplies q by them as by a tile of keys. The rounding error is small beside |q|²·Σ|k|².
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from regard._backends.gpu.attention import tiles
from regard._backends.gpu.attention.hopper.spans import needs_spans
from regard._backends.gpu.attention.tiles import View
from regard._backends.gpu.launcher import launch, launch_key
from regard._call.problem import Problem

KEYS = 64  # of one product
SPAN = 1024  # keys of a part for causal rows, doubled until there are at most PARTS parts
PARTS = 16
PROGRAMS = 264  # of `sum_key_products`, about
MIN_KEYS = 2048  # from which on it is faster: full rows,
MIN_CAUSAL_KEYS = {64: 8192, 128: 32768}  # and causal rows by head width


class KeyMoments(NamedTuple):
    """Σ k·kᵀ in three matrices, Σ k and Σ|k|² of each head's keys up to the end of a part."""

    products: Any  # [B·G, parts, 3·D, D] bfloat16, the smallest first
    sums: Any  # [B·G, parts, D]
    lengths: Any  # [B·G, parts]


def moment_span(p: Problem) -> int:
    """Keys whose moments come from here: −1 all, 0 none, otherwise those before the last multiple of the number."""
    causal, keys, width = p.reach[1] is not None, min(p.q.shape[-2], p.k.shape[-2]), p.q.shape[-1]
    if width not in MIN_CAUSAL_KEYS or p.v.shape[-1] != width or p.q.dtype != torch.bfloat16:
        return 0
    options = p.softcap, p.bias, p.relative, p.reach[0], p.key_lengths
    if any(option is not None for option in options) or needs_spans(p):
        return 0
    if keys < (MIN_CAUSAL_KEYS[width] if causal else MIN_KEYS):
        return 0
    return SPAN << ((keys - 1) // (PARTS * SPAN)).bit_length() if causal else -1


@triton.jit
def sum_key_products(k, products, sums, keys, heads, size, D: tl.constexpr, N: tl.constexpr):
    """Stores Σ k·kᵀ [D, D] and Σ k [D] of one part of one head's keys."""
    part, head = tl.program_id(0) % tl.cdiv(keys, size), tl.program_id(0) // tl.cdiv(keys, size)
    total = tl.zeros([D, D], tl.float32)
    key_sum = tl.zeros([64, D], tl.float32)
    ones = tl.full([64, N], 1.0, k.ptr.dtype.element_ty)
    for start in range(part * size, tl.minimum(part * size + size, keys), N):
        # a tensor core truncates its sums: few terms per sum lose little
        here = tiles.load_block(k, head // heads, head % heads, start, 0, keys, N, D, D, False)
        total += tl.dot(tl.trans(here), here)
        key_sum += tl.dot(ones, here)
    d = tl.arange(0, D)
    at = tiles.wide(tl.program_id(0))
    tl.store(products + at * (D * D) + d[:, None] * D + d[None, :], total)
    tl.store(sums + at * D + d, tl.sum(tl.where(tl.arange(0, 64)[:, None] == 0, key_sum, 0.0), 0))


@triton.jit
def merge_key_products(products, sums, moments, parts, D: tl.constexpr, M: tl.constexpr, EVERY: tl.constexpr):
    """Stores M rows of a head's KeyMoments, for EVERY prefix of parts or for all parts."""
    head, slab = tl.program_id(0) // (D // M), tl.program_id(0) % (D // M)
    first = tiles.wide(head) * parts
    e = tl.arange(0, D)
    cell = (slab * M + tl.arange(0, M))[:, None] * D + e[None, :]
    total, key_sum, lengths = tl.zeros([M, D], tl.float32), tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    for part in range(0, parts, 4):
        some = (  # four parts are loaded at a time
            load_part(products, first, part, parts, D * D, cell),
            load_part(products, first, part + 1, parts, D * D, cell),
            load_part(products, first, part + 2, parts, D * D, cell),
            load_part(products, first, part + 3, parts, D * D, cell),
        )
        for one in tl.static_range(4):
            total += some[one]
            if slab == 0:
                key_sum += load_part(sums, first, part + one, parts, D, e)
                lengths += load_part(products, first, part + one, parts, D * D, e * (D + 1))
            if EVERY:
                if part + one < parts:
                    store_moments(total, key_sum, lengths, moments, first + part + one, cell, slab, D)
    if not EVERY:
        store_moments(total, key_sum, lengths, moments, tiles.wide(head), cell, slab, D)


@triton.jit
def load_part(x, first, part, parts, SIZE: tl.constexpr, cell):
    """Numbers of a part, or 0 beyond the last part."""
    return tl.where(part < parts, tl.load(x + (first + tl.minimum(part, parts - 1)) * SIZE + cell), 0.0)


@triton.jit
def store_moments(total, key_sum, lengths, moments, to, cell, slab, D: tl.constexpr):
    """Stores one KeyMoments entry, its Σ k·kᵀ split into three bfloat16 matrices."""
    where = moments.products + to * (3 * D * D) + cell
    high = total.to(tl.bfloat16)
    middle = (total - high.to(tl.float32)).to(tl.bfloat16)
    low = total - high.to(tl.float32) - middle.to(tl.float32)
    tl.store(where, low.to(tl.bfloat16))
    tl.store(where + D * D, middle)
    tl.store(where + 2 * D * D, high)
    if slab == 0:
        tl.store(moments.sums + to * D + tl.arange(0, D), key_sum)
        tl.store(moments.lengths + to, tl.sum(lengths, 0))


def compute_key_moments(p: Problem, span: int) -> KeyMoments:
    """KeyMoments of all keys if span is −1, otherwise of the first span, 2·span, … keys."""
    (b, g, n, d), causal = p.k.shape, span > 0
    if causal:
        n, size = (min(n, p.q.shape[-2]) - 1) // span * span, span  # no row needs the last part
    else:
        size = triton.cdiv(triton.cdiv(n, max(1, PROGRAMS // (b * g))), KEYS) * KEYS
    parts = triton.cdiv(n, size)
    states = parts if causal else 1
    number = dict(dtype=torch.float32, device=p.k.device)
    products, sums = torch.empty(b * g, parts, d, d, **number), torch.empty(b * g, parts, d, **number)
    moments = KeyMoments(
        torch.empty(b * g, states, 3 * d, d, dtype=torch.bfloat16, device=p.k.device),
        torch.empty(b * g, states, d, **number),
        torch.empty(b * g, states, **number),
    )
    kind, k = launch_key(p), View(p.k, p.k.stride())
    launch(kind, sum_key_products, b * g * parts, (k, products, sums, n, g, size), (d, KEYS), num_warps=4, num_stages=3)
    launch(kind, merge_key_products, b * g * (d // 16), (products, sums, moments, parts), (d, 16, causal), num_warps=4)
    return moments
