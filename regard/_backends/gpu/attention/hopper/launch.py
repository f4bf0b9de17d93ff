"""Launch of the Hopper kernel: which calls it takes, its descriptors, and the second look at rows that need one."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from regard._backends.gpu import bundle
from regard._backends.gpu.attention import statistics
from regard._backends.gpu.attention.config import reachable
from regard._backends.gpu.attention.hopper import key_moments
from regard._backends.gpu.launcher import launch
from regard._core.device import sm_count, supports_gluon
from regard._core.problem import Problem
from regard.normalizers._language import speak

ROWS = 64  # queries of one warpgroup
KINDS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
# (keys per tile, their pieces, warpgroups, stages of the ring, registers of their threads), by head width
TWO = {64: (128, 1, 2, 3, 240), 128: (128, 1, 2, 2, 240)}
FOUR = {64: (128, 1, 2, 4, 240)}  # stages
THREE = {64: (128, 1, 3, 3, 160)}  # warpgroups
IN_PIECES = {64: (128, 4, 3, 3, 160)}
SHORT = 6144  # keys
LARGE = 2**29  # scores
LAZY = {torch.bfloat16: 40.0, torch.float16: 8.0}  # powers of two that a weight may exceed 1 by


def takes(p: Problem) -> bool:
    """Does this call run on the Hopper kernel?"""
    left, right = p.reach
    return (
        p.q.is_cuda
        and p.q.dtype in KINDS
        and p.q.shape[-1] in TWO
        and p.v.shape[-1] == p.q.shape[-1]
        and suits(p)
        and p.scale > 0
        and left is None
        and right in (None, 0)
        and all(x is None for x in (p.softcap, p.bias, p.mask, p.key_lengths))
        and p.dropout_p == 0.0
        and p.first_query == 0
        and p.q.shape[-2] >= ROWS
        and supports_gluon(p.q.device)
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


def forward(p: Problem, o, shift, z, options, kind, statistics_of) -> None:
    """Fill o, shift and z. `statistics_of(rough)` makes statistics of the sums that `rough` holds.

    Where the shift is `still`, z is NaN in rows that are to be done again.
    """
    from regard._backends.gpu.attention.hopper.forward import forward_hopper

    C = shape_of(p)
    blocks, programs = programs_of(p, C.BM)
    k, v = p.k, p.v
    if C.BEHIND and k.shape[-2] > p.q.shape[-2]:  # what no query sees may hold NaN: it is not read
        k, v = k[:, :, : p.q.shape[-2]], v[:, :, : p.q.shape[-2]]
    rough = torch.empty(9, *shift.shape, dtype=torch.float32, device=o.device) if p.stats else None
    blocked = described(p.q, ROWS), described(k, C.BN), described(v, C.BN), described(o, ROWS)
    forms, form_blocks = None, None
    if C.SPAN != 0:
        forms = key_moments.forms_of(p, C.SPAN)
        form_blocks = described(forms.products, C.BN)
    arguments = *blocked, form_blocks, shift, z, rough, forms, options, blocks
    launch(kind, forward_hopper, programs, arguments, (C,), num_warps=4)
    if p.stats:
        statistics_of(rough)


def shape_of(p: Problem):
    from regard._backends.gpu.attention.hopper.ring import Shape

    d, behind = p.q.shape[-1], p.reach[1] is not None
    keys, pieces, parts, stages, registers = blocks_of(p)
    need = statistics.needs(p.stats, p.choice, False)
    span = key_moments.span_of(p) if need.moments else 0
    blocks, programs = programs_of(p, ROWS * parts)
    own = need.distance and not behind and parts == 2 and p.k.shape[-2] % keys == 0
    return Shape(
        F=bundle.of(p.choice),
        NEED=need,
        BEHIND=behind,
        D=d,
        BM=ROWS * parts,
        BN=keys,
        PARTS=parts,
        STAGES=stages,
        REGISTERS=registers,
        PIECES=pieces,
        OWN=own,
        AHEAD=programs < blocks,
        FORMS=triton.cdiv(3 * d, keys) if span else 0,
        SPAN=span,
        LAZY=LAZY[p.q.dtype],
        STILL=still(p),
        ACC=tl.float32,
    )


def still(p: Problem) -> bool:
    """Does the shift stay where the first tile sets it? Then tiles need no maximum.

    Rows whose weights outgrow that are done again, which costs a launch even if there are none. Not with statistics:
    they want the maximum all the same, and are asked of models whose rows may be sharp.
    """
    batch, heads, queries, _ = p.q.shape
    framed = p.choice.family == "ratio" and p.choice.shift != "none" and p.q.dtype == torch.bfloat16
    return framed and not p.stats and batch * heads * queries * p.k.shape[-2] >= LARGE


def programs_of(p: Problem, rows: int) -> tuple[int, int]:
    """(blocks of queries, programs): one for each, or one for each multiprocessor, which fetches ahead.

    The latter where rows are short, the programs' shares nearly equal and registers left.
    """
    blocks = triton.cdiv(p.q.shape[-2], rows)
    heads, behind = p.q.shape[0] * p.q.shape[1], p.reach[1] is not None
    places, shares = sm_count(p.q.device), heads * blocks // 2 if behind else heads * blocks
    even = shares >= 4 * places and triton.cdiv(shares, places) * places <= 1.04 * shares
    crowded = rows > 2 * ROWS and not behind and not (still(p) or bundle.of(p.choice).exponential)
    if p.k.shape[-2] > SHORT or (behind and heads % 2) or not even or crowded:
        places = heads * blocks
    return heads * blocks, places


def blocks_of(p: Problem) -> tuple[int, int, int, int, int]:
    """What was fastest on an H200."""
    F = bundle.of(p.choice)
    table = FOUR if p.stats else TWO
    if not p.stats and F.family == "ratio" and F.exponential and not still(p):
        table = IN_PIECES
    elif not p.stats and (F.log_odds is not None or F.signed is not None or F.exponential):
        table = THREE
    return table.get(p.q.shape[-1], TWO[p.q.shape[-1]])


def described(x: torch.Tensor, rows: int):
    """Blocks [rows, D] of x for the bulk copy engine, laid out in shared memory as the tensor cores read them."""
    return descriptor(x, (1, 1, rows, x.shape[-1]))


def descriptor(x: torch.Tensor, block: tuple[int, ...]):
    """Blocks of any shape; float32 ones, which no product reads, as they lie in memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout_of(block, x.dtype))


@cache
def layout_of(block: tuple[int, ...], dtype: torch.dtype):
    from triton.experimental.gluon import language as gl

    if dtype == torch.float32:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, KINDS[dtype]))
