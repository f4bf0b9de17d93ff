"""The heads that differ most from the model's other heads, for a page without problems."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from regard.table import format_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regard.health.readings.heads import HeadReading

COMPARED = ("entropy_ratio", "max_weight", "first_key_mass", "distance", "max_logit", "logit_variance")
LISTED = 6
LEAST_HEADS = 4


class Unusual(NamedTuple):
    """A head, the statistic in which it differs most, its mean there and that of the middle head."""

    head: HeadReading
    statistic: str
    value: float
    usual: float

    def __str__(self) -> str:
        value, usual = format_number(self.value), format_number(self.usual)
        return f"{self.statistic.replace('_', ' ')} {value}, where the middle head has {usual}"


def find_unusual(heads: Sequence[HeadReading], count: int = LISTED) -> list[Unusual]:
    """The heads farthest from the middle one, measured in the distance of a usual head from it."""
    if len(heads) < LEAST_HEADS:
        return []
    best: dict[int, tuple[float, Unusual]] = {}
    for name in COMPARED:
        means = [(at, mean) for at, head in enumerate(heads) if (mean := head.statistics.mean(name)) == mean]
        if not means:
            continue
        middle = median(mean for _, mean in means)
        spread = median(abs(mean - middle) for _, mean in means)
        for at, mean in means:
            far = abs(mean - middle) / (spread + 0.05 * abs(middle) + 1e-9)
            if at not in best or far > best[at][0]:
                best[at] = far, Unusual(heads[at], name, mean, middle)
    ranked = sorted(best.values(), key=lambda pair: -pair[0])
    return [unusual for _, unusual in ranked[:count]]
