"""The norms of one call on a GPU, without waiting for the host: see `norms.py`.

A call may hold several layers, as many sequences each, one after another in its batch; every layer has its own result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard._backends.gpu.launcher import launch, on_device_of, tensor_key


def relative_difference(own: Tensor, rebuilt: Tensor, rows: Tensor | None, layers: int = 1) -> Tensor:
    """Returns ‖own − rebuilt‖ / ‖own‖ per layer and head [L·H], both [L·B, H, R, E], over the rows [L·B, R] that count.

    One program reads all rows of a head, B·R of them.
    """
    batch, heads, some, width = own.shape
    result = torch.empty(layers * heads, dtype=torch.float32, device=own.device)
    counted = own if rows is None else rows.contiguous().view(torch.uint8)
    arguments = own, rebuilt, counted, result, *own.stride(), *rebuilt.stride(), batch // layers, heads, some, width
    kind, constants = tensor_key(own, rebuilt, counted), (rows is not None, *_tile(width))
    with on_device_of(own):
        launch(kind, relative_difference_kernel, layers * heads, arguments, constants, num_warps=8)
    return result


def add_predicted_variance(
    flat: Tensor, at: int, calls: int, q: Tensor, k: Tensor, rows: Tensor | None, strides: tuple[int, int],
    of_keys: bool, scale: float,
) -> None:  # fmt: skip
    """Adds scale²·E‖q‖²·E‖k − k̄‖²/d of head h to flat[at + h], and 1 to flat[calls]; flat [L, F] has a row per layer.

    Norms are taken of every so many rows and keys (`strides`). Only `rows` [L·B, M] count and, if `of_keys`, only their
    keys; without such a row nothing is added. One launch takes the norms of each sequence and head, the next one their
    means.
    """
    batch, heads, queries, width = q.shape
    groups, keys, flat = k.shape[1], k.shape[2], flat.view(-1, flat.shape[-1])
    counted = q if rows is None else rows.contiguous().view(torch.uint8)
    norms = torch.empty(batch * (2 * heads + groups), dtype=torch.float32, device=q.device)
    arguments = q, k, counted, norms, *q.stride(), *k.stride(), *strides, batch, heads, groups, queries, keys, width
    constants, programs = (rows is not None, of_keys, *_tile(width)), batch * (heads + groups)
    sizes = batch, batch // len(flat), heads, groups, width
    means = norms, flat, at, calls, scale, flat.stride(0), *sizes
    with on_device_of(q):
        launch(tensor_key(q, k, counted, norms), norms_kernel, programs, arguments, constants, num_warps=4)
        launch(tensor_key(norms, flat), predicted_variance_kernel, len(flat) * heads, means, (), num_warps=1)


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
    own, rebuilt, rows, result, ob, oh, om, oe, rb, rh, rm, re, B, H, R, E,
    HAS_ROWS: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    layer, h = tl.program_id(0) // H, tl.program_id(0) % H
    size = tl.zeros([BR, BE], tl.float32)
    squares = tl.zeros([BR, BE], tl.float32)
    for b in range(layer * B, layer * B + B):
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
    difference = tl.sqrt_rn(tl.sum(tl.sum(squares, 1), 0)) / tl.where(length == 0, 1.0, length)
    tl.store(result + tl.program_id(0), difference)


@triton.jit
def query_norms(q, b, h, rows, sb, sh, sm, sd, every, M, D, HAS_ROWS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Returns Σ‖q‖² over rows that count, and their number."""
    squares = tl.zeros([BR, BD], tl.float32)
    number = tl.zeros([BR], tl.float32)
    for start in range(0, M, BR * every):
        m = start + tl.arange(0, BR) * every
        inside = m < M
        if HAS_ROWS:
            inside = inside & (tl.load(rows + b * M + m, inside, 0) != 0)
        x = load_block(q, b, h, m, inside, sb, sh, sm, sd, D, BD)
        squares += x * x
        number += tl.where(inside, 1.0, 0.0)
    return tl.sum(tl.sum(squares, 1), 0), tl.sum(number, 0)


@triton.jit
def key_spread(
    k, b, g, rows, sb, sh, sn, sd, every, M, N, D, OF_KEYS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):
    """Returns the mean of ‖k − k̄‖² over keys that count, by Chan's rule tile by tile."""
    middle = tl.zeros([BD], tl.float32)
    between = tl.zeros([BD], tl.float32)
    deviations = tl.zeros([BR, BD], tl.float32)
    seen = 0.0
    for start in range(0, N, BR * every):
        n = start + tl.arange(0, BR) * every
        inside = n < N
        if OF_KEYS:
            inside = inside & (tl.load(rows + b * M + n, inside, 0) != 0)
        y = load_block(k, b, g, n, inside, sb, sh, sn, sd, D, BD)
        number = tl.sum(tl.where(inside, 1.0, 0.0), 0)
        mean = tl.sum(y, 0) / tl.maximum(number, 1.0)  # [BD]
        y = tl.where(inside[:, None], y - mean, 0.0)
        deviations += y * y
        share = number / tl.maximum(seen + number, 1.0)
        between += (mean - middle) * (mean - middle) * (seen * share)
        middle += (mean - middle) * share
        seen += number
    return (tl.sum(tl.sum(deviations, 1), 0) + tl.sum(between, 0)) / tl.maximum(seen, 1.0)


@triton.jit
def norms_kernel(
    q, k, rows, norms, qb, qh, qm, qd, kb, kh, kn, kd, every_q, every_k, B, H, G, M, N, D,
    HAS_ROWS: tl.constexpr, OF_KEYS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Writes Σ‖q‖² [B, H], the number of rows behind it [B, H], and the mean of ‖k − k̄‖² [B, G]."""
    task = tl.program_id(0)
    if task < B * H:
        total, number = query_norms(q, task // H, task % H, rows, qb, qh, qm, qd, every_q, M, D, HAS_ROWS, BR, BD)
        tl.store(norms + task, total)
        tl.store(norms + B * H + task, number)
    else:
        at = task - B * H
        spread = key_spread(k, at // G, at % G, rows, kb, kh, kn, kd, every_k, M, N, D, OF_KEYS, BR, BD)
        tl.store(norms + B * H + task, spread)


@triton.jit
def predicted_variance_kernel(norms, flat, at, calls, scale, row, TOTAL, B, H, G, D):
    """Adds the product of the norms' means over the B sequences of a layer, of TOTAL in all, for one of its heads."""
    layer, h = tl.program_id(0) // H, tl.program_id(0) % H
    spreads = norms + 2 * TOTAL * H
    squares, many, spread = 0.0, 0.0, 0.0
    for b in range(layer * B, layer * B + B):
        squares += tl.load(norms + b * H + h)
        many += tl.load(norms + TOTAL * H + b * H + h)
        spread += tl.load(spreads + b * G + h // (H // G))
    if many > 0:
        own = flat + layer.to(tl.int64) * row
        product = scale * scale * (squares / many) * (spread / B) / D
        tl.store(own + at + h, tl.load(own + at + h) + product.to(tl.float64))
        if h == 0:
            tl.store(own + calls, tl.load(own + calls) + 1.0)
