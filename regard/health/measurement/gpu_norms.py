"""The norms of one call on a GPU, one launch each: see `norms.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard._backends.gpu.launcher import launch, on_device_of, tensor_key


def relative_difference(own: Tensor, rebuilt: Tensor, rows: Tensor | None) -> Tensor:
    """Returns ‖own − rebuilt‖ / ‖own‖ per head [H], both [B, H, R, E], over the rows [B, R] that count."""
    batch, heads, some, width = own.shape
    result = torch.empty(heads, dtype=torch.float32, device=own.device)
    counted = own if rows is None else rows.contiguous().view(torch.uint8)
    arguments = own, rebuilt, counted, result, *own.stride(), *rebuilt.stride(), batch, some, width
    kind, constants = tensor_key(own, rebuilt, counted), (rows is not None, *_tile(width))
    with on_device_of(own):
        launch(kind, relative_difference_kernel, heads, arguments, constants, num_warps=8)
    return result


def add_predicted_variance(
    flat: Tensor, at: int, calls: int, q: Tensor, k: Tensor, rows: Tensor | None, strides: tuple[int, int],
    of_keys: bool, scale: float,
) -> None:  # fmt: skip
    """Adds scale²·E‖q‖²·E‖k − k̄‖²/d of head h to flat[at + h], and 1 to flat[calls].

    Norms are taken of every so many rows and keys (`strides`). Only `rows` [B, M] count and, if `of_keys`, only their
    keys; without such a row nothing is added.
    """
    batch, heads, queries, width = q.shape
    counted = q if rows is None else rows.contiguous().view(torch.uint8)
    sizes = batch, heads // k.shape[1], queries, k.shape[2], width
    arguments = q, k, counted, flat, at, calls, scale, *q.stride(), *k.stride(), *strides, *sizes
    constants = rows is not None, of_keys, *_tile(width)
    with on_device_of(q):
        launch(tensor_key(q, k, counted, flat), predicted_variance_kernel, heads, arguments, constants, num_warps=8)


def _tile(width: int) -> tuple[int, int]:
    """Returns (rows at a time, the width as a power of two)."""
    wide = triton.next_power_of_2(width)
    return max(16, min(64, 4096 // wide)), wide


@triton.jit
def load_block(x, b, h, m, inside, sb, sh, sm, sd, D, BD: tl.constexpr):
    """Loads rows m of head h in sequence b, as [BR, BD] in float32."""
    d = tl.arange(0, BD)
    start = x + tl.cast(b, tl.int64) * sb + tl.cast(h, tl.int64) * sh
    return tl.load(start + m[:, None].to(tl.int64) * sm + d * sd, inside[:, None] & (d < D), 0.0).to(tl.float32)


@triton.jit
def relative_difference_kernel(
    own, rebuilt, rows, result, ob, oh, om, oe, rb, rh, rm, re, B, R, E,
    HAS_ROWS: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    size = tl.zeros([BR, BE], tl.float32)
    squares = tl.zeros([BR, BE], tl.float32)
    for b in range(0, B):
        for start in range(0, R, BR):
            r = start + tl.arange(0, BR)
            inside = r < R
            if HAS_ROWS:
                inside = inside & (tl.load(rows + b * R + r, inside, 0) != 0)
            x = load_block(own, b, h, r, inside, ob, oh, om, oe, E, BE)
            y = load_block(rebuilt, b, h, r, inside, rb, rh, rm, re, E, BE)
            size += x * x
            squares += (x - y) * (x - y)
    length = tl.sqrt_rn(tl.sum(tl.sum(size, 1), 0))
    tl.store(result + h, tl.sqrt_rn(tl.sum(tl.sum(squares, 1), 0)) / tl.where(length == 0, 1.0, length))


@triton.jit
def predicted_variance_kernel(
    q, k, rows, flat, at, calls, scale, qb, qh, qm, qd, kb, kh, kn, kd, every_q, every_k, B, GROUP, M, N, D,
    HAS_ROWS: tl.constexpr, OF_KEYS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    squares = tl.zeros([BR, BD], tl.float32)
    number = tl.zeros([BR], tl.float32)
    spread = 0.0
    for b in range(0, B):
        for start in range(0, M, BR * every_q):
            m = start + tl.arange(0, BR) * every_q
            inside = m < M
            if HAS_ROWS:
                inside = inside & (tl.load(rows + b * M + m, inside, 0) != 0)
            x = load_block(q, b, h, m, inside, qb, qh, qm, qd, D, BD)
            squares += x * x
            number += tl.where(inside, 1.0, 0.0)
        total = tl.zeros([BR, BD], tl.float32)
        seen = tl.zeros([BR], tl.float32)
        for start in range(0, N, BR * every_k):
            n = start + tl.arange(0, BR) * every_k
            inside = n < N
            if OF_KEYS:
                inside = inside & (tl.load(rows + b * M + n, inside, 0) != 0)
            total += load_block(k, b, h // GROUP, n, inside, kb, kh, kn, kd, D, BD)
            seen += tl.where(inside, 1.0, 0.0)
        keys = tl.maximum(tl.sum(seen, 0), 1.0)
        middle = tl.sum(total, 0) / keys  # [BD]
        deviations = tl.zeros([BR, BD], tl.float32)
        for start in range(0, N, BR * every_k):
            n = start + tl.arange(0, BR) * every_k
            inside = n < N
            if OF_KEYS:
                inside = inside & (tl.load(rows + b * M + n, inside, 0) != 0)
            y = load_block(k, b, h // GROUP, n, inside, kb, kh, kn, kd, D, BD)
            y = tl.where(inside[:, None], y - middle, 0.0)
            deviations += y * y
        spread += tl.sum(tl.sum(deviations, 1), 0) / keys
    many = tl.sum(number, 0)
    if many > 0:
        product = scale * scale * (tl.sum(tl.sum(squares, 1), 0) / many) * (spread / B) / D
        tl.store(flat + at + h, tl.load(flat + at + h) + product.to(tl.float64))
        if h == 0:
            tl.store(flat + calls, tl.load(flat + calls) + 1.0)
