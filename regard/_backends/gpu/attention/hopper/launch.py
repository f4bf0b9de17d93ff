"""Launch of `forward_hopper`: the calls it takes, its tiles, grid and tensor descriptors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from regard._backends.gpu import bundle
from regard._backends.gpu.attention import statistics
from regard._backends.gpu.attention.config import reachable
from regard._backends.gpu.attention.hopper import key_moments
from regard._backends.gpu.attention.tiles import Options
from regard._backends.gpu.launcher import launch
from regard._core.problem import Problem
from regard.normalizers._language import speak

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from regard._backends.gpu.attention.hopper.ring import ForwardConfig

ROWS = 64  # queries of one warpgroup
KINDS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
# (keys per tile, splits, warpgroups, stages of the ring, registers of a consumer's thread) by head width
TWO_GROUPS = {64: (128, 1, 2, 3, 240), 128: (128, 1, 2, 2, 240)}
FOUR_STAGES = {64: (128, 1, 2, 4, 240)}
THREE_GROUPS = {64: (128, 1, 3, 3, 160)}
SPLIT_TILES = {64: (128, 4, 3, 3, 160)}
MAX_PERSISTENT_KEYS = 6144
MIN_FIXED_SHIFT_SCORES = 2**29
SLACK = {torch.bfloat16: 40.0, torch.float16: 8.0}  # log2 of the largest weight u


def takes(p: Problem) -> bool:
    """Does this call run on the Hopper kernel?"""
    left, right = p.reach
    return (
        p.q.is_cuda
        and p.q.dtype in KINDS
        and p.q.shape[-1] in TWO_GROUPS
        and p.v.shape[-1] == p.q.shape[-1]
        and suits(p)
        and p.scale > 0
        and left is None
        and right in (None, 0)
        and all(x is None for x in (p.softcap, p.bias, p.mask, p.key_lengths))
        and p.dropout_p == 0.0
        and p.first_query == 0
        and p.q.shape[-2] >= ROWS
        and capable(p.q.device)
        and all(map(reachable, (p.q, p.k, p.v)))
    )


def suits(p: Problem) -> bool:
    """Statistics of exp(s − m) maps; the others without. Unshifted maps may exceed what float16 holds.

    Shared reciprocals give no weight below 2⁻⁶³: maps that may have no larger ones are left to others.
    """
    if p.choice.family == "ratio" and p.choice.exponential:
        return True
    if p.choice.family == "threshold":
        return False
    if p.choice.family == "pointwise" and p.choice.log_odds is not None:
        if speak(p.choice.log_odds)(0.0, p.choice.theta or 0.0) > 30.0:
            return False
    bounded = p.choice.family == "pointwise" or p.choice.shift != "none"
    return not p.stats and (bounded or p.q.dtype == torch.bfloat16)


@cache
def capable(device: torch.device) -> bool:
    """Hopper itself (no other chip has its warpgroups), and a Triton whose Gluon was tried."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if torch.version.hip is not None:  # ROCm calls some of its chips 9.0 too
        return False
    return torch.cuda.get_device_capability(device) == (9, 0) and version >= (3, 6)


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def forward(
    p: Problem,
    o: torch.Tensor,
    shift: torch.Tensor,
    z: torch.Tensor,
    options: Options,
    kind: Hashable,
    finish: Callable[[torch.Tensor], None],
) -> None:
    """Fills o, shift and z, and calls `finish` on the raw sums if statistics are asked for.

    With a fixed shift, z is NaN in rows that overflowed.
    """
    from regard._backends.gpu.attention.hopper.forward import forward_hopper

    C = make_config(p)
    blocks, programs = plan_programs(p, C.BM)
    k, v = p.k, p.v
    if C.CAUSAL and k.shape[-2] > p.q.shape[-2]:  # hidden keys may hold NaN: they are not read
        k, v = k[:, :, : p.q.shape[-2]], v[:, :, : p.q.shape[-2]]
    raw_sums = torch.empty(9, *shift.shape, dtype=torch.float32, device=o.device) if p.stats else None
    descriptors = describe_rows(p.q, ROWS), describe_rows(k, C.BN), describe_rows(v, C.BN), describe_rows(o, ROWS)
    moments, moment_blocks = None, None
    if C.MOMENT_SPAN != 0:
        moments = key_moments.compute_key_moments(p, C.MOMENT_SPAN)
        moment_blocks = describe_rows(moments.products, C.BN)
    arguments = *descriptors, moment_blocks, shift, z, raw_sums, moments, options, blocks
    launch(kind, forward_hopper, programs, arguments, (C,), num_warps=4)
    if p.stats:
        finish(raw_sums)


def make_config(p: Problem) -> ForwardConfig:
    """The constants that `forward_hopper` is compiled with for this call."""
    from regard._backends.gpu.attention.hopper.ring import ForwardConfig

    d, causal = p.q.shape[-1], p.reach[1] is not None
    keys, splits, groups, stages, registers = choose_tiles(p)
    need = statistics.needs(p.stats, p.choice, False)
    span = key_moments.moment_span(p) if need.moments else 0
    blocks, programs = plan_programs(p, ROWS * groups)
    diagonal_first = need.distance and not causal and groups == 2 and p.k.shape[-2] % keys == 0
    return ForwardConfig(
        F=bundle.of(p.choice),
        NEED=need,
        CAUSAL=causal,
        D=d,
        BM=ROWS * groups,
        BN=keys,
        WARPGROUPS=groups,
        STAGES=stages,
        REGISTERS=registers,
        SPLITS=splits,
        DIAGONAL_FIRST=diagonal_first,
        PERSISTENT=programs < blocks,
        MOMENT_TILES=triton.cdiv(3 * d, keys) if span else 0,
        MOMENT_SPAN=span,
        SLACK=SLACK[p.q.dtype],
        FIXED_SHIFT=still(p),
        ACC=tl.float32,
    )


def still(p: Problem) -> bool:
    """Does the shift stay where the first tile sets it? Then tiles need no maximum.

    Rows whose weights outgrow that are done again, which costs a launch even if there are none. Not with statistics:
    they want the maximum all the same, and are asked of models whose rows may be sharp.
    """
    batch, heads, queries, _ = p.q.shape
    framed = p.choice.family == "ratio" and p.choice.shift != "none" and p.q.dtype == torch.bfloat16
    return framed and not p.stats and batch * heads * queries * p.k.shape[-2] >= MIN_FIXED_SHIFT_SCORES


def plan_programs(p: Problem, rows: int) -> tuple[int, int]:
    """(blocks of queries, programs): one program per block, or one per SM that takes many blocks.

    The latter if rows are short, the programs' work is nearly equal and registers are left.
    """
    blocks = triton.cdiv(p.q.shape[-2], rows)
    heads, causal = p.q.shape[0] * p.q.shape[1], p.reach[1] is not None
    programs, units = processors(p.q.device), heads * blocks // 2 if causal else heads * blocks
    even = units >= 4 * programs and triton.cdiv(units, programs) * programs <= 1.04 * units
    short_of_registers = rows > 2 * ROWS and not causal and not (still(p) or bundle.of(p.choice).exponential)
    if p.k.shape[-2] > MAX_PERSISTENT_KEYS or (causal and heads % 2) or not even or short_of_registers:
        programs = heads * blocks
    return heads * blocks, programs


def choose_tiles(p: Problem) -> tuple[int, int, int, int, int]:
    """(keys per tile, splits, warpgroups, stages, registers): the fastest on an H200."""
    F = bundle.of(p.choice)
    table = FOUR_STAGES if p.stats else TWO_GROUPS
    if not p.stats and F.family == "ratio" and F.exponential and not still(p):
        table = SPLIT_TILES
    elif not p.stats and (F.log_odds is not None or F.signed is not None or F.exponential):
        table = THREE_GROUPS
    return table.get(p.q.shape[-1], TWO_GROUPS[p.q.shape[-1]])


def describe_rows(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Tensor descriptor of x in blocks of `rows` whole rows."""
    return make_descriptor(x, (1, 1, rows, x.shape[-1]))


def make_descriptor(x: torch.Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """Tensor descriptor of x in blocks of the given shape."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), shared_layout(block, x.dtype))


@cache
def shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Shared-memory layout of a block: swizzled for the tensor cores, linear for float32."""
    from triton.experimental.gluon import language as gl

    if dtype == torch.float32:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, KINDS[dtype]))
