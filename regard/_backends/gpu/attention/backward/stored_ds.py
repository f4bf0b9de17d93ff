"""Backward through stored ds: dk and dv leave ds in scratch, and dq = ds·k is one product.

Five products in all, where finding ds once for dq and once for dk and dv takes seven. Scratch holds ds of some heads at
a time, [heads, keys, queries] in 16 bits, at most `SCRATCH_BYTES` whatever the length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from regard._backends.gpu.attention.backward import dkv
from regard._backends.gpu.attention.backward.call import BackwardCall
from regard._backends.gpu.attention.backward.dq_product import backward_product
from regard._backends.gpu.attention.backward.relative import STORED, join_parts, make_parts, sum_stored
from regard._backends.gpu.attention.backward.slopes import State
from regard._backends.gpu.attention.config import config_of, count_blocks, describe_blocks, options, view
from regard._backends.gpu.attention.hopper.spans import find_spans
from regard._backends.gpu.attention.limits import can_bulk_copy, find_option
from regard._backends.gpu.launcher import launch, launch_key
from regard._core.device import has_large_shared_memory, sm_count
from regard._core.problem import Problem

SCRATCH_BYTES = 2**30  # bytes of scratch
QUERIES, KEYS = 128, 64  # blocks of scratch: multiples of the kernels' own
WIDTHS = range(65, 129)  # of heads; narrower ones read and write as much ds for half of the products
SHORT = 1024  # queries or keys, below which ds is found twice
FEW_HEADS = 16  # at a time, below which a part of the keys per query leaves the GPU idle between its launches
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
    """Return (queries, keys) of ds in scratch: whole blocks."""
    return triton.cdiv(p.q.shape[-2], QUERIES) * QUERIES, triton.cdiv(p.k.shape[-2], KEYS) * KEYS


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
    m, n = padded_size(p)
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
        arguments = view(k), describe_blocks(k, config.BN, config.BD, True), blocks, view(dq), spans, opt
        launch(launch_key(part, dq), backward_product, count_blocks(part, config), arguments, (config,), **how)
    if parts is not None:
        grads.relative = join_parts(p, parts)
