"""Kernel arguments of a call: its tensors and options, compile-time constants, block sizes and launch options.

Block sizes come from a small table; nothing is tuned at run time.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from regard._backends.gpu import bundle
from regard._backends.gpu.attention import limits, statistics
from regard._backends.gpu.attention.forward import decode
from regard._backends.gpu.attention.tiles import Config, Options, View
from regard._backends.gpu.launcher import mark_absent
from regard._call import philox
from regard._call.problem import Problem
from regard._facts import (
    has_large_shared_memory,
    has_tensor_memory,
    multiplies_from_shared_memory,
    shared_memory,
)

# (queries, keys, warps, stages, by the bulk copy engine?) of the 16-bit types for head dims up to 64, 128, 256
HALF = {
    "forward_online": ((64, 128, 4, 3, False), (128, 128, 8, 3, True), (64, 64, 4, 2, False)),
    "forward_imprecise": ((64, 64, 4, 3, False), (64, 64, 4, 3, False), (64, 64, 4, 2, False)),
    "forward_threshold": ((128, 64, 4, 3, False), (128, 64, 8, 3, False), (64, 64, 8, 2, False)),
    "tangent": ((64, 64, 4, 3, False), (128, 64, 8, 2, True), (64, 32, 8, 2, False)),
    "backward_dq": ((64, 64, 4, 3, False), (128, 64, 8, 3, False), (64, 32, 8, 1, False)),
    "backward_dkv": ((64, 64, 4, 2, True), (64, 64, 4, 2, True), (32, 64, 8, 1, False)),
    "received": ((64, 128, 8, 3, True), (64, 128, 8, 3, True), (64, 64, 8, 1, False)),
    "top_keys": ((64, 64, 4, 3, True), (64, 64, 4, 3, True), (64, 64, 8, 1, False)),
    "backward_product": ((128, 64, 8, 3, True), (128, 64, 8, 3, True)),
    "backward_bias": ((64, 64, 4, 1, False), (64, 64, 4, 1, False), (32, 32, 4, 1, False)),
}
# by column of HALF, from the first table that has it: threshold maps of few queries, whose block has no more rows than
# there are; with a parameter's gradient; powers tᵏ; heads that a block is wider than; threshold maps, which take two
# sums; the others where a block may use ROOM bytes of shared memory
SHORT = {"forward_threshold": {1: (32, 128, 4, 3, True)}}
LEARNING = {"backward_dq": {0: (64, 32, 4, 3, False), 1: (64, 32, 4, 2, True)}}
POWERS = {"forward_threshold": {0: (128, 64, 8, 3, False)}, "backward_dkv": {0: (32, 64, 4, 2, True)}}
PADDED = {"forward_threshold": {1: (64, 64, 4, 3, True)}}
DOUBLE = {"backward_dq": {1: (64, 64, 4, 2, True)}, "tangent": {1: (128, 32, 8, 3, True)}}
ROOMY = {"backward_dq": {2: (128, 32, 8, 2, False)}}
FEW, ROOM = 32, 192 * 1024
# heads up to 128 where that engine cannot read the inputs
PLAIN = {
    "forward_threshold": (128, 64, 8, 3, False),
    "backward_dq": (128, 64, 8, 3, False),
    "backward_dkv": (64, 128, 8, 2, False),
    "received": (64, 64, 8, 2, False),
    "top_keys": (64, 64, 4, 2, False),
}
DECODE = (128, 4, 3, False), (64, 4, 3, False), (32, 4, 2, False)  # the same without the queries
SINGLE = {  # (queries, keys, warps) of float32 for head dims up to 64, 128 and more
    "tangent": ((64, 32, 8), (16, 32, 4), (16, 16, 4)),
    "others": ((64, 32, 4), (32, 32, 4), (16, 16, 4)),
}
# Triton 3.6 compiles no scalar of products in tensor memory, and the sums of dk and dv of 256 columns exceed it:
# products of fewer than 64 rows are kept in registers
SCALARS, ALONE = ("forward_decode", "top_keys"), 32
WIDE = 16, 16, 4, 1, False  # wider heads, and those of 256 where shared memory is small
SPLIT = "tf32x3" if torch.version.hip is None else "bf16x6"  # products of float32, in parts that the card multiplies
TYPES = {torch.float64: tl.float64, torch.float32: tl.float32}


NOTHING = mark_absent(View(None, None))
for absent in Options._field_defaults.values():
    if absent is not None:
        mark_absent(absent)


def view(tensor: torch.Tensor | None) -> View:
    """Return a tensor as a kernel argument; None gives a view without a pointer."""
    return NOTHING if tensor is None else View(tensor, tensor.stride())


def describe_blocks(tensor: torch.Tensor, rows: int, width: int, bulk: bool) -> TensorDescriptor | torch.Tensor:
    """Return a tensor descriptor of blocks [rows, width] if `bulk`, else the tensor, which no kernel reads then."""
    if not bulk:
        return tensor
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, width])


def describe_keys(p: Problem, config: Config) -> tuple:
    """Return the descriptors of k's and v's blocks."""
    return tuple(describe_blocks(x, config.BN, w, config.BULK) for x, w in ((p.k, config.BD), (p.v, config.BE)))


def count_blocks(p: Problem, config: Config) -> int:
    """Return the number of query blocks of a call."""
    return triton.cdiv(p.q.shape[-2], config.BM) * p.q.shape[0] * p.q.shape[1]


def unexpanded_shape(x: torch.Tensor) -> list[int]:
    """Return the shape that an expanded tensor had before."""
    return [1 if stride == 0 else size for size, stride in zip(x.shape, x.stride(), strict=True)]


@lru_cache(maxsize=256)
def split_float(number: float | None) -> tuple[float, float]:
    """Split a Python float into two float32 numbers, as a kernel argument has no more bits."""
    number = 0.0 if number is None else float(number)
    high = float(np.float32(number))
    return high, float(np.float32(number - high))


def _gather_columns(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _clamp(reach: int | None, most: int) -> int | None:
    return None if reach is None else max(-most, min(reach, most))


def has_key_bias(p: Problem) -> bool:
    """True if the bias is one vector of keys per head, which kernels read as such; beside a mask it is a matrix."""
    return p.bias is not None and p.mask is None and (p.bias.stride(2) == 0 or p.bias.shape[2] == 1)


def options(p: Problem) -> Options:
    """Return the options of a call as a kernel argument."""
    (left, right), (_, heads, m, _), n = p.reach, p.q.shape, p.k.shape[-2]
    dropout = p.dropout_p > 0.0
    key_bias = p.bias[:, :, 0] if p.bias is not None and has_key_bias(p) else None
    return Options(
        bias=view(p.bias if key_bias is None else None),
        key_bias=view(key_bias),
        row_bias=view(p.row_bias),
        relative=view(None if p.relative is None else _gather_columns(p.relative)),
        score_params=view(p.score_params),
        interval=view(p.interval),
        mask=view(None if p.mask is None else p.mask.view(torch.uint8)),
        temperature=view(p.temperature),
        sink=view(p.sink),
        thetas=view(p.theta),
        lengths=None if p.key_lengths is None else p.key_lengths.contiguous(),
        seed=p.seed if dropout else None,
        left=_clamp(left, m + n),
        right=_clamp(right, m + n),
        scale=split_float(p.scale),
        cap=None if p.softcap is None else split_float(p.softcap),
        theta=split_float(p.choice.theta),
        drop_below=philox.threshold(p.dropout_p) if dropout else None,
        keep_scale=split_float(1.0 / (1.0 - p.dropout_p)),
        heads=heads,
        group=heads // p.k.shape[1],
        queries=m,
        keys=n,
        offset=p.first_query or None,
    )


def is_linear(p: Problem) -> bool:
    """True if s is a positive multiple of q·k, so that the maximum can be taken before scaling."""
    biases = p.bias, p.row_bias, p.relative
    return p.softcap is p.score is None and p.scale > 0 and all(bias is None for bias in biases)


def config_of(p: Problem, kernel: str, others: tuple[torch.Tensor, ...] = (), **flags: bool) -> tuple[Config, dict]:
    """Return a kernel's compile-time constants and launch options; it reads `others` in blocks too.

    flags: those of `Config` that have a default.
    """
    readable = p.q.is_cuda and limits.can_bulk_copy(p.q, p.k, p.v, *others)
    forwards = kernel.startswith("forward")
    stats = p.stats if forwards else ()
    dense = p.relative is not None or (p.bias is not None and not has_key_bias(p))
    right = p.reach[1]
    d, e = p.q.shape[-1], p.v.shape[-1]
    m, n, bulk, how = _choose_blocks(p, kernel, readable, flags.get("THETA_GRAD", False))
    config = Config(
        F=bundle.of(p.choice),
        SCORE=bundle.of_score(p.score),
        NEED=statistics.needs(stats, p.choice, dense),
        SLOT=statistics.slots(stats),
        SPARSE=p.choice.sparse,
        LINEAR=is_linear(p),
        CAUSAL=p.interval is None and right is not None and right <= min(p.first_query, 0),
        PACKED=kernel == "forward_decode",
        RAGGED=p.interval is not None or p.row_bias is not None,
        ACC=TYPES[p.accumulator],
        PRECISION=SPLIT if p.q.dtype == torch.float32 else "ieee",
        WIDEN=p.q.dtype == torch.bfloat16 and not p.q.is_cuda,
        D=d,
        E=e,
        BD=max(32, 1 << (d - 1).bit_length()),
        BE=max(32, 1 << (e - 1).bit_length()),
        BM=m,
        BN=n,
        BULK=bulk,
        LANES=min(n, 32 if m < 64 else 8) if kernel == "forward_decode" else 8,  # few rows: warps lie along the keys
        **flags,
    )
    return config, how


def _choose_blocks(p: Problem, kernel: str, readable: bool, learns: bool = False) -> tuple[int, int, bool, dict]:
    """Return (queries, keys) per block, whether by bulk copies, and the launch options: the fastest on an H200.

    readable: bulk copies can read what the kernel reads in blocks.
    """
    width = max(p.q.shape[-1], p.v.shape[-1])
    size = sum(width > most for most in (64, 128, 256))
    simple = p.choice.family == "ratio" and p.choice.exponential
    half = p.q.is_cuda and p.q.element_size() == 2
    if not p.q.is_cuda or p.q.dtype == torch.float64:
        m, n, warps, stages, bulk = 16, 16, 4, 1, False
    elif kernel == "backward_rows":
        m, n, warps, stages, bulk = 64, 64, 4, 1, False
    elif p.q.dtype == torch.float32:
        (m, n, warps), stages, bulk = SINGLE.get(kernel, SINGLE["others"])[min(size, 2)], 1, False
    elif kernel == "forward_decode":
        m, n, warps, stages, bulk = (16, *WIDE[1:]) if size == 3 else (decode.rows_per_program(p), *DECODE[size])
    else:
        size += size > 0 and not has_large_shared_memory(p.q.device)
        m, n, warps, stages, bulk = HALF[kernel][size] if size < 3 else WIDE
        threshold, few = p.choice.family == "threshold", p.q.shape[2] <= FEW
        tables = (
            (SHORT, threshold and few),
            (LEARNING, learns),
            (POWERS, threshold and p.choice.order == 0),
            (PADDED, threshold and width & (width - 1)),
            (DOUBLE, threshold),
            (ROOMY, kernel in ROOMY and not threshold and shared_memory(p.q.device) >= ROOM),
        )
        found = (table.get(kernel, {}).get(size) for table, applies in tables if applies)
        m, n, warps, stages, bulk = next(filter(None, found), (m, n, warps, stages, bulk))
        m = min(m, 16) if kernel == "forward_threshold" and p.q.shape[2] <= 16 else m
        cuts = p.key_lengths, p.interval, p.mask, p.left, p.right
        if kernel == "backward_dkv" and size == 1 and not p.q.shape[-1] == p.v.shape[-1] == 128:
            if any(cut is not None for cut in cuts):
                warps = 8  # with 4, Triton 3.6 gives wrong dk and dv of 80 or 96 columns, causal with key lengths
        if kernel == "forward_threshold" and size == 0 and p.interval is not None:
            if p.left is p.bias is p.mask is None:
                warps = 8  # with 4, Triton 3.6 does not compile it: "operand #0 does not dominate this use"
        if bulk and not readable:
            m, n, warps, stages, bulk = PLAIN.get(kernel, (m, n, warps, stages, False))
        measured = p.stats and not simple and size < 2 and kernel.startswith("forward")
        matrix = p.bias is not None and not has_key_bias(p)
        if p.relative is not None:  # its numbers take registers, and shared memory beside the tiles
            m, n = min(m, 128 if size else 64), min(n, 64)
            matrix = matrix or size > 1 or (size == 1 and kernel == "backward_dkv")
        cut = any(x is not None for x in (p.interval, p.row_bias, p.bias, p.score))
        if kernel == "forward_online" and (p.mask is not None or (cut and p.stats)):
            n = min(n, 64)  # the loops over cut tiles take registers
        if kernel == "forward_online" and p.stats:
            m, n, warps, stages = _fit_statistics(p.q.device, size, (m, n, warps, stages))
        if kernel == "backward_dq" and threshold and not multiplies_from_shared_memory(p.q.device):
            m = min(m, 64)  # two sums, beside what the products read
        if matrix or p.dropout_p > 0.0 or measured:
            m, n, warps, stages, bulk = min(m, 64), min(n, 32), 4, min(stages, 2), False  # more registers per score
    sums = kernel == "backward_dkv" and size == 2
    if half and (sums or kernel in SCALARS) and has_tensor_memory(p.q.device):
        m, n = (m, min(n, ALONE)) if sums else (min(m, ALONE), n)
    return m, n, bulk, dict(num_warps=warps, num_stages=stages)


def _fit_statistics(device: torch.device, size: int, blocks: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return blocks whose sums of statistics fit registers beside scores from tensor memory, or what products read."""
    m, n, warps, stages = blocks
    if has_tensor_memory(device):
        return m, min(n, 64), 8 if size == 2 else warps, min(stages, 2)
    if size == 2 and not multiplies_from_shared_memory(device):
        return min(m, 32), n, 8, stages
    return blocks
