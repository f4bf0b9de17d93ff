"""The largest logit of each head, max_ij scale·q_i·k_j, in one kernel that reads q and k alone and adds to a tensor.

    note_largest    held[h] ← max(held[h], max_ij s_ij); NaN stays NaN

Where a training is watched at every step this runs beside each attention call, so that it makes no row, no output and
no second launch. Masks other than causal order are left to `regard.attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard._backends.gpu.launcher import launch, on_device_of, tensor_key
from regard._facts import has_large_shared_memory

WIDEST = 256
FEW = 16  # rows of v, at least, that its mean norm takes, evenly spread
SMALL = 16 * 1024  # bytes of a block of rows or keys where five have to fit 99 KiB, or float32 spills its registers


def can_note(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> bool:
    """True if `note_largest` takes a call, q [B, H, M, D] with k [B, G, N, D]."""
    return mask is None and scale > 0.0 and q.dtype in (torch.bfloat16, torch.float16, torch.float32) and (
        q.dtype == k.dtype and q.shape[-1] <= WIDEST and q.shape[0] == k.shape[0] and q.shape[1] % k.shape[1] == 0
    )  # fmt: skip


def note_largest(q: Tensor, k: Tensor, v: Tensor | None, causal: bool, scale: float, rows: int, held: Tensor) -> None:
    """Raise `held` [3 + H], float32: heads, their width, the mean norm of a few of v's rows, the largest logits.

    `rows`: 0 for all rows of all sequences, else about so many of the first sequence, evenly spread.
    """
    batch, heads, queries, width = q.shape
    step = max(1, queries // rows) if rows else 1
    first = (queries - 1) % step
    count, batch = (queries - first + step - 1) // step, 1 if rows else batch
    wide = triton.next_power_of_2(max(16, width))
    block, tile, stages = choose_blocks(q, count, wide)
    per_head = triton.cdiv(count, block)
    given = q if v is None else v
    arguments = (
        q, k, given, held, *q.stride(), *k.stride(), *given.stride(), heads, heads // k.shape[1], k.shape[2],
        given.shape[1], given.shape[3], count, first, step, scale,
    )  # fmt: skip
    widen = q.dtype == torch.float32 or not q.is_cuda  # Triton's interpreter multiplies no bfloat16
    constants = widen, causal, v is not None, block, tile, width, wide, triton.next_power_of_2(given.shape[3]), FEW
    with on_device_of(q):
        how = dict(num_warps=8 if block == 128 else 4, num_stages=stages)
        launch(tensor_key(q), raise_largest, batch * heads * per_head, arguments, constants, **how)


def choose_blocks(q: Tensor, count: int, wide: int) -> tuple[int, int, int]:
    """Return (rows, keys, stages) of a program that takes `count` rows of `wide` columns."""
    half = wide <= 128 and q.element_size() == 2
    block = 16 if count <= 16 else 128 if half else 64
    tile, stages = 128 if half else 32 if wide > 128 else 64, 3 if wide <= 128 else 2
    row = wide * q.element_size()
    if q.is_cuda and (row > 512 or not has_large_shared_memory(q.device)):
        most = max(16, SMALL // row)
        block, tile, stages = min(block, most), min(tile, most), 2
    return block, tile, stages


@triton.jit
def multiply(x, y, WIDEN: tl.constexpr):
    return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee") if WIDEN else tl.dot(x, y)


@triton.jit
def raise_largest(
    q, k, v, held,
    qb, qh, qi, qd, kb, kh, kj, kd, vb, vh, vj, ve,
    heads, group, keys, value_heads, value_width, count, first, step, scale,
    WIDEN: tl.constexpr, CAUSAL: tl.constexpr, VALUES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, E: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """One block of one head's rows against all keys that it sees; the first program describes the call."""
    blocks = tl.cdiv(count, BM)
    at = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks  # of causal rows the longest first
    b, h = (at // heads).to(tl.int64), (at % heads).to(tl.int64)
    i = first + (block * BM + tl.arange(0, BM)) * step
    inside = block * BM + tl.arange(0, BM) < count
    d = tl.arange(0, D)
    rows = q + b * qb + h * qh + i.to(tl.int64)[:, None] * qi + d[None, :] * qd
    x = tl.load(rows, mask=inside[:, None] & (d < WIDTH)[None, :], other=0.0)
    j0 = tl.arange(0, BN)
    base = k + b * kb + h // group * kh + d[:, None] * kd
    end = tl.minimum(keys, first + ((block + 1) * BM - 1) * step + 1) if CAUSAL else keys
    whole = (
        tl.minimum(keys, first + block * BM * step + 1) // BN * BN if CAUSAL else keys // BN * BN
    )  # seen by all rows
    base += j0.to(tl.int64)[None, :] * kj
    best = tl.full([BM, BN], float("-inf"), tl.float32)
    for _ in tl.range(0, whole, BN):
        y = tl.load(base) if D == WIDTH else tl.load(base, mask=(d < WIDTH)[:, None], other=0.0)
        base += BN * kj
        best = tl.maximum(best, multiply(x, y, WIDEN), propagate_nan=tl.PropagateNan.ALL)
    for start in tl.range(whole, end, BN):
        j = start + j0
        y = tl.load(base, mask=(d < WIDTH)[:, None] & (j < keys)[None, :], other=0.0)
        base += BN * kj
        seen = (j[None, :] <= i[:, None]) & (j < keys)[None, :] if CAUSAL else (j < keys)[None, :]
        s = tl.where(seen, multiply(x, y, WIDEN), float("-inf"))
        best = tl.maximum(best, s, propagate_nan=tl.PropagateNan.ALL)
    best = tl.where(inside[:, None], best, float("-inf"))
    broken = tl.max(tl.max(tl.where(best != best, 1, 0), 1), 0)
    largest = tl.max(tl.max(tl.where(best != best, float("-inf"), best), 1), 0) * scale
    largest = tl.where(broken > 0, float("nan"), largest)
    tl.atomic_max(held + 3 + h, largest, sem="relaxed")  # as integers, of which NaN is larger than any number
    if tl.program_id(0) == 0:
        tl.store(held, heads * 1.0)
        tl.store(held + 1, WIDTH * 1.0)
        if VALUES:
            total = 0.0
            apart = tl.maximum(1, keys // FEW)
            j = tl.arange(0, 2 * FEW) * apart
            e = tl.arange(0, E)
            there = (j < keys)[:, None] & (e < value_width)[None, :]
            where = v + j.to(tl.int64)[:, None] * vj + e[None, :] * ve
            for _ in tl.range(0, value_heads):
                z = tl.load(where, mask=there, other=0.0).to(tl.float32)
                where += vh
                total += tl.sum(tl.sqrt(tl.sum(z * z, 1)), 0)
            mean = total / (value_heads * tl.cdiv(keys, apart))
            tl.atomic_max(held + 2, tl.where(mean != mean, float("nan"), mean), sem="relaxed")
