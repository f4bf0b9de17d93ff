"""Host side of the forward kernels: each `run_*` fills o, row state and statistics of one call."""

from __future__ import annotations

import torch
import triton

from regard._backends.gpu import bundle
from regard._backends.gpu.attention.config import config_of, count_blocks, describe_keys, has_key_bias, options, view
from regard._backends.gpu.attention.forward import decode
from regard._backends.gpu.attention.forward.online import forward_online
from regard._backends.gpu.attention.hopper import launch as hopper
from regard._backends.gpu.attention.hopper.second_pass import (
    ROWS,
    forward_imprecise,
    forward_overflow,
    forward_statistics,
)
from regard._backends.gpu.attention.hopper.spans import find_spans, needs_spans
from regard._backends.gpu.attention.masks.dense import PackedMask, add_tile_map
from regard._backends.gpu.attention.masks.tables import add_key_index
from regard._backends.gpu.attention.sparse import launch as sparse
from regard._backends.gpu.attention.threshold import forward_threshold
from regard._backends.gpu.attention.tiles import Config, Options
from regard._backends.gpu.launcher import launch, launch_key
from regard._call.problem import Forward, Problem

# The threshold solver by dtype: most steps; for powers of t what keys that cross the threshold in the last step may add
# to |Σp − 1|; for g = t |Σp − 1| before the last step. Statistics are float32 and take its bounds.
SOLVER = {
    torch.float64: (64, 1e-14, 1e-9),
    torch.float32: (40, 1e-6, 3e-6),
    torch.float16: (40, 3e-3, 1e-4),
    torch.bfloat16: (40, 3e-3, 1e-4),
}
RESIDENT_KEYS = 256  # most keys of a row whose scores stay in registers


def run_decode(p: Problem, result: Forward) -> None:
    """Fill `result` of few queries over many keys."""
    config, how = config_of(p, "forward_decode")
    inputs, outputs = (view(p.q), view(p.k), view(p.v)), (view(result.o), result.shift, result.z, result.stats)
    decode.forward(p, inputs, describe_keys(p, config), outputs, options(p), config, how)


def run_hopper(p: Problem, result: Forward) -> None:
    """Fill `result` by the Gluon kernel, then recompute the rows that overflowed or lost precision."""
    opt, key = add_key_index(p, options(p)), launch_key(p, result.o)
    spans = find_spans(p, opt) if needs_spans(p) else None
    sums = hopper.forward(p, result.o, result.shift, result.z, spans, opt, key)
    if p.stats:
        finish_statistics(p, sums, result.stats, opt, key, spans)
    if hopper.has_fixed_shift(p) or p.bias is not None or p.relative is not None:
        recompute_overflow(p, result, opt, key)


def recompute_overflow(p: Problem, result: Forward, opt: Options, key) -> None:
    """Recompute the rows whose weights outgrew the fixed shift, and heads whose bias is not finite; their Z is NaN."""
    config, how = config_of(p, "forward_online" if p.bias is p.relative is None else "forward_imprecise")
    blocks_per_program = 4
    programs = triton.cdiv(count_blocks(p, config), blocks_per_program)
    outputs = view(result.o), result.shift, result.z, result.stats, result.z.numel()
    arguments = view(p.q), view(p.k), view(p.v), *describe_keys(p, config), *outputs, opt
    launch(key, forward_overflow, programs, arguments, (config, blocks_per_program), **how)


def finish_statistics(p: Problem, sums: torch.Tensor, stats: torch.Tensor, opt: Options, key, spans=None) -> None:
    """Turn the Gluon kernel's sums into statistics and recompute the imprecise rows."""
    config, how = config_of(p, "forward_imprecise")
    rows, blocks_per_program = p.q.shape[:-1].numel(), 8
    linear = config._replace(LINEAR=p.softcap is None)  # the kernel's sums have a bias per key among the products
    launch(
        key, forward_statistics, triton.cdiv(rows, ROWS), (sums, stats, rows, spans, opt), (linear, ROWS, config.LINEAR)
    )
    if not (config.NEED.shares or config.NEED.moments):
        return
    programs = triton.cdiv(count_blocks(p, config), blocks_per_program)
    arguments = view(p.q), view(p.k), view(p.v), *describe_keys(p, config), sums, stats, rows, opt
    launch(key, forward_imprecise, programs, arguments, (config, blocks_per_program), **how)


def run_threshold(p: Problem, result: Forward, packed: PackedMask | None = None, with_lists: bool = False) -> None:
    """Fill `result` of a threshold map by sweeps over the keys, or of those rows alone whose lists of keys failed."""
    config, how = config_of(p, "forward_threshold")
    resident = not with_lists and packed is None and keeps_scores(p)
    if resident:
        config, how = choose_resident_blocks(p, config)
    opt, key = add_tile_map(p, config, add_key_index(p, options(p)), packed=packed), launch_key(p, result.o)
    steps, power, other = SOLVER[p.accumulator if p.stats else p.q.dtype]
    inputs, outputs = (view(p.q), view(p.k), view(p.v)), (view(result.o), result.shift, result.z, result.stats)
    failed = sparse.forward(p, key, inputs, *outputs, opt, config, steps) if with_lists else None
    arguments = *inputs, *describe_keys(p, config), *outputs, failed, opt
    constants = config, steps, other if p.choice.order == 1 else power, resident
    launch(key, forward_threshold, count_blocks(p, config), arguments, constants, **how)


def keeps_scores(p: Problem) -> bool:
    """True if a block of queries keeps the scores of all keys in registers, so that q·k is computed once."""
    most = RESIDENT_KEYS // 2 if p.stats else RESIDENT_KEYS  # statistics take registers
    if not p.q.is_cuda or p.q.element_size() > 2 or p.k.shape[-2] > most:
        return False
    matrix = p.mask is not None or p.relative is not None or (p.bias is not None and not has_key_bias(p))
    powers = bundle.of(p.choice).order != 0 or bundle.of(p.choice).is_power
    return powers and not matrix and p.score is None and not p.dropout_p and max(p.q.shape[-1], p.v.shape[-1]) <= 128


def choose_resident_blocks(p: Problem, config: Config) -> tuple[Config, dict]:
    """Return the constants and launch options of a kernel that keeps all scores."""
    rows, warps = (64, 4) if max(p.q.shape[-1], p.v.shape[-1]) <= 64 else (128, 8)
    keys = max(64, triton.next_power_of_2(p.k.shape[-2]))
    return config._replace(BM=rows, BN=keys, BULK=False), dict(num_warps=warps, num_stages=1)


def run_online(p: Problem, result: Forward, packed: PackedMask | None = None) -> None:
    """Fill `result` of a ratio or pointwise map in one sweep over the keys."""
    config, how = config_of(p, "forward_online")
    outputs = view(result.o), result.shift, result.z, result.stats
    opt = add_tile_map(p, config, add_key_index(p, options(p)), packed=packed)
    arguments = view(p.q), view(p.k), view(p.v), *describe_keys(p, config), *outputs, opt
    launch(launch_key(p, result.o), forward_online, count_blocks(p, config), arguments, (config,), **how)
