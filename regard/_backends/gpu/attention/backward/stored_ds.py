"""Backward through stored ds: dk and dv leave ds in scratch, and dq = ds·k is one product.

Five products in all, where finding ds once for dq and once for dk and dv takes seven. Scratch holds ds of some heads at
a time, [heads, keys, queries] in 16 bits, at most `SCRATCH_BYTES` whatever the length; of a window only the band of
queries that see a block of keys. `backward_product` adds the keys in their order, so that equal inputs give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from regard._backends.gpu.attention import key_loop, tiles
from regard._backends.gpu.attention.backward import dkv
from regard._backends.gpu.attention.backward.bias import STORED, join_parts, make_parts, sum_stored
from regard._backends.gpu.attention.backward.call import BackwardCall
from regard._backends.gpu.attention.backward.slopes import State
from regard._backends.gpu.attention.config import config_of, count_blocks, describe_blocks, options, view
from regard._backends.gpu.attention.hopper.spans import find_spans, load_spans
from regard._backends.gpu.attention.limits import can_bulk_copy, find_option
from regard._backends.gpu.launcher import launch, launch_key
from regard._call.problem import Problem
from regard._facts import has_large_shared_memory, sm_count

SCRATCH_BYTES = 2**30  # bytes of scratch
QUERIES, KEYS = 128, 64  # blocks of scratch: multiples of the kernels' own
WIDTHS = range(65, 129)  # of heads; narrower ones read and write as much ds for half of the products
SHORT = 1024  # queries or keys, below which ds is found twice
FEW_HEADS = 8  # at a time, below which a part of the keys per query leaves the GPU idle between its launches
FILL = 0.9  # of the multiprocessors' time, if not all heads fit at once


def supports(call: BackwardCall) -> str | None:
    """Say why ds of a call is not stored, or None."""
    p = call.problem
    if call.grads.temperature is not None:
        return "a gradient of the temperature"
    if call.grads.theta is not None:
        return "a gradient of the normaliser's parameter"
    if reason := find_option(p, "score", "mask", "row_bias"):
        return reason
    if p.bias is not None or p.relative is not None or (dkv.needs_spans(p) and not _is_plain(p)):
        statistics = "gradients of statistics" if call.flags["STATS_GRAD"] else None
        if reason := statistics or dkv.supports_hopper(p, call.do, call.rows, call.grads.k, call.grads.v):
            return reason
        if not _is_plain(p) and heads_at_a_time(p) < min(FEW_HEADS, p.k.shape[0] * p.k.shape[1]):
            return f"a window or interval with fewer than {FEW_HEADS} heads at a time"
    if not p.q.is_cuda or p.q.element_size() != 2:
        return "tensors not of 16 bits on a GPU"
    if (width := max(p.q.shape[-1], p.v.shape[-1])) not in WIDTHS:
        return f"head width {width} ({WIDTHS.start} to {WIDTHS[-1]} only)"
    if min(p.q.shape[-2], p.k.shape[-2]) < SHORT:
        return f"fewer than {SHORT} queries or keys"
    if not can_bulk_copy(p.q, p.k, p.v, call.do) or not has_large_shared_memory(p.q.device):
        return "no bulk copies of these tensors, or less than 160 KiB of shared memory"
    return None if fill_ratio(p) >= FILL else "too few heads at a time to fill the GPU"


def _is_plain(p: Problem) -> bool:
    """True if the Triton kernels can store ds as well: every query sees keys from the first on."""
    return p.interval is None and p.reach in ((None, None), (None, 0))


def fill_ratio(p: Problem) -> float:
    """Return the share of the SMs' time that dk and dv of the heads at a time fill, 128 keys to a program."""
    most = heads_at_a_time(p)
    if most >= p.k.shape[0] * p.k.shape[1]:
        return 1.0
    waves = most * triton.cdiv(p.k.shape[-2], 2 * KEYS) / sm_count(p.q.device)
    return min(waves / 2, 1.0) if p.reach[1] is not None else waves / max(math.ceil(waves), 1)


def heads_at_a_time(p: Problem) -> int:
    """Return the number of key heads whose ds fits into the scratch."""
    m, n = padded_size(p)
    return SCRATCH_BYTES // (m * n * p.q.element_size() * (p.q.shape[1] // p.k.shape[1]))


def padded_size(p: Problem) -> tuple[int, int]:
    """Return (queries, keys) of ds in scratch: whole blocks, of a window those of the band."""
    queries, band = p.q.shape[-2], dkv.find_band(p)
    if band is not None:
        queries = band + p.reach[0] + dkv.ROOM
    return triton.cdiv(queries, QUERIES) * QUERIES, triton.cdiv(p.k.shape[-2], KEYS) * KEYS


def split_heads(p: Problem) -> Iterator[tuple[slice, slice, slice]]:
    """Yield (batch entries, query heads, key heads) at a time: whole batch entries, or equal parts of one."""
    batch, heads = p.k.shape[:2]
    group, most = p.q.shape[1] // heads, heads_at_a_time(p)
    if most >= heads:
        step = triton.cdiv(batch, triton.cdiv(batch, most // heads))
        for b in range(0, batch, step):
            yield slice(b, b + step), slice(None), slice(None)
    else:
        step = triton.cdiv(heads, triton.cdiv(heads, most))
        for b in range(batch):
            for g in range(0, heads, step):
                yield slice(b, b + 1), slice(g * group, (g + step) * group), slice(g, g + step)


def backward(call: BackwardCall) -> None:
    """Fill dq, dk and dv of rows whose δ is known, some heads at a time."""
    p, do, state, grads, flags = call.problem, call.do, call.rows, call.grads, call.flags
    (m, n), band = padded_size(p), dkv.find_band(p)
    scratch, parts = None, make_parts(p, STORED) if call.wants_relative else None
    for b, h, g in split_heads(p):
        rows = State(*(x if x is None else x[b, h] for x in state))
        temperature = p.temperature if p.temperature is None else p.temperature[b, h]
        lengths = p.key_lengths if p.key_lengths is None else p.key_lengths[b]
        q, k, v = p.q[b, h], p.k[b, g], p.v[b, g]
        bias, interval = p.bias, p.interval
        theta = p.theta if p.theta is None else p.theta[b, h]
        part = replace(p, q=q, k=k, v=v, temperature=temperature, theta=theta, key_lengths=lengths, sink=None,
                       bias=bias if bias is None else bias[b, h],
                       interval=interval if interval is None else interval[:, b, h],
                       relative=p.relative if p.relative is None else p.relative[h])  # fmt: skip
        heads = q.shape[0] * q.shape[1]
        if scratch is None:  # the first piece is the largest
            scratch = torch.empty(heads, n, m, dtype=p.q.dtype, device=p.q.device)
        dq = grads.q[b, h]
        spans, opt, (dk, dv) = None, options(part), (grads.k[b, g], grads.v[b, g])
        if dkv.needs_spans(p) and dkv.supports_hopper(part, do[b, h], rows, dk, dv) is None:
            spans = find_spans(part, opt)
        d_key_bias = grads.bias if grads.bias is None else grads.bias[b, h]
        dkv.run(part, do[b, h], rows, scratch, dk, dv, None, flags, d_key_bias, spans)
        if parts is not None:
            sum_stored(scratch, parts[b, h], opt)
        unbiased = replace(part, bias=None, relative=None)  # no score is computed
        config, how = config_of(unbiased, "backward_product", **flags)
        blocks = TensorDescriptor(scratch, list(scratch.shape), list(scratch.stride()), [1, config.BN, config.BM])
        arguments = view(k), describe_blocks(k, config.BN, config.BD, True), blocks, band, view(dq), spans, opt
        launch(launch_key(part, dq), backward_product, count_blocks(part, config), arguments, (config,), **how)
    if parts is not None:
        grads.relative = join_parts(p, parts)


@triton.jit
def product_tile(
    acc, ds_blocks, band, k, k_blocks, b, h, i, start, rows, lowest, highest, n, opt, C: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Add one block of keys: dq += ds·k; ds that no query of the tile sees was never stored."""
    g = h // opt.group
    column = i
    if band is not None:
        tl.static_assert(C.BM == 128)  # `dkv.BAND`
        column = i - start // C.BM * C.BM + band
    ds = tl.reshape(ds_blocks.load([b * opt.heads + h, start, column]), [C.BN, C.BM])
    if EDGE:
        if rows is None:
            _, last = tiles.window_range((i + tl.arange(0, C.BM))[None, :], opt, n)
        else:
            ds = tl.where((start + tl.arange(0, C.BN))[:, None] >= rows[0][None, :], ds, 0.0)
            last = rows[1][None, :]
        ds = tl.where((start + tl.arange(0, C.BN))[:, None] < last, ds, 0.0)
        keys = tiles.load_block(k, b, g, start, lowest, highest, C.BN, C.D, C.BD, False)
    else:
        keys = tiles.load_bulk_block(k_blocks, b, g, start, C.BN, C.BD)
    return tiles.dot(tl.trans(ds), keys, acc, C)


@triton.jit
def backward_product(k, k_blocks, ds_blocks, band, dq, spans, opt, C: tl.constexpr):
    """Compute dq of one block of queries."""
    blocks = tl.cdiv(opt.queries, C.BM)
    block = tl.program_id(0)
    first = block % blocks
    if opt.right is not None:  # heads by turns from their first and from their last rows on, the last from there
        first = tl.where((tl.num_programs(0) // blocks - block // blocks) % 2 == 1, blocks - 1 - first, first)
    i0 = first * C.BM
    h = (block // blocks) % opt.heads
    b = block // blocks // opt.heads
    n = tiles.key_count(opt, b)
    acc = tiles.zeros(C.BM, C.BD, C.ACC)
    if spans is None:
        _, highest = tiles.window_range(tl.minimum(i0 + C.BM, opt.queries) - 1, opt, n)
        _, _, outer = key_loop.find_key_range(i0, opt, n, C.BM, C.BN)
        for start in tl.range(0, outer, C.BN):
            acc = product_tile(acc, ds_blocks, band, k, k_blocks, b, h, i0, start, None, 0, highest, n, opt, C, False)
        for start in tl.range(outer, highest, C.BN):
            acc = product_tile(acc, ds_blocks, band, k, k_blocks, b, h, i0, start, None, 0, highest, n, opt, C, True)
    else:
        first, last, lowest, earliest, latest, highest = load_spans(spans, b, h, i0, C.BM)
        rows = (first, last)
        inner = tl.cdiv(earliest, C.BN) * C.BN
        outer = tl.minimum(latest, highest) // C.BN * C.BN
        for start in tl.range(tl.minimum(lowest, highest) // C.BN * C.BN, tl.minimum(inner, highest), C.BN):
            acc = product_tile(
                acc, ds_blocks, band, k, k_blocks, b, h, i0, start, rows, lowest, highest, n, opt, C, True
            )
        for start in tl.range(inner, outer, C.BN):
            acc = product_tile(
                acc, ds_blocks, band, k, k_blocks, b, h, i0, start, rows, lowest, highest, n, opt, C, False
            )
        for start in tl.range(tl.maximum(inner, outer), highest, C.BN):
            acc = product_tile(
                acc, ds_blocks, band, k, k_blocks, b, h, i0, start, rows, lowest, highest, n, opt, C, True
            )
        acc = tl.where((first < last)[:, None], acc, 0.0)  # of a row that sees nothing ds may never have been stored
    if not (C.LINEAR and opt.temperature.ptr is not None):
        acc = acc * tiles.number(opt.scale, C.ACC)
    tiles.store_block(dq, b, h, i0, opt.queries, acc, C.BM, C.D, C.BD)
