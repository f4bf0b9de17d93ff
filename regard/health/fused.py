"""A reading on the GPU: three launches per call of a layer, no copy to the host and no wait for it.

    summarize   one program per statistic and head: count, mean, Σ(x − mean)², extremes, histogram
    follow      one program per curve, head and bin of positions
    compare     one program per feature and head: Σ f_g·f_h over a sample of rows

They add to a `LayerReading` what its torch road adds. Each sum belongs to one program, so equal inputs give equal bits.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.health.bins import BINS, DERIVED, LAYOUT, NAMES, SHARE_SLOPE
from regard.health.readings import COMPARED, CURVES, LEAST_KEYS, POSITIONS, LayerReading, position_bin, position_of

KEPT = tuple(name for name in NAMES if name not in NAMES[DERIVED])  # what a call returns; the others follow from it
SOURCE = dict(gain_ratio="gradient_gain", entropy_ratio="entropy")
FEATURES = ("entropy", "max_weight", "logit_variance")
SCALE = dict(linear=0, log=1, asinh=2, share=3)
LOG10_2, LN_2 = tl.constexpr(0.30102999566398120), tl.constexpr(0.69314718055994531)
SLOPE = tl.constexpr(SHARE_SLOPE)
BLOCK = 1024


def update(reading: LayerReading, stats: dict[str, Tensor], rows: Tensor | None, start: int) -> None:
    """Add statistics [B, H, M] to a reading, as `LayerReading.update` says."""
    packed = torch.stack([stats[name] for name in KEPT])  # [14, B, H, M]
    _, batch, heads, queries = packed.shape
    shown = packed if rows is None else rows.contiguous().view(torch.uint8)
    sizes = (packed[0].numel(), batch, heads, queries)
    whence, origin, edges = _plan(packed.device)
    given = dict(HAS_ROWS=rows is not None, KEYS=KEPT.index("visible_keys"))
    told = (reading.count, reading.mean, reading.square, reading.low, reading.high, reading.histogram)
    summarize[(len(NAMES), heads)](packed, shown, whence, origin, *told, *sizes, BINS=BINS, BLOCK=BLOCK, **given)
    first, last = _bin_of(start), _bin_of(start + queries - 1)
    follow[(len(CURVES), heads, last - first + 1)](
        packed, shown, whence, edges, reading.curve, reading.curve_count, *sizes, start, first, POSITIONS,
        ROWS=tuple(NAMES.index(name) for name in CURVES), BLOCK=128, **given,
    )  # fmt: skip
    compare[(reading.products.shape[0], heads)](
        packed, shown, reading.products, reading.totals, reading.compared, *sizes, max(1, batch * queries // COMPARED),
        LEAST=LEAST_KEYS, SLOTS=tuple(KEPT.index(name) for name in FEATURES), BLOCK=BLOCK, **given,
    )  # fmt: skip


def _bin_of(position: int) -> int:
    """The bin of one position."""
    return int(position_bin(torch.tensor(position)))


@cache
def _plan(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Per statistic (where it comes from, its scale, is it derived?) and (first edge, width); the positions' edges."""
    whence, origin = [], []
    for name, (scale, low, high) in LAYOUT.items():
        derived = list(SOURCE).index(name) + 1 if name in SOURCE else 0
        whence.append((KEPT.index(SOURCE.get(name, name)), SCALE[scale], derived))
        origin.append((low, (high - low) / BINS))
    edges = [*map(position_of, range(POSITIONS)), 2**31 - 1]
    ints = dict(dtype=torch.int32, device=device)
    return torch.tensor(whence, **ints), torch.tensor(origin, device=device), torch.tensor(edges, **ints)


@triton.jit
def read(stats, at, slot, derived, inside, plane, KEYS: tl.constexpr):
    """(x, is it there?): a statistic of some rows; entropy / ln n and gain / (1 − 1/n) need two keys to be there."""
    x = tl.load(stats + slot * plane + at, inside, 0.0)
    if derived > 0:
        n = tl.load(stats + KEYS * plane + at, inside, 0.0)
        inside = inside & (n >= 2)
        n = tl.maximum(n, 2.0)
        if derived == 1:
            x = tl.div_rn(x, 1.0 - tl.div_rn(1.0, n))
        else:
            x = tl.div_rn(x, tl.log2(n) * LN_2)
    return x, inside


@triton.jit
def place(r, h, H, M):
    """The offset of head h in rows r of [B·M], within [B, H, M]."""
    return ((r // M).to(tl.int64) * H + h) * M + r % M


@triton.jit
def counted(rows, r, inside, HAS_ROWS: tl.constexpr):
    if HAS_ROWS:
        inside = inside & (tl.load(rows + r, inside, 0) != 0)
    return inside


@triton.jit
def on_scale(x, scale):
    """Where a value lies on the scale on which its bins are even; see `bins.SCALES`."""
    t = x
    if scale == 1:
        t = tl.log2(tl.maximum(x, 0.0)) * LOG10_2
    elif scale == 2:
        y = tl.abs(x)
        t = tl.log2(y + tl.sqrt_rn(y * y + 1.0)) * LN_2
        t = tl.where(x < 0, -t, t)
    elif scale == 3:
        y = tl.maximum(x, 0.0)
        t = tl.where(y <= 1.0, tl.sqrt_rn(tl.sqrt_rn(y)), 1.0 + SLOPE * LOG10_2 * tl.log2(tl.maximum(y, 1.0)))
    return t


@triton.jit
def summarize(
    stats, rows, whence, origin, count, mean, square, low, high, histogram, plane, B, H, M,
    HAS_ROWS: tl.constexpr, KEYS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s, h = tl.program_id(0), tl.program_id(1)
    plane = tl.cast(plane, tl.int64)
    slot, scale, derived = tl.load(whence + 3 * s), tl.load(whence + 3 * s + 1), tl.load(whence + 3 * s + 2)
    first, width = tl.load(origin + 2 * s), tl.load(origin + 2 * s + 1)
    number = tl.zeros([BLOCK], tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    least = tl.full([BLOCK], float("inf"), tl.float64)
    most = tl.full([BLOCK], float("-inf"), tl.float64)
    bins = tl.zeros([BINS], tl.int32)
    for start in range(0, B * M, BLOCK):
        r = start + tl.arange(0, BLOCK)
        inside = counted(rows, r, r < B * M, HAS_ROWS)
        x, inside = read(stats, place(r, h, H, M), slot, derived, inside, plane, KEYS)
        t = tl.div_rn(on_scale(x.to(tl.float32), scale) - first, width)
        t = tl.where(t == t, tl.minimum(tl.maximum(t, 0.0), BINS - 1.0), 0.0)
        bins += tl.histogram(t.to(tl.int32), BINS, mask=inside)
        x = x.to(tl.float64)
        number += tl.where(inside, 1.0, 0.0)
        total += tl.where(inside, x, 0.0)
        least = tl.minimum(least, tl.where(inside, x, float("inf")))
        most = tl.maximum(most, tl.where(inside, x, float("-inf")))
    n = tl.sum(number, 0)
    middle = tl.sum(total, 0) / tl.maximum(n, 1.0)
    apart = tl.zeros([BLOCK], tl.float64)
    for start in range(0, B * M, BLOCK):
        r = start + tl.arange(0, BLOCK)
        inside = counted(rows, r, r < B * M, HAS_ROWS)
        x, inside = read(stats, place(r, h, H, M), slot, derived, inside, plane, KEYS)
        gap = tl.where(inside, x.to(tl.float64) - middle, 0.0)
        apart += gap * gap
    at = s * H + h
    before, mean_before = tl.load(count + at), tl.load(mean + at)
    after = before + n
    share = n / tl.maximum(after, 1.0)
    gap = middle - mean_before
    tl.store(
        square + at, tl.load(square + at) + tl.sum(apart, 0) + tl.where(before > 0, gap * gap * before * share, 0.0)
    )
    tl.store(mean + at, tl.where(n > 0, mean_before + gap * share, mean_before))
    tl.store(count + at, after)
    tl.store(low + at, tl.minimum(tl.load(low + at), tl.min(least, 0)))
    tl.store(high + at, tl.maximum(tl.load(high + at), tl.max(most, 0)))
    cells = histogram + at.to(tl.int64) * BINS + tl.arange(0, BINS)
    tl.store(cells, tl.load(cells) + bins.to(tl.int64))


@triton.jit
def follow(
    stats, rows, whence, edges, curve, curve_count, plane, B, H, M, START, FIRST, POSITIONS,
    ROWS: tl.constexpr, HAS_ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    plane = tl.cast(plane, tl.int64)
    c, h, p = tl.program_id(0), tl.program_id(1), FIRST + tl.program_id(2)
    s = tl.where(c == 0, ROWS[0], tl.where(c == 1, ROWS[1], ROWS[2]))
    slot, derived = tl.load(whence + 3 * s), tl.load(whence + 3 * s + 2)
    from_, to = tl.load(edges + p), tl.load(edges + p + 1)
    from_, to = tl.maximum(from_ - START, 0), tl.minimum(to - START, M)
    if from_ < to:
        number = tl.zeros([BLOCK], tl.float64)
        total = tl.zeros([BLOCK], tl.float64)
        for b in range(0, B):
            for start in range(from_, to, BLOCK):
                m = start + tl.arange(0, BLOCK)
                inside = counted(rows, b * M + m, m < to, HAS_ROWS)
                x, inside = read(stats, place(b * M + m, h, H, M), slot, derived, inside, plane, KEYS)
                number += tl.where(inside, 1.0, 0.0)
                total += tl.where(inside, x.to(tl.float64), 0.0)
        at = (c * H + h) * POSITIONS + p
        tl.store(curve + at, tl.load(curve + at) + tl.sum(total, 0))
        tl.store(curve_count + at, tl.load(curve_count + at) + tl.sum(number, 0))


@triton.jit
def feature(stats, at, f, inside, plane, SLOTS: tl.constexpr, KEYS: tl.constexpr):
    """What tells one head's row from another's: entropy ratio, sharpness or log variance."""
    if f == 0:
        y = read(stats, at, SLOTS[0], 2, inside, plane, KEYS)[0]
    elif f == 1:
        n = tl.maximum(tl.load(stats + KEYS * plane + at, inside, 2.0), 1.0)
        top = tl.load(stats + SLOTS[1] * plane + at, inside, 1.0)
        y = tl.div_rn(tl.log2(tl.maximum(top * n, 1e-30)), tl.log2(tl.maximum(n, 2.0)))
    else:
        v = tl.maximum(tl.load(stats + SLOTS[2] * plane + at, inside, 0.0), 0.0)
        y = tl.where(v < 1e-3, v * (1.0 - v * (0.5 - v / 3.0)), tl.log2(1.0 + v) * LN_2)  # log(1 + v)
    return tl.where(inside, y, 0.0).to(tl.float64)


@triton.jit
def compare(
    stats, rows, products, totals, compared, plane, B, H, M, EVERY,
    LEAST: tl.constexpr, SLOTS: tl.constexpr, HAS_ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    plane = tl.cast(plane, tl.int64)
    f, g = tl.program_id(0), tl.program_id(1)
    for start in range(0, (B * M + EVERY - 1) // EVERY, BLOCK):
        r = (start + tl.arange(0, BLOCK)) * EVERY
        useful = counted(rows, r, r < B * M, HAS_ROWS)
        for h in range(0, H):
            useful = useful & (tl.load(stats + KEYS * plane + place(r, h, H, M), useful, 0.0) >= LEAST)
        own = feature(stats, place(r, g, H, M), f, useful, plane, SLOTS, KEYS)
        tl.store(totals + f * H + g, tl.load(totals + f * H + g) + tl.sum(own, 0))
        if (f == 0) & (g == 0):
            tl.store(compared, tl.load(compared) + tl.sum(tl.where(useful, 1.0, 0.0).to(tl.float64), 0))
        for h in range(0, H):
            other = feature(stats, place(r, h, H, M), f, useful, plane, SLOTS, KEYS)
            cell = products + (f * H + g) * H + h
            tl.store(cell, tl.load(cell) + tl.sum(own * other, 0))
