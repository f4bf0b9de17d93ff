"""Launch of the Hopper kernel: which calls it takes, its descriptors, and the second look at rows that need one."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from regard._backends.gpu import bundle
from regard._backends.gpu.attention import statistics
from regard._backends.gpu.attention.hopper import key_moments
from regard._backends.gpu.attention.limits import GLUON_TYPES, find_gluon_obstacle, find_layout_obstacle, find_option
from regard._backends.gpu.launcher import launch
from regard._core.device import sm_count
from regard._core.problem import Problem
from regard.normalizers._language import speak

ROWS = 64  # queries of one warpgroup
# (keys per tile, their pieces, warpgroups, stages of the ring, registers of their threads), by head width
TWO = {64: (128, 1, 2, 3, 240), 128: (128, 1, 2, 2, 240)}
FOUR = {64: (128, 1, 2, 4, 240)}  # stages
THREE = {64: (128, 1, 3, 3, 160)}  # warpgroups
IN_PIECES = {64: (128, 4, 3, 3, 160)}
SHORT = 6144  # keys
LARGE = 2**29  # scores
LAZY = {torch.bfloat16: 40.0, torch.float16: 8.0}  # powers of two that a weight may exceed 1 by


def supports(p: Problem) -> str | None:
    """Say why the Hopper kernel cannot take a call, or None."""
    if reason := find_gluon_obstacle(p) or _find_normalizer_obstacle(p):
        return reason
    d, e = p.q.shape[-1], p.v.shape[-1]
    if d not in TWO:
        return f"head width {d} ({' and '.join(map(str, TWO))} only)"
    if e != d:
        return f"values of width {e} beside keys of {d}"
    if p.scale <= 0:
        return "a scale that is not positive"
    if p.reach not in ((None, None), (None, 0)):
        return "a window"
    if reason := find_option(p, "softcap", "bias", "mask", "key_lengths"):
        return reason
    if p.first_query:
        return "a part of a sequence"
    if p.q.shape[-2] < ROWS:
        return f"{p.q.shape[-2]} queries ({ROWS} at least)"
    return find_layout_obstacle(p.q, p.k, p.v)


def _find_normalizer_obstacle(p: Problem) -> str | None:
    if p.choice.family == "ratio" and p.choice.exponential:
        return None
    if p.stats:
        return f"statistics of {p.choice.spec} (softmax and softmax1 only)"
    if p.choice.family == "pointwise" and p.choice.log_odds is not None:
        if speak(p.choice.log_odds)(0.0, p.choice.theta or 0.0) > 30.0:  # shared reciprocals: no weight below 2⁻⁶³
            return f"normaliser {p.choice.spec}, whose weights may all be below 2⁻⁶³"
    if p.choice.family == "ratio" and p.choice.shift == "none" and p.q.dtype == torch.float16:
        return f"normaliser {p.choice.spec} in float16, which may overflow"
    return None


def forward(p: Problem, o, shift, z, options, kind) -> torch.Tensor | None:
    """Fill o, shift and z; return the sums that statistics are finished from, if any are wanted.

    With a fixed shift, z is NaN in rows that overflowed.
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
    return rough


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
        STILL=has_fixed_shift(p),
        ACC=tl.float32,
    )


def has_fixed_shift(p: Problem) -> bool:
    """True if the shift stays where the first tile sets it, so that later tiles need no maximum.

    Rows whose weights outgrow it are recomputed, which costs a launch even if there are none. Not with statistics: they
    need the maximum all the same, and are asked of models whose rows may be sharp.
    """
    batch, heads, queries, _ = p.q.shape
    shifted = p.choice.family == "ratio" and p.choice.shift != "none" and p.q.dtype == torch.bfloat16
    return shifted and not p.stats and batch * heads * queries * p.k.shape[-2] >= LARGE


def programs_of(p: Problem, rows: int) -> tuple[int, int]:
    """(blocks of queries, programs): one for each, or one for each multiprocessor, which fetches ahead.

    The latter where rows are short, the programs' shares nearly equal and registers left.
    """
    blocks = triton.cdiv(p.q.shape[-2], rows)
    heads, behind = p.q.shape[0] * p.q.shape[1], p.reach[1] is not None
    places, shares = sm_count(p.q.device), heads * blocks // 2 if behind else heads * blocks
    even = shares >= 4 * places and triton.cdiv(shares, places) * places <= 1.04 * shares
    crowded = rows > 2 * ROWS and not behind and not (has_fixed_shift(p) or bundle.of(p.choice).exponential)
    if p.k.shape[-2] > SHORT or (behind and heads % 2) or not even or crowded:
        places = heads * blocks
    return heads * blocks, places


def blocks_of(p: Problem) -> tuple[int, int, int, int, int]:
    """What was fastest on an H200."""
    F = bundle.of(p.choice)
    table = FOUR if p.stats else TWO
    if not p.stats and F.family == "ratio" and F.exponential and not has_fixed_shift(p):
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
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, GLUON_TYPES[dtype]))
