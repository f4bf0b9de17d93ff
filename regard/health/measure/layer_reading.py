"""The reading of one layer over any number of batches: count, mean, Σ(x − mean)², extremes, histogram per head.

Two readings of the same layer merge: counts and histograms add, means and squares by Chan's rule,

    M = M_a + M_b + δ²·n_a·n_b/n,   δ = mean_b − mean_a,

so that batches, or ranks, may come in any order. Every sum but the histogram is in one row of float64 (`flat`), which
is fetched at once. Curves are kept over bins of positions: one each for the first 16, then 8 to an octave.

>>> import regard, torch
>>> from regard.health.measure.layer_reading import LayerReading, spreads_of
>>> q = k = v = torch.randn(1, 2, 16, 8)
>>> _, stats = regard.attention(q, k, v, return_stats=True)
>>> reading = LayerReading(heads=2).update(stats)
>>> first_head, _ = spreads_of([reading])[0]
>>> bool((first_head["entropy"].mean - stats.entropy[0, 0].mean()).abs() < 1e-6)
True
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from regard.health.measure import histogram
from regard.health.measure.histogram import BINS, DERIVED, NAMES, ROW, Spreads

COMPARED = 1024  # rows of a call that are compared, at least
ADDED = ("histogram", "curve", "curve_count", "products", "totals", "compared", "predicted", "calls", "norms",
         "norm_rows")  # fmt: skip  # merge by adding
LEAST_KEYS = 4  # a fingerprint needs a row that has a choice
CURVES = ("entropy_ratio", "max_weight", "distance")  # followed over the query's position
POSITIONS = 144  # bins of positions, up to 2²⁰
FEATURES = 4  # per row, by which the distributions of two heads are compared


def _shapes(heads: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of what a reading holds besides its histogram."""
    rows, curves = (len(NAMES), heads), (len(CURVES), heads, POSITIONS)
    return dict(
        count=rows,
        mean=rows,
        square=rows,  # Σ (x − mean)²
        low=rows,
        high=rows,
        curve=curves,
        curve_count=curves,
        products=(FEATURES, heads, heads),  # Σ f_g·f_h over rows
        totals=(FEATURES, heads),
        compared=(heads,),  # rows behind products
        predicted=(heads,),  # Σ over calls of the logit variance that the norms predict
        calls=(),  # behind predicted
        norms=(3, heads),  # Σ ‖q‖, ‖k‖ and ‖v‖ over rows, where a monitor asks for them
        norm_rows=(2,),  # queries and keys behind norms
    )


@lru_cache(maxsize=64)
def parts_of(heads: int) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """Returns, per name, (start, end, shape) within `flat`."""
    found, start = {}, 0
    for name, shape in _shapes(heads).items():
        found[name] = start, start + math.prod(shape), shape
        start += math.prod(shape)
    return found


@lru_cache(maxsize=16)
def empty_sums(heads: int, device: torch.device) -> Tensor:
    """Returns the sums of a reading without rows."""
    extremes = dict(low=math.inf, high=-math.inf)
    parts = [torch.full((math.prod(shape),), extremes.get(name, 0.0)) for name, shape in _shapes(heads).items()]
    return torch.cat(parts).double().to(device)


def position_bin(position: Tensor) -> Tensor:
    """Returns the bin of each position.

    >>> from regard.health.measure.layer_reading import first_position, position_bin
    >>> [first_position(at) for at in position_bin(torch.tensor([3, 16, 1000])).tolist()]
    [3, 16, 940]
    """
    log = 16 + torch.floor(8.0 * torch.log2(position.clamp_min(1).double() / 16.0) + 1e-9)
    return torch.where(position < 16, position.double(), log).clamp_max(POSITIONS - 1).long()


@lru_cache(maxsize=4)
def position_bins(start: int, queries: int, batch: int, device: torch.device) -> Tensor:
    """Returns the bins of the rows of one call, [B·M]."""
    return position_bin(torch.arange(start, start + queries, device=device)).repeat(batch)


def first_position(at: int) -> int:
    """Returns the first position of a bin."""
    return at if at < 16 else math.ceil(16 * 2 ** ((at - 16) / 8) - 1e-6)


class LayerReading:
    """The sums of one layer, on the device of its batches: the parts of `flat` (`_shapes`) are attributes."""

    def __init__(self, heads: int, device: torch.device | str = "cpu") -> None:
        self.heads = heads
        self.flat = empty_sums(heads, torch.device(device)).clone()
        self.histogram = torch.zeros(self.histogram_shape(heads), dtype=torch.int64, device=device)

    @staticmethod
    def histogram_shape(heads: int) -> tuple[int, int, int]:
        """Returns the shape of a layer's histograms, [S, H, bins]."""
        return len(NAMES), heads, BINS

    def __getattr__(self, name: str) -> Tensor:
        """Returns a part of `flat` by its name and keeps it."""
        parts = parts_of(self.__dict__["heads"]) if "heads" in self.__dict__ else {}
        if name not in parts:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        start, end, shape = parts[name]
        part = self.flat[start:end].view(shape)
        setattr(self, name, part)
        return part

    def __getstate__(self) -> dict:
        return dict(heads=self.heads, flat=self.flat, histogram=self.histogram)

    def add_prediction(self, variance: Tensor, rows: Tensor | None = None) -> None:
        """Adds the logit variance [H] that norms predict for one call, if any of its rows counts."""
        some = 1 if rows is None else rows.any()
        self.predicted.add_(variance * some)
        self.calls.add_(some)

    def update(self, stats: Mapping[str, Tensor], rows: Tensor | None = None, start: int = 0) -> LayerReading:
        """Adds statistics [B, H, M]; `rows` [B, M] says which count, `start` is the position of the first query."""
        if stats["entropy"].is_cuda:
            from regard.health.measure import gpu_reading

            gpu_reading.update(self, stats, rows, start)
        else:
            self._add(stats, rows, start)
        return self

    def _add(self, stats: Mapping[str, Tensor], rows: Tensor | None, start: int) -> None:
        batch, _, queries = stats["entropy"].shape
        values = {**stats, **_derived(stats)}
        x = torch.stack([values[name] for name in NAMES]).transpose(1, 2).flatten(2)  # [S, H, B·M]
        empty = x[ROW["visible_keys"]] == 0
        partial = DERIVED  # statistics that some rows do not have: NaN there
        if bool(empty.any()):
            x, partial = x.masked_fill(empty, math.nan), slice(None)
        position, every = position_bins(start, queries, batch, x.device), max(1, x.shape[-1] // COMPARED)
        sample = x[..., ::every]
        if rows is not None:
            kept = rows.flatten().nonzero().squeeze(-1)
            x, position, sample = x[..., kept], position[kept], sample[..., rows.flatten()[::every]]
        if x.shape[-1]:
            self._add_moments_and_extremes(x, partial)
            self._add_to_histogram(x, partial)
            self._add_to_curves(x, position)
            self._add_features(sample)

    def _add_moments_and_extremes(self, x: Tensor, partial: slice) -> None:
        """Adds moments and extremes; those of `partial` over the rows that have them."""
        variance, mean = (part.double() for part in torch.var_mean(x, -1, correction=0))
        low, high = (part.double() for part in torch.aminmax(x, dim=-1))
        count = torch.full_like(mean, x.shape[-1])
        part = x[partial]
        some = ~part.isnan()
        number = some.sum(-1).double()
        total = part.nan_to_num(0.0, math.inf, -math.inf).sum(-1, dtype=torch.float64)
        middle = total / number.clamp_min(1)
        deviation = (part - middle.to(x.dtype)[..., None]).masked_fill_(~some, 0.0)
        count[partial], mean[partial] = number, middle
        variance[partial] = deviation.square().sum(-1, dtype=torch.float64) / number.clamp_min(1)
        low[partial] = part.masked_fill(~some, math.inf).amin(-1).double()
        high[partial] = part.masked_fill(~some, -math.inf).amax(-1).double()
        self._merge_moments(count, mean, variance * count)
        self._merge_extremes(low, high)

    def _merge_extremes(self, low: Tensor, high: Tensor) -> None:
        torch.minimum(self.low, low, out=self.low)
        torch.maximum(self.high, high, out=self.high)

    def _merge_moments(self, count: Tensor, mean: Tensor, square: Tensor) -> None:
        total = self.count + count
        weight = count / total.clamp_min(1)
        gap = mean - self.mean
        self.square.add_(square + gap.square() * self.count * weight)
        self.mean.add_(gap * weight)
        self.count.copy_(total)

    def _add_to_histogram(self, x: Tensor, partial: slice) -> None:
        at = histogram.find_bins(x)
        flat = self.histogram.view(len(NAMES), -1)
        at += torch.arange(self.heads, device=x.device)[:, None] * BINS
        one = at.new_ones(())
        first, last, _ = partial.indices(len(NAMES))
        for part in (slice(0, first), slice(first, last), slice(last, None)):
            weight = (~x[part].isnan()).long() if part.start == first else one.expand_as(at[part])
            flat[part].scatter_add_(1, at[part].flatten(1), weight.flatten(1))

    def _add_to_curves(self, x: Tensor, position: Tensor) -> None:
        wanted = torch.stack([x[ROW[name]] for name in CURVES])
        self.curve_count.index_add_(-1, position, (~wanted.isnan()).double())
        self.curve.index_add_(-1, position, wanted.nan_to_num(0.0).double())

    def _add_features(self, x: Tensor) -> None:
        n, top, ratio = (x[ROW[name]] for name in ("visible_keys", "max_weight", "entropy_ratio"))
        variance, distance = (torch.log1p(x[ROW[name]].clamp_min(0.0)) for name in ("logit_variance", "distance"))
        useful = n >= LEAST_KEYS  # [H, R]
        sharpness = torch.log((top * n).clamp_min(1e-30)) / torch.log(n.clamp_min(2.0))
        f = torch.stack([ratio, sharpness, variance, distance]).masked_fill(~useful, 0.0).double()
        self.products.add_(f @ f.transpose(-1, -2))
        self.totals.add_(f.sum(-1))
        self.compared.add_(useful.sum(-1))

    def merge(self, other: LayerReading) -> LayerReading:
        """Returns both readings together; neither is changed."""
        if other.heads != self.heads:
            raise ValueError(f"readings of {self.heads} and {other.heads} heads cannot be merged")
        merged = LayerReading(self.heads, self.count.device)
        for part in (self, other):
            merged._merge_moments(part.count, part.mean, part.square)
            merged._merge_extremes(part.low, part.high)
            for name in ADDED:
                getattr(merged, name).add_(getattr(part, name))
        return merged

    def cpu(self) -> LayerReading:
        """Returns the reading on the CPU; itself if it is there."""
        if not self.flat.is_cuda:
            return self
        return LayerReading.from_sums(self.heads, self.flat.cpu(), self.histogram.cpu())

    @classmethod
    def from_sums(cls, heads: int, flat: Tensor, histogram: Tensor) -> LayerReading:
        """Makes a reading of existing sums, without a copy."""
        reading = object.__new__(cls)
        reading.__dict__.update(heads=heads, flat=flat, histogram=histogram)
        return reading

    def curves(self, head: int) -> dict[str, list[tuple[int, float]]]:
        """Returns [(position, mean)] of the statistics in CURVES, where any row was counted."""
        means = (self.curve[:, head] / self.curve_count[:, head]).tolist()  # NaN where no row was
        return {
            name: [(first_position(at), mean) for at, mean in enumerate(values) if mean == mean]
            for name, values in zip(CURVES, means, strict=True)
        }


def stack_parts(readings: Sequence[LayerReading], name: str) -> np.ndarray:
    """Stacks one part of readings on the CPU that have as many heads: [L, …]."""
    start, end, shape = parts_of(readings[0].heads)[name]
    return np.stack([reading.flat.numpy()[start:end] for reading in readings]).reshape(-1, *shape)


def spreads_of(readings: Sequence[LayerReading]) -> list[list[Spreads]]:
    """Returns every statistic's spread per reading and head."""
    count, mean, square, low, high = (
        stack_parts(readings, name) for name in ("count", "mean", "square", "low", "high")
    )
    std = np.sqrt(square / np.maximum(count, 1.0))
    columns = [np.where(count == 0, math.nan, x).tolist() for x in (mean, std, low, high)]
    layers = zip(count.astype(int).tolist(), *columns, strict=True)
    return [
        [Spreads(numbers, reading.histogram, head) for head in range(reading.heads)]
        for reading, numbers in zip(readings, layers, strict=True)
    ]


def _derived(stats: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns entropy / ln n and gain / (1 − 1/n); NaN, so not counted, for rows of one key."""
    single = stats["visible_keys"] < 2
    n = stats["visible_keys"].masked_fill(single, 2.0)
    ratio, gain = stats["entropy"] / torch.log(n), stats["gradient_gain"] / (1.0 - 1.0 / n)
    return dict(entropy_ratio=ratio.masked_fill_(single, math.nan), gain_ratio=gain.masked_fill_(single, math.nan))
