"""Bands in which the numbers of a training move from step to step, and what leaves them.

| number | leaves its band |
| --- | --- |
| the loss, the gradient's norm | excess: the sum of (deviation − 2) over steps, each deviation 5 at most, comes to 8 |
| the loss | or rise: the mean of 16 steps lies 2.3 noises above the lowest one of the last 96 |
| a layer's largest logit, the norm of its values | two steps beyond `factor` times all of the eight steps before |

A deviation is the distance from the median of the last 32 values in units of their spread (1.4826 × the median
deviation, but at least `share` of the median). Three steps far outside are an excess, and so are eight at 3 deviations.
On a plateau the rise passes 2.3 in 100,000 steps: never in white noise or where steps are correlated by 0.2, 11 times
where they are correlated by 0.4, 14 times in heavy tails (Student's t of 3).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

WINDOW, LEAST = 32, 12  # values that make the band, and how many it takes
DRIFT, MOST, EXCESS = 2.0, 5.0, 8.0  # deviations that a step is allowed, that it counts for, and that are too many
FAR = 3.0  # deviations beyond which a value does not move the band
MEAN, RISE, MEMORY = 16, 2.3, 96  # steps of a mean, its rise in noises, and how far back the lowest one may lie
SETTLED = 64  # consecutive steps outside after which the new level is the band


class LossBand:
    """Follows one number over steps; `rises` False is for numbers that may grow: the gradient's norm, a logit."""

    def __init__(self, spreads: float = 1.0, share: float = 0.04 / 6, rises: bool = True) -> None:
        self.spreads, self.share, self.rises = spreads, share, rises
        self.last = math.nan
        self.excess = 0.0
        self.rise = 0.0  # of the mean, in noises
        self.outside = 0  # consecutive steps
        self.first_outside: int | None = None
        self.settled: tuple[int, float, float] | None = None  # at a new level since; the old one, and where it ends
        self._values: deque[float] = deque(maxlen=WINDOW)  # that make the band
        self._recent: deque[tuple[float, float]] = deque(maxlen=MEMORY)  # all: as it was, and held within the band

    def add(self, step: int, value: float) -> None:
        self.last = value
        middle, unit = self._describe()
        is_finite = math.isfinite(value)
        deviation = (value - middle) / unit if is_finite else MOST
        self.excess = min(max(0.0, self.excess + min(deviation, MOST) - DRIFT), EXCESS + 1)
        if is_finite:
            self._recent.append((value, min(value, middle + FAR * unit)))
            self.rise = find_rise(self._recent) if self.rises else 0.0
            if deviation <= FAR or not self.excess:
                self._values.append(value)
                if self.settled and self.middle <= self.settled[2]:
                    self.settled = None
        if not (self.excess or self.is_rising):
            self.outside, self.first_outside = 0, None
            return
        self.outside += 1
        if self.first_outside is None and deviation > FAR:
            self.first_outside = step
        elif self.first_outside is None and self.is_rising:
            self.first_outside = step - MEAN + 1
        if self.outside >= SETTLED and is_finite:
            self._settle(step, value)

    def _describe(self) -> tuple[float, float]:
        """Returns the middle of the band and the unit of deviations; infinite while too few values are known."""
        if len(self._values) < LEAST:
            return 0.0, math.inf
        middle = self.middle
        spread = 1.4826 * median(abs(x - middle) for x in self._values)
        return middle, max(self.spreads * spread, self.share * abs(middle), 1e-30)

    def _settle(self, step: int, value: float) -> None:
        """Takes the level that the number has kept as the band."""
        middle, unit = self._describe()
        since = step - self.outside + 1 if self.first_outside is None else self.first_outside
        self.settled = since, *(self.settled[1:] if self.settled else (middle, middle + FAR * unit))
        self._values = deque([value], maxlen=WINDOW)
        self._recent.clear()
        self.excess, self.rise, self.outside, self.first_outside = 0.0, 0.0, 0, None

    @property
    def is_suspicious(self) -> bool:
        """True if the next steps are worth a sample."""
        return self.excess >= EXCESS / 2 or self.rise > 0.75 * RISE

    @property
    def has_leapt(self) -> bool:
        return self.excess >= EXCESS

    @property
    def is_rising(self) -> bool:
        return self.rise > RISE and self.excess < MOST - DRIFT

    @property
    def has_jumped(self) -> bool:
        return self.has_leapt or self.is_rising

    @property
    def middle(self) -> float:
        return median(self._values) if self._values else math.nan

    def state(self) -> dict[str, Any]:
        return {
            "values": list(self._values), "recent": list(self._recent), "outside": self.outside, "excess": self.excess,
            "rise": self.rise, "first": self.first_outside, "settled": self.settled,
        }  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        self._values = deque(state["values"], maxlen=WINDOW)
        self._recent = deque(map(tuple, state.get("recent", ())), maxlen=MEMORY)
        self.outside, self.first_outside = state["outside"], state["first"]
        self.excess, self.rise = state.get("excess", 0.0), state.get("rise", 0.0)
        self.settled = state.get("settled")


def find_rise(pairs: Collection[tuple[float, float]]) -> float:
    """Returns how far the mean of the last 16 values lies above the lowest mean of 16 before, in noises.

    Noise is the larger of two spreads: of steps from one to the next, and of the values before the last 16.

    pairs: (value, the same held within the band): noise is that of the first, so that one jump is no rise.

    >>> from regard.health.watching.bands import find_rise
    >>> noise = [(x, x) for x in [0.1, -0.1] * 24]
    >>> find_rise(noise) < 0.1, find_rise([*noise, *((1.0 + x, 1.0 + x) for x, _ in noise[:16])]) > 4.0
    (True, True)
    """
    if len(pairs) < 2 * MEAN:
        return 0.0
    values, held = zip(*pairs, strict=True)
    middle = median(values[:-MEAN])
    steps = median(abs(b - a) for a, b in pairwise(values)) / math.sqrt(2)
    noise = 1.4826 * max(steps, median(abs(x - middle) for x in values[:-MEAN]))
    total = lowest = sum(held[:MEAN])
    for leaves, comes in zip(held, held[MEAN:-MEAN], strict=False):
        total += comes - leaves
        lowest = min(lowest, total)
    return max(0.0, (sum(held[-MEAN:]) - lowest) / MEAN) / noise if noise else 0.0


class Level:
    """Follows one positive number over steps, and finds that it has changed between two of them by a factor."""

    STEPS, BEFORE = 2, 8  # that lie beyond, and that they are compared with

    def __init__(self, factor: float) -> None:
        self.factor = factor  # below 1: finds a fall
        self._values: deque[float] = deque(maxlen=self.BEFORE + self.STEPS)

    def add(self, value: float) -> tuple[float, float] | None:
        """Returns (median before, now) at the step at which a change is found."""
        self._values.append(value)
        if len(self._values) < self.BEFORE + self.STEPS:
            return None
        before, now = list(self._values)[: self.BEFORE], list(self._values)[self.BEFORE :]
        if self.factor > 1:
            has_changed = min(now) > self.factor * max(max(before), 0.0)
        else:
            has_changed = max(now) < self.factor * min(before)
        if not has_changed:
            return None
        self._values.clear()
        return median(before), now[-1]


class Steady:
    """Follows one number that training leaves alone, as a scale, and finds that it was changed for good.

    >>> from regard.health.watching.bands import Steady
    >>> steady = Steady(1.2)
    >>> [steady.add(x) for x in [0.25] * 9 + [1.0, 1.0]][-2:]
    [None, (0.25, 1.0)]

    One that comes back to its value is one that varies, of which nothing is told.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._value, self._same, self._other, self._varies = math.nan, 0, 0, False

    def add(self, value: float) -> tuple[float, float] | None:
        """Returns (value before, now) at each step at which it is another, once that has lasted two steps."""
        if 1.0 / self.factor < value / self._value < self.factor:
            self._varies |= self._other > 0
            self._same, self._other = self._same + 1, 0
        elif self._same < Level.BEFORE:
            self._value, self._same, self._other = value, 1, 0
        else:
            self._other += 1
        return (self._value, value) if self._other >= Level.STEPS and not self._varies else None
