"""Launch of `forward_hopper`: the calls it takes, its tiles, grid and tensor descriptors."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from regard._backends.gpu import bundle
from regard._backends.gpu.attention import statistics
from regard._backends.gpu.attention.config import has_key_bias
from regard._backends.gpu.attention.hopper.biases import COLUMNS, make_key_bias, make_relative_bias
from regard._backends.gpu.attention.hopper.spans import Spans, needs_spans
from regard._backends.gpu.attention.limits import (
    GLUON_TYPES,
    find_gluon_obstacle,
    find_layout_obstacle,
    find_option,
)
from regard._backends.gpu.attention.tiles import Options
from regard._backends.gpu.launcher import launch
from regard._call.problem import MARKS, Problem
from regard._facts import sm_count
from regard.normalizers._language import speak

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from regard._backends.gpu.attention.hopper.ring import ForwardConfig

ROWS = 64  # queries of one warpgroup
PRODUCER_REGISTERS = 24  # of a thread of the producer warp, as in `forward_hopper`
# (keys per tile, splits, warpgroups, stages of the ring, registers of a consumer's thread) by head width
TWO_GROUPS = {64: (128, 1, 2, 3, 240), 128: (128, 1, 2, 2, 240)}
# Rows of few keys: two programs per SM, of one warpgroup each. The code of several warpgroups overflows the instruction
# cache, which shows where a block has few tiles; and one program computes while the other stores.
ONE_GROUP = {64: (128, 1, 1, 3, 232), 128: (64, 1, 1, 2, 232)}
FOUR_STAGES = {64: (128, 1, 2, 4, 240)}
THREE_GROUPS = {64: (128, 1, 3, 3, 160)}
SPLIT_TILES = {64: (128, 4, 3, 3, 160)}
MAX_PERSISTENT_KEYS = 6144
MAX_EARLY_KEYS = 2047  # from 2048 on, computing the next block's scores early gains nothing
MIN_FIXED_SHIFT_SCORES = 2**29
SHORT_ROWS = {64: 2048, 128: 1024}  # most keys for ONE_GROUP, by head width: with statistics,
SHORT_PLAIN_ROWS = {64: 1024, 128: 1024}  # and without
MAX_WASTE = 1.2  # rows of three warpgroups' blocks over those of two, beyond which two are faster
SHARED_MEMORY = 224 * 1024  # for the tiles of one program
LARGEST_CAP = 1e4
WIDTHS = (64, 128, 256)  # columns of v in shared memory
SLACK = {torch.bfloat16: 40.0, torch.float16: 8.0}  # log2 of the largest weight u


class Panels(NamedTuple):
    """How the columns of a head lie in shared memory; names as in `ForwardConfig`."""

    PANEL: int
    PANELS: int
    LAST: int
    E: int
    O_PANELS: int


def supports(p: Problem) -> str | None:
    """Say why the Hopper kernel cannot take a call, or None; `regard.attention_path` prints it.

    `registry.py` adds that few scores are better off elsewhere.
    """
    if reason := find_gluon_obstacle(p) or _find_normalizer_obstacle(p):
        return reason
    d, e = p.q.shape[-1], p.v.shape[-1]
    if d % 8 or e % 8 or max(d, e) > WIDTHS[-1]:
        return f"head widths {d} and {e} (multiples of 8 up to {WIDTHS[-1]} only)"
    if triton.cdiv(e, WIDTHS[0]) > triton.cdiv(d, WIDTHS[0]):
        return f"values of width {e}, wider than keys of {d}"
    if p.scale <= 0:
        return "a scale that is not positive"
    if reason := find_option(p, "score", "mask", "row_bias", "theta") or _find_bias_obstacle(p):
        return reason
    if p.softcap is not None and p.softcap > LARGEST_CAP:
        return f"a soft cap above {LARGEST_CAP:g}"  # c − 2c/(1 + exp(2s/c)) rounds by the size of c
    if p.first_query:
        return "a part of a sequence"
    if p.q.shape[-2] < ROWS:
        return f"{p.q.shape[-2]} queries ({ROWS} at least)"
    return find_layout_obstacle(p.q, p.k, p.v)


def _find_bias_obstacle(p: Problem) -> str | None:
    """Say why the kernel cannot take the call's bias: of softmax and softmax1 it takes one per key or by position."""
    if p.bias is p.relative is None:
        return None
    if p.bias is not None and (p.relative is not None or not has_key_bias(p)):
        return MARKS["bias"].words
    if p.softcap is not None or not (p.choice.family == "ratio" and p.choice.exponential):
        return "a bias (softmax and softmax1 without a soft cap only)"
    if p.bias is not None and p.q.dtype != torch.bfloat16:
        return "a bias per key (bfloat16 only)"
    return None


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


def forward(
    p: Problem,
    o: torch.Tensor,
    shift: torch.Tensor,
    z: torch.Tensor,
    spans: Spans | None,
    options: Options,
    kind: Hashable,
) -> torch.Tensor | None:
    """Fills o, shift and z; returns the raw sums that statistics are finished from, if any are wanted.

    With a fixed shift, z is NaN in rows that overflowed.
    """
    from regard._backends.gpu.attention.hopper.forward import forward_hopper

    C = make_config(p)
    if C.INTERVAL:
        options = options._replace(left=None, right=None, lengths=None)
    blocks, programs = plan_programs(p, C.BM)
    k, v = p.k, p.v
    if C.CAUSAL and k.shape[-2] > p.q.shape[-2]:  # hidden keys may hold NaN: they are not read
        k, v = k[:, :, : p.q.shape[-2]], v[:, :, : p.q.shape[-2]]
    raw_sums = torch.empty(8, *shift.shape, dtype=torch.float32, device=o.device) if p.stats else None
    descriptors = (
        describe_rows(p.q, ROWS, C.PANEL),
        describe_rows(k, C.BN, C.PANEL),
        describe_rows(v, C.BN, C.E),
        describe_rows(o, ROWS, C.PANEL),
    )
    bias, bias_blocks = None, None
    if C.KEY_BIAS:
        bias, columns = make_key_bias(p, options)
        bias_blocks = describe_rows(columns, C.BN)
    if C.RELATIVE:
        bias = make_relative_bias(p, options)
    arguments = *descriptors, bias_blocks, shift, z, raw_sums, spans, bias, options, blocks
    # two programs share an SM: their threads start with equal shares, of which the producer's leave all but a few
    how = dict(maxnreg=(C.REGISTERS + PRODUCER_REGISTERS) // 2) if C.WARPGROUPS == 1 else {}
    launch(kind, forward_hopper, programs, arguments, (C,), num_warps=4, **how)
    return raw_sums


def make_config(p: Problem) -> ForwardConfig:
    """The constants that `forward_hopper` is compiled with for this call."""
    from regard._backends.gpu.attention.hopper.ring import ForwardConfig

    causal, panels = is_causal(p), choose_panels(p.q.shape[-1], p.v.shape[-1])
    keys, splits, groups, stages, registers = choose_tiles(p)
    need = statistics.needs(p.stats, p.choice, False)
    blocks, programs = plan_programs(p, ROWS * groups)
    diagonal_first = need.distance and not causal and keys % (ROWS * groups) == 0 and not needs_spans(p)
    return ForwardConfig(
        F=bundle.of(p.choice),
        NEED=need,
        CAUSAL=causal,
        INTERVAL=needs_spans(p),
        KEY_BIAS=p.bias is not None,
        RELATIVE=p.relative is not None,
        **panels._asdict(),
        BM=ROWS * groups,
        BN=keys,
        WARPGROUPS=groups,
        STAGES=stages,
        REGISTERS=registers,
        SPLITS=splits,
        DIAGONAL_FIRST=diagonal_first,
        RAGGED=diagonal_first and (p.k.shape[-2] % keys != 0 or p.key_lengths is not None),
        PERSISTENT=programs < blocks,
        EARLY=programs < blocks and may_see_few_keys(p),
        SLACK=SLACK[p.q.dtype],
        FIXED_SHIFT=has_fixed_shift(p),
        ACC=tl.float32,
    )


def is_causal(p: Problem) -> bool:
    """True if every query sees the keys up to its own, or a window of them."""
    return p.reach[1] is not None and not needs_spans(p)


def may_see_few_keys(p: Problem) -> bool:
    """True for short rows and narrow windows, and for intervals, because their lengths may not be known here."""
    return p.span <= MAX_EARLY_KEYS or p.interval is not None


def has_fixed_shift(p: Problem) -> bool:
    """True if the shift stays where the first tile sets it, so that later tiles need no maximum.

    Rows whose weights outgrow it are recomputed, which costs a launch even if there are none. Not with statistics: they
    need the maximum all the same, and are asked of models whose rows may be sharp. Nor with intervals, of which a row
    may see no key in its first tile.
    """
    batch, heads, queries, _ = p.q.shape
    shifted = p.choice.family == "ratio" and p.choice.shift != "none" and p.q.dtype == torch.bfloat16
    shifted = shifted and not p.stats and p.bias is p.relative is None and not needs_spans(p)
    return shifted and batch * heads * queries * p.k.shape[-2] >= MIN_FIXED_SHIFT_SCORES


def plan_programs(p: Problem, rows: int) -> tuple[int, int]:
    """(blocks of queries, programs): one program per block, or as many as the GPU runs at once, which take many blocks.

    The latter if rows are short, the programs' work is nearly equal and registers are left.
    """
    blocks = triton.cdiv(p.q.shape[-2], rows)
    heads, causal = p.q.shape[0] * p.q.shape[1], is_causal(p)
    programs, units = sm_count(p.q.device), heads * blocks // 2 if causal else heads * blocks
    if rows == ROWS:  # ONE_GROUP
        programs *= 2
    even = units >= 4 * programs and triton.cdiv(units, programs) * programs <= 1.04 * units
    short_of_registers = rows > 2 * ROWS and not causal and not (has_fixed_shift(p) or bundle.of(p.choice).exponential)
    if needs_spans(p):  # rows of documents are short however many keys there are
        programs = min(programs, heads * blocks)
    elif p.k.shape[-2] > MAX_PERSISTENT_KEYS or (causal and heads % 2) or not even or short_of_registers:
        programs = heads * blocks
    keys, _, _, stages, _ = choose_tiles(p)
    if shared_bytes(p, keys, stages, 2 * rows) > SHARED_MEMORY:  # two blocks of queries do not fit
        programs = heads * blocks
    return heads * blocks, programs


def choose_tiles(p: Problem) -> tuple[int, int, int, int, int]:
    """(keys per tile, splits, warpgroups, stages, registers): the fastest on an H200."""
    F, panels = bundle.of(p.choice), choose_panels(p.q.shape[-1], p.v.shape[-1])
    columns = panels.PANEL * panels.PANELS
    if columns != panels.E or columns not in TWO_GROUPS:
        fitting = [
            (keys, 1, 2, stages, 240)
            for keys in ((128, 64) if panels.E <= 128 else (64,))
            for stages in (3, 2)
            if shared_bytes(p, keys, stages, 2 * ROWS) <= SHARED_MEMORY
        ]
        return fitting[0]
    table = FOUR_STAGES if p.stats else TWO_GROUPS
    options = p.softcap, p.bias, p.relative, p.reach[0], p.key_lengths
    takes_registers = any(option is not None for option in options) or needs_spans(p)
    if p.k.shape[-2] <= (SHORT_ROWS if p.stats else SHORT_PLAIN_ROWS)[columns] and p.bias is p.relative is None:
        return ONE_GROUP[columns]
    if takes_registers or wastes_rows(p.q.shape[-2]):
        return table.get(columns, TWO_GROUPS[columns])
    if not p.stats and F.family == "ratio" and F.exponential and not has_fixed_shift(p):
        table = SPLIT_TILES
    elif not p.stats and (F.log_odds is not None or F.signed is not None or F.exponential):
        table = THREE_GROUPS
    return table.get(columns, TWO_GROUPS[columns])


def wastes_rows(queries: int) -> bool:
    """True if blocks of three warpgroups would compute many more rows than blocks of two."""
    three, two = (triton.cdiv(queries, groups * ROWS) * groups for groups in (3, 2))
    return three > MAX_WASTE * two


@cache
def choose_panels(d: int, e: int) -> Panels:
    """Panels of heads of width d and values of width e: one buffer if they fill it, otherwise 64 columns each."""
    width = next(width for width in WIDTHS if width >= e)
    if d == e == width:
        return Panels(width, 1, width, width, 1)
    panel = WIDTHS[0]
    panels = triton.cdiv(d, panel)
    last = max(16, triton.next_power_of_2(d - (panels - 1) * panel))
    return Panels(panel, panels, last, width, triton.cdiv(e, panel))


def shared_bytes(p: Problem, keys: int, stages: int, queries: int) -> int:
    """Shared memory that the tiles of one program take."""
    panels = choose_panels(p.q.shape[-1], p.v.shape[-1])
    columns = panels.PANEL * panels.PANELS
    beside = 0 if p.bias is None else COLUMNS
    return p.q.element_size() * (queries * columns + ROWS * beside + stages * keys * (columns + panels.E + beside))


def describe_rows(x: torch.Tensor, rows: int, width: int | None = None) -> TensorDescriptor:
    """Tensor descriptor of x in blocks of `rows` rows and `width` columns, by default all; more are loaded as zeros."""
    return make_descriptor(x, (1, 1, rows, x.shape[-1] if width is None else width))


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
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, GLUON_TYPES[dtype]))
