"""Updates readings on the GPU with one launch per call, of one layer or of several, without waiting for the host.

Each sum of a layer belongs to one program of `update_kernel`, so that equal inputs give equal bits:

    summarize           one per statistic and head: count, mean, Σ(x − mean)², extremes, histogram
    add_to_curve        one per curve, head and bin of positions
    compute_features    one per feature and head: the feature on sampled rows, whose products over heads follow

They add to a `LayerReading` what `LayerReading.update` adds on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard import statistics
from regard._backends.gpu.launcher import launch, on_device_of, tensor_key
from regard.health.measure.histogram import BINS, KNEE, LAYOUT, NAMES, SHARE_SLOPE
from regard.health.measure.layer_reading import (
    COMPARED,
    CURVES,
    LEAST_KEYS,
    POSITIONS,
    LayerReading,
    first_position,
    parts_of,
    position_bin,
)

KEPT = statistics.NAMES  # what a call returns; the derived ones follow from it
SOURCE = dict(gain_ratio="gradient_gain", entropy_ratio="entropy")
PARTS = ("count", "mean", "square", "low", "high", "curve", "curve_count", "totals", "compared")
FEATURES = ("entropy", "max_weight", "logit_variance", "distance")
CURVE_ROWS = tuple(NAMES.index(name) for name in CURVES)
SLOTS = tuple(KEPT.index(name) for name in FEATURES)
KEYS = KEPT.index("visible_keys")
SCALE = dict(log=0, asinh=1, share=2, ratio=3, nats=4)
LOG10_2, LN_2 = tl.constexpr(0.30102999566398120), tl.constexpr(0.69314718055994531)
SLOPE = tl.constexpr(SHARE_SLOPE)
KNEE_RATIO, KNEE_NATS = tl.constexpr(KNEE["ratio"]), tl.constexpr(KNEE["nats"])


def update(reading: LayerReading, stats: Mapping[str, Tensor], rows: Tensor | None, start: int) -> None:
    """Adds statistics [B, H, M] to a reading on the GPU: see `LayerReading.update`."""
    update_layers(reading.flat[None], reading.histogram[None], statistics.stack(stats), rows, start)


def update_layers(flat: Tensor, histogram: Tensor, packed: Tensor, rows: Tensor | None, start: int) -> None:
    """Adds statistics [14, L·B, H, M] to the readings of L layers with as many heads, flat [L, F] and a histogram each.

    The B sequences of a layer follow one another; `rows` [L·B, M] says which rows count.
    """
    _, batch, heads, queries = packed.shape
    layers = len(flat)
    sequences = batch // layers
    every = max(1, sequences * queries // COMPARED)
    sampled = -(-sequences * queries // every)
    features = packed.new_empty((layers, len(FEATURES), heads, sampled), dtype=torch.float64)
    first, last = _bin_of(start), _bin_of(start + queries - 1)
    bins = last - first + 1
    tasks = len(NAMES) + len(CURVES) * bins + len(FEATURES)
    counted_rows = packed if rows is None else rows.contiguous().view(torch.uint8)
    arguments = (
        packed, counted_rows, *_plan(packed.device), flat, histogram, features, flat.stride(0), tasks,
        batch * heads * queries, sequences, heads, queries, start, first, bins, POSITIONS, every, sampled,
    )  # fmt: skip
    constants = (
        _parts(heads), len(NAMES), len(CURVES), CURVE_ROWS, SLOTS, KEYS, LEAST_KEYS, rows is not None, BINS, 1024,
    )  # fmt: skip
    kind = tensor_key(packed, counted_rows, flat, histogram)
    with on_device_of(packed):
        launch(kind, update_kernel, layers * heads * tasks, arguments, constants)
    begin, end, shape = parts_of(heads)["products"]
    flat[:, begin:end].view(layers, *shape).add_(features @ features.mT)


@cache
def _parts(heads: int) -> tuple[int, ...]:
    """Returns the offsets, in a reading's one tensor, of the parts that the programs add to."""
    return tuple(parts_of(heads)[name][0] for name in PARTS)


@lru_cache(maxsize=256)
def _bin_of(position: int) -> int:
    """Returns the bin of one position."""
    return int(position_bin(torch.tensor(position)))


@cache
def _plan(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, per statistic, (source, scale, is it derived?) and (first edge, width); and the positions' edges."""
    source, origin = [], []
    for name, (scale, low, high) in LAYOUT.items():
        derived = list(SOURCE).index(name) + 1 if name in SOURCE else 0
        source.append((KEPT.index(SOURCE.get(name, name)), SCALE[scale], derived))
        origin.append((low, (high - low) / BINS))
    edges = [*map(first_position, range(POSITIONS)), 2**31 - 1]
    ints = partial(torch.tensor, dtype=torch.int32, device=device)
    return ints(source), torch.tensor(origin, device=device), ints(edges)


@triton.jit
def load_statistic(stats, at, slot, derived, inside, plane, KEYS: tl.constexpr):
    """Loads a statistic of some rows: (x, does the row have it?). entropy / ln n and gain / (1 − 1/n) need two keys."""
    x = tl.load(stats + slot * plane + at, inside, 0.0)
    n = tl.load(stats + KEYS * plane + at, inside, 0.0)
    inside = inside & (n > 0)
    if derived > 0:
        inside = inside & (n >= 2)
        n = tl.maximum(n, 2.0)
        if derived == 1:
            x = tl.div_rn(x, 1.0 - tl.div_rn(1.0, n))
        else:
            x = tl.div_rn(x, tl.log2(n) * LN_2)
    return x, inside


@triton.jit
def row_offset(r, h, H, M):
    """Returns the offset of head h in rows r of [B·M], within [B, H, M]."""
    return ((r // M).to(tl.int64) * H + h) * M + r % M


@triton.jit
def keep_counted(rows, r, inside, HAS_ROWS: tl.constexpr):
    if HAS_ROWS:
        inside = inside & (tl.load(rows + r, inside, 0) != 0)
    return inside


@triton.jit
def on_scale(x, scale):
    """Returns a value on the scale on which its bins are even; see `histogram.SCALES`."""
    t = x
    if scale == 0:
        t = tl.log2(tl.maximum(x, 0.0)) * LOG10_2
    elif scale == 1:
        y = tl.abs(x)
        t = tl.log2(y + tl.sqrt_rn(y * y + 1.0)) * LN_2
        t = tl.where(x < 0, -t, t)
    elif scale == 2:
        y = tl.maximum(x, 0.0)
        t = tl.where(y <= 1.0, tl.sqrt_rn(tl.sqrt_rn(y)), 1.0 + SLOPE * LOG10_2 * tl.log2(tl.maximum(y, 1.0)))
    else:
        y = tl.div_rn(tl.maximum(x, 0.0), tl.where(scale == 3, KNEE_RATIO, KNEE_NATS))
        t = tl.where(y >= 1.0, y, 1.0 + tl.log2(y) * LN_2)
    return t


@triton.jit
def summarize(
    s, h, stats, rows, source, origin, count, mean, square, low, high, histogram, plane, B, H, M,
    KEYS: tl.constexpr, HAS_ROWS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot, scale, derived = tl.load(source + 3 * s), tl.load(source + 3 * s + 1), tl.load(source + 3 * s + 2)
    first, width = tl.load(origin + 2 * s), tl.load(origin + 2 * s + 1)
    pilot = tl.load(stats + slot * plane + h * M).to(tl.float64)  # near the others: squares are taken from here
    pilot = tl.where(tl.abs(pilot) < 1e30, pilot, 0.0)
    number = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    least = tl.full([BLOCK], float("inf"), stats.dtype.element_ty)
    most = tl.full([BLOCK], float("-inf"), stats.dtype.element_ty)
    bins = tl.zeros([BINS], tl.int32)
    for start in range(0, B * M, BLOCK):
        r = start + tl.arange(0, BLOCK)
        inside = keep_counted(rows, r, r < B * M, HAS_ROWS)
        x, inside = load_statistic(stats, row_offset(r, h, H, M), slot, derived, inside, plane, KEYS)
        t = tl.div_rn(on_scale(x.to(tl.float32), scale) - first, width)
        t = tl.where(t == t, tl.minimum(tl.maximum(t, 0.0), BINS - 1.0), 0.0)
        bins += tl.histogram(t.to(tl.int32), BINS, mask=inside)
        number += tl.where(inside, 1, 0)
        least = tl.minimum(least, tl.where(inside, x, float("inf")))
        most = tl.maximum(most, tl.where(inside, x, float("-inf")))
        gap = tl.where(inside, x.to(tl.float64) - pilot, 0.0)
        total += gap
        squares += gap * gap
    n = tl.sum(number, 0).to(tl.float64)
    middle = tl.sum(total, 0) / tl.maximum(n, 1.0)
    deviations = tl.maximum(tl.sum(squares, 0) - n * middle * middle, 0.0)
    at = s * H + h
    before, mean_before = tl.load(count + at), tl.load(mean + at)
    after = before + n
    shift = middle + pilot - mean_before
    share = n / tl.maximum(after, 1.0)
    between = tl.where(before > 0, shift * shift * before * share, 0.0)
    tl.store(square + at, tl.load(square + at) + deviations + between)
    tl.store(mean + at, tl.where(n > 0, mean_before + shift * share, mean_before))
    tl.store(count + at, after)
    tl.store(low + at, tl.minimum(tl.load(low + at), tl.min(least, 0)))
    tl.store(high + at, tl.maximum(tl.load(high + at), tl.max(most, 0)))
    cells = histogram + at.to(tl.int64) * BINS + tl.arange(0, BINS)
    tl.store(cells, tl.load(cells) + bins.to(tl.int64))


@triton.jit
def add_to_curve(
    c, h, p, stats, rows, source, edges, curve, curve_count, plane, B, H, M, START, POSITIONS,
    CURVE_ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.where(c == 0, CURVE_ROWS[0], tl.where(c == 1, CURVE_ROWS[1], CURVE_ROWS[2]))
    slot, derived = tl.load(source + 3 * s), tl.load(source + 3 * s + 2)
    from_ = tl.maximum(tl.load(edges + p) - START, 0)
    to = tl.minimum(tl.load(edges + p + 1) - START, M)
    number = tl.zeros([BLOCK], tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    for b in range(0, B):
        for start in range(from_, to, BLOCK):
            m = start + tl.arange(0, BLOCK)
            inside = keep_counted(rows, b * M + m, m < to, HAS_ROWS)
            x, inside = load_statistic(stats, row_offset(b * M + m, h, H, M), slot, derived, inside, plane, KEYS)
            number += tl.where(inside, 1.0, 0.0)
            total += tl.where(inside, x.to(tl.float64), 0.0)
    at = (c * H + h) * POSITIONS + p
    tl.store(curve + at, tl.load(curve + at) + tl.sum(total, 0))
    tl.store(curve_count + at, tl.load(curve_count + at) + tl.sum(number, 0))


@triton.jit
def compute_features(
    f, h, stats, rows, features, totals, compared, plane, H, M, EVERY, SAMPLED,
    SLOTS: tl.constexpr, KEYS: tl.constexpr, LEAST: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.where(f < 2, tl.where(f == 0, SLOTS[0], SLOTS[1]), tl.where(f == 2, SLOTS[2], SLOTS[3]))
    number = tl.zeros([BLOCK], tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, SAMPLED, BLOCK):
        i = start + tl.arange(0, BLOCK)
        useful = keep_counted(rows, i * EVERY, i < SAMPLED, HAS_ROWS)
        at = row_offset(i * EVERY, h, H, M)
        n = tl.load(stats + KEYS * plane + at, useful, 0.0)
        useful = useful & (n >= LEAST)
        n = tl.maximum(n, 2.0)
        x = tl.load(stats + slot * plane + at, useful, 0.0)
        if f == 0:
            y = tl.div_rn(x, tl.log2(n) * LN_2)
        elif f == 1:
            y = tl.div_rn(tl.log2(tl.maximum(x * n, 1e-30)), tl.log2(n))
        else:
            v = tl.maximum(x, 0.0)
            y = tl.where(v < 1e-3, v * (1.0 - v * (0.5 - v / 3.0)), tl.log2(1.0 + v) * LN_2)  # log(1 + v)
        wide = tl.where(useful, y, 0.0).to(tl.float64)
        tl.store(features + (f * H + h) * SAMPLED + i, wide, i < SAMPLED)
        number += tl.where(useful, 1.0, 0.0)
        total += wide
    tl.store(totals + f * H + h, tl.load(totals + f * H + h) + tl.sum(total, 0))
    if f == 0:
        tl.store(compared + h, tl.load(compared + h) + tl.sum(number, 0))


@triton.jit
def update_kernel(
    stats, rows, source, origin, edges, flat, histogram, features, row, TASKS, plane, B, H, M, START, FIRST,
    BINS_OF_CURVE, POSITIONS, EVERY, SAMPLED,
    PLACES: tl.constexpr, STATISTICS: tl.constexpr, CURVES: tl.constexpr, CURVE_ROWS: tl.constexpr, SLOTS: tl.constexpr,
    KEYS: tl.constexpr, LEAST: tl.constexpr, HAS_ROWS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    h, task = tl.program_id(0) % H, tl.program_id(0) // H % TASKS
    layer = (tl.program_id(0) // H // TASKS).to(tl.int64)
    stats, rows, flat = stats + layer * B * H * M, rows + layer * B * M, flat + layer * row
    histogram, features = histogram + layer * STATISTICS * H * BINS, features + layer * len(SLOTS) * H * SAMPLED
    plane = tl.cast(plane, tl.int64)
    if task < STATISTICS:
        summarize(
            task, h, stats, rows, source, origin, flat + PLACES[0], flat + PLACES[1], flat + PLACES[2],
            flat + PLACES[3], flat + PLACES[4], histogram, plane, B, H, M, KEYS, HAS_ROWS, BINS, BLOCK,
        )  # fmt: skip
    elif task < STATISTICS + CURVES * BINS_OF_CURVE:
        c, p = (task - STATISTICS) // BINS_OF_CURVE, (task - STATISTICS) % BINS_OF_CURVE
        add_to_curve(
            c, h, FIRST + p, stats, rows, source, edges, flat + PLACES[5], flat + PLACES[6], plane, B, H, M, START,
            POSITIONS, CURVE_ROWS, KEYS, HAS_ROWS, 128,
        )  # fmt: skip
    else:
        f = task - STATISTICS - CURVES * BINS_OF_CURVE
        compute_features(
            f, h, stats, rows, features, flat + PLACES[7], flat + PLACES[8], plane, H, M, EVERY, SAMPLED,
            SLOTS, KEYS, LEAST, HAS_ROWS, BLOCK,
        )  # fmt: skip
