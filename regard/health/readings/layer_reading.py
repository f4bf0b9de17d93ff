"""Per-head readings over any number of batches, in constant memory: count, mean, Σ(x − mean)², extremes, histogram.

Two readings of the same layer merge: counts and histograms add, means and squares by Chan's rule,

    M = M_a + M_b + δ²·n_a·n_b/n,   δ = mean_b − mean_a,

so that batches, or ranks, may come in any order and any tree.

>>> import regard, torch
>>> from regard.health.readings.layer_reading import LayerReading
>>> q = k = v = torch.randn(1, 2, 16, 8)
>>> _, stats = regard.attention(q, k, v, return_stats=True)
>>> reading = LayerReading(heads=2).update(stats)
>>> bool((reading.spread("entropy", head=0).mean - stats.entropy[0, 0].mean()).abs() < 1e-6)
True
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from regard.health.readings import histogram as bins
from regard.health.readings.histogram import BINS, DERIVED, NAMES, ROW
from regard.health.readings.layout import CURVES, empty, places, position_bins, position_of
from regard.health.readings.spread import Spread, Spreads

COMPARED = 1024  # rows of a call that are compared, at least
ADDED = ("histogram", "curve", "curve_count", "products", "totals", "compared", "predicted", "calls")  # merge by adding
CONSTANT = 1e-8  # variance of a feature below which it counts as that
LEAST_KEYS = 4  # a fingerprint needs a row that has a choice


class LayerReading:
    """The sums of one layer, [S, H] and [S, H, 512] on the device of its batches."""

    count: Tensor  # the parts of `flat`, as `layout` has them
    mean: Tensor
    square: Tensor
    low: Tensor
    high: Tensor
    curve: Tensor
    curve_count: Tensor
    products: Tensor
    totals: Tensor
    compared: Tensor
    predicted: Tensor
    calls: Tensor

    def __init__(self, heads: int, device: torch.device | str = "cpu") -> None:
        self.heads = heads
        self.flat = empty(heads, torch.device(device)).clone()  # every sum but the histogram: it travels at once
        self.histogram = torch.zeros((len(NAMES), heads, BINS), dtype=torch.int64, device=device)

    def __getattr__(self, name: str) -> Tensor:
        """A part of `flat` by its name, made when first asked for."""
        parts = places(self.__dict__["heads"]) if "heads" in self.__dict__ else {}
        if name not in parts:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        start, end, shape = parts[name]
        part = self.flat[start:end].view(shape)
        setattr(self, name, part)
        return part

    def __getstate__(self) -> dict:
        return dict(heads=self.heads, flat=self.flat, histogram=self.histogram)

    def predict(self, variance: Tensor, rows: Tensor | None = None) -> None:
        """Add the logit variance [H] that norms predict for one call, if any of its rows counts."""
        some = 1 if rows is None else rows.any()
        self.predicted += variance * some
        self.calls += some

    def update(self, stats: Mapping[str, Tensor], rows: Tensor | None = None, start: int = 0) -> LayerReading:
        """Add statistics [B, H, M]; `rows` [B, M] says which count, `start` is the position of the first query."""
        if stats["entropy"].is_cuda:
            from regard.health.measurement import gpu_reading

            gpu_reading.update(self, stats, rows, start)
        else:
            self._add(stats, rows, start)
        return self

    def _add(self, stats: Mapping[str, Tensor], rows: Tensor | None, start: int) -> None:
        batch, _, queries = stats["entropy"].shape
        there = {**stats, **_derived(stats)}
        x = torch.stack([there[name] for name in NAMES]).transpose(1, 2).flatten(2)  # [S, H, B·M]
        dead = x[ROW["visible_keys"]] == 0
        partial = DERIVED  # statistics that some rows do not have: NaN there
        if bool(dead.any()):
            x, partial = x.masked_fill(dead, math.nan), slice(None)
        position, every = position_bins(start, queries, batch, x.device), max(1, x.shape[-1] // COMPARED)
        sample = x[..., ::every]
        if rows is not None:
            kept = rows.flatten().nonzero().squeeze(-1)
            x, position, sample = x[..., kept], position[kept], sample[..., rows.flatten()[::every]]
        if x.shape[-1]:
            self._sum(x, partial)
            self._count_bins(x, partial)
            self._follow(x, position)
            self._compare(sample)

    def _sum(self, x: Tensor, partial: slice) -> None:
        """Moments and extremes; those of `partial` over the rows that have them."""
        variance, mean = (part.double() for part in torch.var_mean(x, -1, correction=0))
        low, high = (part.double() for part in torch.aminmax(x, dim=-1))
        count = torch.full_like(mean, x.shape[-1])
        part = x[partial]
        some = ~part.isnan()
        number = some.sum(-1).double()
        total = part.nan_to_num(0.0, math.inf, -math.inf).sum(-1, dtype=torch.float64)
        middle = total / number.clamp_min(1)
        apart = (part - middle.to(x.dtype)[..., None]).masked_fill_(~some, 0.0)
        count[partial], mean[partial] = number, middle
        variance[partial] = apart.square().sum(-1, dtype=torch.float64) / number.clamp_min(1)
        low[partial] = part.masked_fill(~some, math.inf).amin(-1).double()
        high[partial] = part.masked_fill(~some, -math.inf).amax(-1).double()
        self._moments(count, mean, variance * count)
        self._extremes(low, high)

    def _extremes(self, low: Tensor, high: Tensor) -> None:
        torch.minimum(self.low, low, out=self.low)
        torch.maximum(self.high, high, out=self.high)

    def _moments(self, count: Tensor, mean: Tensor, square: Tensor) -> None:
        total = self.count + count
        weight = count / total.clamp_min(1)
        gap = mean - self.mean
        self.square += square + gap.square() * self.count * weight
        self.mean += gap * weight
        self.count.copy_(total)

    def _count_bins(self, x: Tensor, partial: slice) -> None:
        at = bins.place(x)
        flat = self.histogram.view(len(NAMES), -1)
        at += torch.arange(self.heads, device=x.device)[:, None] * BINS
        one = at.new_ones(())
        first, last, _ = partial.indices(len(NAMES))
        for part in (slice(0, first), slice(first, last), slice(last, None)):
            weight = (~x[part].isnan()).long() if part.start == first else one.expand_as(at[part])
            flat[part].scatter_add_(1, at[part].flatten(1), weight.flatten(1))

    def _follow(self, x: Tensor, position: Tensor) -> None:
        wanted = torch.stack([x[ROW[name]] for name in CURVES])
        self.curve_count.index_add_(-1, position, (~wanted.isnan()).double())
        self.curve.index_add_(-1, position, wanted.nan_to_num(0.0).double())

    def _compare(self, x: Tensor) -> None:
        n, top, ratio = (x[ROW[name]] for name in ("visible_keys", "max_weight", "entropy_ratio"))
        variance, distance = (torch.log1p(x[ROW[name]].clamp_min(0.0)) for name in ("logit_variance", "distance"))
        useful = n >= LEAST_KEYS  # [H, R]
        sharpness = torch.log((top * n).clamp_min(1e-30)) / torch.log(n.clamp_min(2.0))
        f = torch.stack([ratio, sharpness, variance, distance]).masked_fill(~useful, 0.0).double()
        self.products += f @ f.transpose(-1, -2)
        self.totals += f.sum(-1)
        self.compared += useful.sum(-1)

    def merge(self, other: LayerReading) -> LayerReading:
        """Both readings together; neither is changed."""
        if other.heads != self.heads:
            raise ValueError(f"readings of {self.heads} and {other.heads} heads cannot be merged")
        merged = LayerReading(self.heads, self.count.device)
        for part in (self, other):
            merged._moments(part.count, part.mean, part.square)
            merged._extremes(part.low, part.high)
            for name in ADDED:
                getattr(merged, name).add_(getattr(part, name))
        return merged

    def cpu(self) -> LayerReading:
        """The same on the CPU; itself if it is there."""
        return fetched([self])[0] if self.flat.is_cuda else self

    def spread(self, name: str, head: int) -> Spread:
        return self.spreads()[head][name]

    def spreads(self) -> list[Spreads]:
        """Per head, every statistic's spread; of a reading on the CPU."""
        return spreads_of([self])[0]

    def quantiles(self, shares: Sequence[float]) -> Tensor:
        """[Q, S, H]: every head's quantiles at once, as `Spread.quantile` gives them."""
        return bins.quantiles(self.histogram, shares).clamp(self.low, self.high)

    def curves(self, head: int) -> dict[str, list[tuple[int, float]]]:
        """[(position, mean)] of the followed statistics, where any row was counted."""
        means = (self.curve[:, head] / self.curve_count[:, head]).tolist()  # NaN where no row was
        return {
            name: [(position_of(at), mean) for at, mean in enumerate(values) if mean == mean]
            for name, values in zip(CURVES, means, strict=True)
        }


def stacked(readings: Sequence[LayerReading], name: str) -> np.ndarray:
    """[L, …]: one part of readings on the CPU that have as many heads."""
    start, end, shape = places(readings[0].heads)[name]
    return np.stack([reading.flat.numpy()[start:end] for reading in readings]).reshape(-1, *shape)


def spreads_of(readings: Sequence[LayerReading]) -> list[list[Spreads]]:
    """Per reading and head, every statistic's spread."""
    count, mean, square, low, high = (stacked(readings, name) for name in ("count", "mean", "square", "low", "high"))
    std = np.sqrt(square / np.maximum(count, 1.0))
    columns = [np.where(count == 0, math.nan, x).tolist() for x in (mean, std, low, high)]
    layers = zip(count.astype(int).tolist(), *columns, strict=True)
    return [
        [Spreads(numbers, reading.histogram, head) for head in range(reading.heads)]
        for reading, numbers in zip(readings, layers, strict=True)
    ]


def predicted_variances(readings: Sequence[LayerReading]) -> list[list[float]]:
    """Per reading and head the logit variance that the norms predict, if directions know nothing of one another."""
    calls = stacked(readings, "calls")[:, None]
    return np.where(calls > 0, stacked(readings, "predicted") / np.maximum(calls, 1.0), math.nan).tolist()


def likeness(readings: Sequence[LayerReading]) -> np.ndarray:
    """[L, H, H]: Σ (f_g − f_h)² over rows, relative to how much f varies over them: 0 for twins, 2 for strangers."""
    products, totals, compared = (stacked(readings, name) for name in ("products", "totals", "compared"))
    compared = np.maximum(compared, 1.0)[:, None]  # [L, 1, H]
    own = products.diagonal(axis1=-2, axis2=-1)  # [L, F, H]
    with np.errstate(invalid="ignore"):  # a variance that overflowed is like none: NaN
        apart = own[..., :, None] + own[..., None, :] - 2.0 * products
        varies = own - np.square(totals) / compared
        mean = (varies[..., :, None] + varies[..., None, :]) / 2.0
        floor = CONSTANT * compared[..., None, :]
        return (np.maximum(apart, 0.0) / np.maximum(mean, floor)).max(1)  # every feature must agree


def fetched(readings: Sequence[LayerReading]) -> list[LayerReading]:
    """The readings on the CPU, with one wait for each device they are on."""
    together: dict[tuple, list[int]] = {}
    for at, reading in enumerate(readings):
        together.setdefault((reading.heads, reading.flat.device), []).append(at)
    landed = {}
    for (heads, device), own in together.items():
        if device.type == "cuda":
            stacks = (torch.stack([getattr(readings[at], name) for at in own]) for name in ("flat", "histogram"))
            landed[heads, device] = [_landing(stack) for stack in stacks]
    for device in {device for _, device in landed}:
        torch.cuda.current_stream(device).synchronize()
    moved = list(readings)
    for (heads, device), (flats, histograms) in landed.items():
        for at, flat, histogram in zip(together[heads, device], flats, histograms, strict=True):
            moved[at] = object.__new__(LayerReading)
            moved[at].__dict__.update(heads=heads, flat=flat, histogram=histogram)
    return moved


def _landing(x: Tensor) -> Tensor:
    """A tensor on the CPU that x is on its way to."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def _derived(stats: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """entropy / ln n and gain / (1 − 1/n); NaN, so not counted, where one key leaves no choice."""
    alone = stats["visible_keys"] < 2
    n = stats["visible_keys"].masked_fill(alone, 2.0)
    ratio, gain = stats["entropy"] / torch.log(n), stats["gradient_gain"] / (1.0 - 1.0 / n)
    return dict(entropy_ratio=ratio.masked_fill_(alone, math.nan), gain_ratio=gain.masked_fill_(alone, math.nan))
