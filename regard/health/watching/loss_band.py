"""The band in which a training's loss moves: noise around its recent median. A loss beyond it draws samples closer.

Outside: above the median of the last 32 by six times their spread (1.4826 × the median deviation) and by 4 %; or not
finite. Three steps in a row outside are a jump; the band then stands still until the loss is back in it.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

WINDOW, LEAST = 32, 12  # losses that make the band, and how many it takes
SPREADS, SHARE = 6.0, 0.04
JUMP = 3  # consecutive losses outside


class LossBand:
    """Follows one number over steps: the loss, or the norm of the gradient."""

    def __init__(self, spreads: float = SPREADS, share: float = SHARE) -> None:
        self.spreads, self.share = spreads, share
        self.last = math.nan
        self.outside = 0  # consecutive values
        self.first_outside: int | None = None  # the step of the first
        self._values: deque[float] = deque(maxlen=WINDOW)

    def add(self, step: int, value: float) -> None:
        self.last = value
        limit = self.limit()
        if math.isfinite(value) and not value > limit:
            self._values.append(value)
            self.outside, self.first_outside = 0, None
            return
        self.outside += 1
        self.first_outside = step if self.first_outside is None else self.first_outside

    def limit(self) -> float:
        """Returns the upper end of the band; infinite while too few values are known."""
        if len(self._values) < LEAST:
            return math.inf
        middle = median(self._values)
        spread = 1.4826 * median(abs(x - middle) for x in self._values)
        return max(middle + self.spreads * spread, middle + self.share * abs(middle))

    @property
    def has_jumped(self) -> bool:
        return self.outside >= JUMP

    @property
    def middle(self) -> float:
        return median(self._values) if self._values else math.nan

    def state(self) -> dict[str, Any]:
        return {"values": list(self._values), "outside": self.outside, "first": self.first_outside}

    def load(self, state: dict[str, Any]) -> None:
        self._values = deque(state["values"], maxlen=WINDOW)
        self.outside, self.first_outside = state["outside"], state["first"]
