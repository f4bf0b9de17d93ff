"""dq = a · Σ_j ds_j·k_j from ds as `backward_dkv` left it: five products in all, where finding ds twice makes seven.

ds of some heads at a time lies in scratch, [heads, keys, queries] in 16 bits, at most `MOST` bytes whatever the length.
One program owns a block of queries and adds the keys in their order, so that equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from regard.kernels import sweeps, tiles
from regard.kernels.backward import State, backward_dkv
from regard.kernels.config import bulky, config_of, described, options, view
from regard.kernels.launch import kind_of, launch
from regard.kernels.tiles import Config
from regard.problem import Gradients, Problem

MOST = 2**30  # bytes of scratch
QUERIES, KEYS = 256, 64  # blocks of scratch: multiples of the kernels' own
SHORT = 1024  # queries or keys, below which ds is found twice
FILL = 256  # programs that fill the multiprocessors of an H200, two to each


@triton.jit
def product_tile(
    acc, slopes, k, k_blocks, b, h, i, start, lowest, highest, n, opt, C: tl.constexpr, EDGE: tl.constexpr
):
    """dq += ds·k over one block of keys; what no query of the tile sees was never stored."""
    g = h // opt.group
    ds = tl.reshape(slopes.load([b * opt.heads + h, start, i]), [C.BN, C.BM])
    if EDGE:
        rows = (i + tl.arange(0, C.BM))[None, :]
        j = (start + tl.arange(0, C.BN))[:, None]
        first, last = tiles.interval(rows, opt, n)
        ds = tl.where((j >= first) & (j < last) & (rows < opt.queries), ds, 0.0)
        keys = tiles.block_of(k, b, g, start, lowest, highest, C.BN, C.D, C.BD, False)
    else:
        keys = tiles.bulk_of(k_blocks, b, g, start, C.BN, C.BD)
    return tiles.dot(tl.trans(ds), keys, acc, C)


@triton.jit
def backward_product(k, k_blocks, slopes, dq, opt, C: tl.constexpr):
    blocks = tl.cdiv(opt.queries, C.BM)
    block = tl.program_id(0)
    i0 = (blocks - 1 - block % blocks) * C.BM
    h = (block // blocks) % opt.heads
    b = block // blocks // opt.heads
    n = tiles.key_count(opt, b)
    lowest, _ = tiles.interval(i0, opt, n)
    _, highest = tiles.interval(tl.minimum(i0 + C.BM, opt.queries) - 1, opt, n)
    begin, inner, outer = sweeps.key_blocks(i0, opt, n, C.BM, C.BN)
    acc = tiles.zeros(C.BM, C.BD, C.ACC)
    if opt.left is not None:
        for start in tl.range(begin, tl.minimum(inner, highest), C.BN):
            acc = product_tile(acc, slopes, k, k_blocks, b, h, i0, start, lowest, highest, n, opt, C, True)
    for start in tl.range(inner, outer, C.BN):
        acc = product_tile(acc, slopes, k, k_blocks, b, h, i0, start, lowest, highest, n, opt, C, False)
    for start in tl.range(tl.maximum(inner, outer), highest, C.BN):
        acc = product_tile(acc, slopes, k, k_blocks, b, h, i0, start, lowest, highest, n, opt, C, True)
    if not (C.LINEAR and opt.temperature.ptr is not None):
        acc = acc * tiles.number(opt.scale, C.ACC)
    tiles.store_block(dq, b, h, i0, opt.queries, acc, C.BM, C.D, C.BD)


def takes(p: Problem, do: torch.Tensor, warm: bool) -> bool:
    """Is ds of this call stored? Where δ is known beforehand, rows are long, and enough heads fit into the scratch."""
    width = max(p.q.shape[-1], p.v.shape[-1])
    plain = all(x is None for x in (p.bias, p.mask)) and p.dropout_p == 0.0 and p.reach in ((None, None), (None, 0))
    return (
        plain
        and not warm
        and p.choice.family != "threshold"
        and p.q.is_cuda
        and p.q.element_size() == 2
        and width <= 128
        and min(p.q.shape[-2], p.k.shape[-2]) >= SHORT
        and bulky(p.q, p.k, p.v, do)
        and programs_at_a_time(p) >= FILL
    )


def programs_at_a_time(p: Problem) -> int:
    """Programs of `backward_dkv` that one piece of the heads has."""
    return min(heads_at_a_time(p), p.k.shape[0] * p.k.shape[1]) * triton.cdiv(p.k.shape[-2], KEYS)


def heads_at_a_time(p: Problem) -> int:
    """Key heads whose ds fits into the scratch."""
    m, n = padded(p)
    return MOST // (m * n * p.q.element_size() * (p.q.shape[1] // p.k.shape[1]))


def padded(p: Problem) -> tuple[int, int]:
    """(queries, keys) of ds in scratch: whole blocks."""
    return triton.cdiv(p.q.shape[-2], QUERIES) * QUERIES, triton.cdiv(p.k.shape[-2], KEYS) * KEYS


def pieces(p: Problem) -> Iterator[tuple[slice, slice, slice]]:
    """(batch entries, query heads, key heads) at a time: whole batch entries, or equal parts of one."""
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


def backward(p: Problem, do: torch.Tensor, state: State, grads: Gradients, flags: dict) -> None:
    """dq, dk and dv of rows whose `state` is known, piece by piece of the heads."""
    m, n = padded(p)
    scratch = None
    for b, h, g in pieces(p):
        rows = {name: x if x is None else x[b, h] for name, x in state._asdict().items()}
        temperature = p.temperature if p.temperature is None else p.temperature[b, h]
        lengths = p.key_lengths if p.key_lengths is None else p.key_lengths[b]
        part = replace(
            p, q=p.q[b, h], k=p.k[b, g], v=p.v[b, g], temperature=temperature, key_lengths=lengths, sink=None
        )
        d_out, dq, dk, dv = do[b, h], grads.q[b, h], grads.k[b, g], grads.v[b, g]
        heads = part.q.shape[0] * part.q.shape[1]
        if scratch is None:  # the first piece is the largest
            scratch = torch.empty(heads, n, m, dtype=p.q.dtype, device=p.q.device)
        kind, opt, found = (
            kind_of(part, d_out, *(x for x in rows.values() if x is not None)),
            options(part),
            State(**rows),
        )
        config, how = config_of(part, "backward_dkv", **flags)
        queries = (described(x, config.BM, w, config.BULK) for x, w in ((part.q, config.BD), (d_out, config.BE)))
        inputs = view(part.q), view(part.k), view(part.v), view(d_out)
        arguments = *inputs, *queries, tiled(scratch, config), view(dk), view(dv), found, None, opt
        blocks = triton.cdiv(part.k.shape[-2], config.BN) * part.k.shape[0] * part.k.shape[1]
        launch(kind, backward_dkv, blocks, arguments, (config,), **how)
        config, how = config_of(part, "backward_product", **flags)
        keys = described(part.k, config.BN, config.BD, True)
        arguments = inputs[1], keys, tiled(scratch, config), view(dq), opt
        launch(kind, backward_product, triton.cdiv(part.q.shape[-2], config.BM) * heads, arguments, (config,), **how)


def tiled(scratch: torch.Tensor, config: Config) -> TensorDescriptor:
    return TensorDescriptor(scratch, list(scratch.shape), list(scratch.stride()), [1, config.BN, config.BM])
