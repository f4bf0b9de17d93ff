"""The readings of one head, statistic by statistic: `.mean`, `.std`, `.min`, `.max`, `.quantile(0.5)`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from regard.health.readings import histogram as bins
from regard.health.readings.histogram import NAMES, ROW


@dataclass(frozen=True)
class Spread:
    """One statistic of one head over all counted rows: .mean, .std, .min, .max, .quantile(0.5)."""

    name: str
    count: int
    mean: float
    std: float
    min: float
    max: float
    histogram: Tensor

    def quantile(self, share: float) -> float:
        """The value below which this share of the rows lies, from the histogram, within one bin's width.

        The first bin reaches to 0: of a quantile below `bins.least(name)` only that is known, and its digits are not.
        """
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share must lie in [0, 1], got {share!r}")
        return bins.quantile(self.name, self.histogram, share, self.min, self.max)

    def share_below(self, value: float) -> float:
        """The share of the rows whose value is below this one."""
        return bins.share_below(self.name, self.histogram, value)

    def to_json(self) -> dict[str, float | None]:
        numbers = dict(mean=self.mean, std=self.std, min=self.min, max=self.max)
        numbers.update({f"q{round(100 * share):02d}": self.quantile(share) for share in (0.05, 0.5, 0.95)})
        return {key: value if math.isfinite(value) else None for key, value in numbers.items()}


class Spreads(Mapping):
    """The spreads of one head by the statistics' names, made when asked for."""

    def __init__(self, numbers: list, histogram: Tensor, head: int) -> None:
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
        """The mean alone, at no cost."""
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
