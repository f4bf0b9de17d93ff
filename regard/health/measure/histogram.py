"""Histograms of 512 fixed bins per statistic, and what is read from them: quantiles, `Spread`.

The bins are fixed, so that the histograms of two batches, or two ranks, add. Each statistic has a scale on which its
bins are even: log₁₀ for what spans decades; asinh for logits; for shares the fourth root, then slowly log₁₀ above 1;
and for entropies t(x) = x/c from c on and 1 + ln(x/c) below, which is fine near ln n and in decades where a head
collapses. The first bin of all scales but asinh reaches to 0.

>>> from regard.health.measure.histogram import edges
>>> [f"{edges('entropy_ratio')[at]:.2g}" for at in (0, 1, 128, 511, 512)]
['0', '1.1e-10', '1.8e-06', '1', '1']
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from regard.statistics.definitions import DEFINITIONS

BINS = 512
# statistic -> (scale, first edge, last edge), the edges on that scale; in the order of a reading's rows: those of one
# scale stand together, and so do the two that a row with one key does not have
_OF = {name: one.scale for name, one in DEFINITIONS.items()}
_OF |= dict(gain_ratio=("share", 0.0, 1.28), entropy_ratio=("ratio", -19.0, 20.0))
LAYOUT = {
    name: _OF[name] for scale in ("log", "asinh", "share", "ratio", "nats") for name in _OF if _OF[name][0] == scale
}
NAMES = tuple(LAYOUT)
ROW = {name: row for row, name in enumerate(NAMES)}
DERIVED = slice(NAMES.index("gain_ratio"), NAMES.index("entropy_ratio") + 1)
_SCALE = [scale for scale, _, _ in LAYOUT.values()]
GROUPS = {scale: slice(_SCALE.index(scale), len(_SCALE) - _SCALE[::-1].index(scale)) for scale in dict.fromkeys(_SCALE)}
KNEE = dict(ratio=0.05, nats=0.4)  # c of these two scales
SHARE_SLOPE = 0.07  # of the share scale above 1: 10⁴ lands on 1.28, and 10⁻⁴ on an edge


def _from_share(x: Tensor) -> Tensor:
    x = x.clamp_min(0.0)
    return torch.where(x <= 1.0, x.sqrt().sqrt(), 1.0 + SHARE_SLOPE * torch.log10(x))


def _from_knee(c: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.where(x >= c, x / c, 1.0 + torch.log(x.clamp_min(0.0) / c))


SCALES: dict[str, Callable[[Tensor], Tensor]] = dict(
    log=lambda x: torch.log10(x.clamp_min(0.0)),
    asinh=torch.asinh,
    share=_from_share,
    **{scale: _from_knee(c) for scale, c in KNEE.items()},
)


def find_bins(values: Tensor) -> Tensor:
    """Returns the bin of each value of [S, H, R], in the order of NAMES; values beyond the ends go to the end bins."""
    t = torch.cat([SCALES[scale](values[rows]) for scale, rows in GROUPS.items()])
    low, width = _origin(values.device, values.dtype)
    return t.sub_(low).div_(width).clamp_(0, BINS - 1).nan_to_num_(0.0).long()


@cache
def _origin(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    low = torch.tensor([LAYOUT[name][1] for name in NAMES], device=device, dtype=dtype)
    high = torch.tensor([LAYOUT[name][2] for name in NAMES], device=device, dtype=dtype)
    return low[:, None, None], ((high - low) / BINS)[:, None, None]


def _on_scale(scale: str, x: float) -> float:
    """Returns one value on its scale, without a tensor."""
    if scale in KNEE:
        x /= KNEE[scale]
        return x if x >= 1.0 else 1.0 + math.log(x) if x > 0 else -math.inf
    if scale == "asinh":
        return math.asinh(x)
    if scale == "log":
        return math.log10(x) if x > 0 else -math.inf
    return max(x, 0.0) ** 0.25 if x <= 1.0 else 1.0 + SHARE_SLOPE * math.log10(x)


def _off_scale(scale: str, t: float) -> float:
    """Inverts `_on_scale`."""
    if scale in KNEE:
        return KNEE[scale] * (t if t >= 1.0 else math.exp(t - 1.0))
    if scale == "asinh":
        return math.sinh(t)
    if scale == "log":
        return 10.0**t
    return t**4 if t <= 1.0 else 10.0 ** ((t - 1.0) / SHARE_SLOPE)


def edges(name: str) -> list[float]:
    """Returns the 513 edges of a statistic's bins, as values; the first one is 0 where the scale has none."""
    scale, low, high = LAYOUT[name]
    values = [_off_scale(scale, low + (high - low) * at / BINS) for at in range(BINS + 1)]
    return values if scale == "asinh" else [0.0, *values[1:]]


@cache
def least(name: str) -> float:
    """Returns the end of the first bin, which reaches to 0: a quantile below it is not resolved."""
    return -math.inf if LAYOUT[name][0] == "asinh" else edges(name)[1]


def quantile(name: str, counts: Tensor, share: float, low: float, high: float) -> float:
    """Returns the value below which `share` of the counts lie, interpolated on the scale, within [low, high]."""
    running = counts.numpy().cumsum()
    total = int(running[-1])
    if not total:
        return math.nan
    wanted = share * total
    at = min(int(running.searchsorted(wanted)), BINS - 1)
    before = int(running[at - 1]) if at else 0
    inside = (wanted - before) / max(int(running[at]) - before, 1)
    scale, first, last = LAYOUT[name]
    value = _off_scale(scale, first + (at + min(max(inside, 0.0), 1.0)) * (last - first) / BINS)
    return min(max(value, low), high)


def share_below(name: str, counts: Tensor, value: float) -> float:
    """Returns the share of the counts below a value; exact where the value is an edge."""
    scale, first, last = LAYOUT[name]
    position = min(max((_on_scale(scale, value) - first) / (last - first) * BINS, 0.0), float(BINS))
    whole = min(int(round(position, 6)), BINS - 1)
    numbers = counts.numpy()
    below = int(numbers[:whole].sum()) + int(numbers[whole]) * round(position - whole, 6)
    return float(below) / max(int(numbers.sum()), 1)


@dataclass(frozen=True)
class Spread:
    """One statistic of one head over all counted rows."""

    name: str
    count: int
    mean: float
    std: float
    min: float
    max: float
    histogram: Tensor

    def quantile(self, share: float) -> float:
        """Returns the value below which this share of the rows lies, within one bin's width.

        The first bin reaches to 0: a quantile below `least(name)` is not resolved further.
        """
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share must lie in [0, 1], got {share!r}")
        return quantile(self.name, self.histogram, share, self.min, self.max)

    def share_below(self, value: float) -> float:
        """Returns the share of the rows whose value is below this one."""
        return share_below(self.name, self.histogram, value)

    def to_json(self) -> dict[str, float | None]:
        """Returns mean, std, min, max and three quantiles; None for numbers that are not finite."""
        numbers = dict(mean=self.mean, std=self.std, min=self.min, max=self.max)
        numbers.update({f"q{round(100 * share):02d}": self.quantile(share) for share in (0.05, 0.5, 0.95)})
        return {key: value if math.isfinite(value) else None for key, value in numbers.items()}


class Spreads(Mapping):
    """The spreads of one head by the statistics' names, made on request."""

    def __init__(self, numbers: Sequence, histogram: Tensor, head: int) -> None:
        self._numbers, self._histogram, self._head = numbers, histogram, head  # numbers: [column][statistic][head]
        self._made: dict[str, Spread] = {}

    def __getitem__(self, name: str) -> Spread:
        if name not in self._made:
            if name not in ROW:
                raise KeyError(f"no statistic {name!r}; here: {', '.join(NAMES)}")
            row = ROW[name]
            count, mean, std, low, high = (column[row][self._head] for column in self._numbers)
            self._made[name] = Spread(name, count, mean, std, low, high, self._histogram[row, self._head])
        return self._made[name]

    def mean(self, name: str) -> float:
        """Returns the mean of a statistic without making its `Spread`."""
        return self._numbers[1][ROW[name]][self._head]

    def max(self, name: str) -> float:
        return self._numbers[4][ROW[name]][self._head]

    def min(self, name: str) -> float:
        return self._numbers[3][ROW[name]][self._head]

    def count(self, name: str) -> int:
        return self._numbers[0][ROW[name]][self._head]

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)
