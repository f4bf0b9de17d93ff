"""Trends of one head over ten samples: logits that rise towards the limit, entropy that falls towards it.

A trend is reported if the ten samples are ordered, the last three are near the limit, and the line through them,
continued for four times their span, passes it. Healthy trainings have long steep trends at the start too, but they stop
far from the limit.

>>> from regard.health.watching.trends import is_rising
>>> is_rising([1, 2, 3, 5, 4, 6, 7, 8, 9, 10]), is_rising([1, 2, 9, 8, 7, 6, 5, 4, 3, 10])
(True, False)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations

from regard.health.findings._finding import LOGIT_LIMIT
from regard.table import format_number

SAMPLES = 10
AHEAD = 4.0  # how far a trend is continued, in spans of the samples
SWAPS = 4  # of the 45 pairs may be out of order; 1 of 5,591 random orders has no more
ENTROPY_LIMIT = 0.05  # of the mean entropy ratio


def find_trends(samples: Collection[tuple[int, float, float]]) -> Iterator[tuple[str, str]]:
    """Yields ("rising" or "falling", text) for a head's last samples: (step, largest logit, entropy ratio)."""
    if len(samples) < SAMPLES:
        return
    steps, logits, ratios = zip(*samples, strict=True)
    then = steps[-1] + AHEAD * (steps[-1] - steps[0])
    if _recent_mean(logits) > LOGIT_LIMIT / 4 and is_rising(logits):  # few heads come near the limit
        logit = extrapolate(steps, logits, then)
        if logit > LOGIT_LIMIT:
            yield (
                "rising",
                f"largest logit {format_number(logits[-1])}, rising towards {format_number(logit)} by step {then:.0f}",
            )
    if _recent_mean(ratios) < 2 * ENTROPY_LIMIT and is_rising(ratios[::-1]):
        ratio = extrapolate(steps, ratios, then)
        if ratio < ENTROPY_LIMIT:
            yield "falling", f"entropy ratio {ratios[-1]:.3g}, falling towards {max(ratio, 0):.2g} by step {then:.0f}"


def is_rising(values: Sequence[float]) -> bool:
    """True if all but a few pairs of values are in ascending order."""
    return sum(not a < b for a, b in combinations(values, 2)) <= SWAPS


def _recent_mean(values: Sequence[float]) -> float:
    return sum(values[-3:]) / 3


def extrapolate(steps: Sequence[float], values: Sequence[float], then: float) -> float:
    """The value at step `then` of the least-squares line through (steps, values)."""
    middle, mean = sum(steps) / len(steps), sum(values) / len(values)
    spread = sum((step - middle) ** 2 for step in steps)
    products = ((step - middle) * (value - mean) for step, value in zip(steps, values, strict=True))
    return mean + (sum(products) / spread if spread else 0.0) * (then - middle)
