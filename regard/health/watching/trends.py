"""What a `Monitor` warns of: heads that stay unhealthy over ten samples, and heads on the way there.

Unhealthy means that a finding (`WATCHED`) has the head in each of its last ten samples. On the way means that the last
ten samples are ordered, the last three are near the limit, and their trend, continued for four times their span, passes
it. Healthy trainings have long steep trends at the start too, but they stop far from the limit.

>>> from regard.health.watching.trends import is_rising
>>> is_rising([1, 2, 3, 5, 4, 6, 7, 8, 9, 10]), is_rising([1, 2, 9, 8, 7, 6, 5, 4, 3, 10])
(True, False)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations

from regard.health.findings import collapsed, dead, dying_gradient, exploding_logits, scale_off
from regard.health.findings._finding import LOGIT_LIMIT, positional_heads
from regard.health.measurement.recorder import Layer
from regard.health.readings.heads import HeadReading

SAMPLES = 10
AHEAD = 4.0  # how far a trend is continued, in spans of the samples
SWAPS = 4  # of the 45 pairs may be out of order; 1 of 5,591 random orders has no more
ENTROPY_LIMIT = 0.05  # of the mean entropy ratio
WATCHED = {
    exploding_logits: "largest logit {:.3g}",
    collapsed: "95th percentile of the entropy ratio {:.2g}",
    dying_gradient: "no gradient on {:.0%} of the rows",
    scale_off: "logit variance {:.3g}",
    dead: "values differ by {:.2g}",
}

Place = tuple[str, int]  # layer label, head
Event = tuple[str, Place, str]  # kind, where, text


class Trends:
    """The last samples of every head; each kind of warning is given once per head."""

    def __init__(self) -> None:
        self._numbers: dict[Place, deque] = {}
        self._streaks: dict[tuple[str, Place], int] = {}  # consecutive unhealthy samples
        self._reported: set[tuple[str, Place]] = set()

    def add(
        self,
        rows: Iterable[dict],
        heads: Sequence[HeadReading],
        labels: Mapping[int, str],
        layers: Sequence[Layer] = (),
    ) -> list[str]:
        """The new warnings after one more sample: its rows, its heads and layers, and the layers' labels by index."""
        new: dict[str, list[tuple[Place, str]]] = {}
        positional = {("falling", (labels[head.index], head.head)) for head in positional_heads(heads)[1]}
        for kind, place, text in chain(self._unhealthy(heads, layers, labels), self._on_the_way(rows)):
            if (kind, place) not in self._reported | positional:
                self._reported.add((kind, place))
                new.setdefault(kind, []).append((place, text))
        return [_describe(events) for events in new.values()]

    def _unhealthy(
        self, heads: Sequence[HeadReading], layers: Sequence[Layer], labels: Mapping[int, str]
    ) -> Iterator[Event]:
        for module, text in WATCHED.items() if heads else ():
            kind: str = module.KIND
            found: dict[tuple[int, int], float] = {}
            for finding in module.find(heads) if hasattr(module, "find") else module.find_in_layers(layers):
                if finding.severity != "note":
                    found |= dict(zip(finding.places, finding.measured, strict=True))
            for head in heads:
                number = found.get((head.index, head.head))
                key = kind, (labels[head.index], head.head)
                self._streaks[key] = 0 if number is None else self._streaks.get(key, 0) + 1
                if number is not None and self._streaks[key] >= SAMPLES:
                    yield *key, f"{kind} in each of the last {SAMPLES} samples ({text.format(number)})"

    def _on_the_way(self, rows: Iterable[dict]) -> Iterator[Event]:
        for row in rows:
            place = row["layer"], row["head"]
            numbers = self._numbers.setdefault(place, deque(maxlen=SAMPLES))
            numbers.append((row["step"], row["max_logit"], row["entropy_ratio"]))
            if len(numbers) < SAMPLES:
                continue
            steps, logits, ratios = zip(*numbers, strict=True)
            then = steps[-1] + AHEAD * (steps[-1] - steps[0])
            logit, ratio = extrapolate(steps, logits, then), extrapolate(steps, ratios, then)
            if is_rising(logits) and _recent_mean(logits) > LOGIT_LIMIT / 4 and logit > LOGIT_LIMIT:
                yield "rising", place, f"largest logit {logits[-1]:.3g}, rising towards {logit:.3g} by step {then:.0f}"
            if is_rising(ratios[::-1]) and _recent_mean(ratios) < 2 * ENTROPY_LIMIT and ratio < ENTROPY_LIMIT:
                text = f"entropy ratio {ratios[-1]:.3g}, falling towards {max(ratio, 0):.2g} by step {then:.0f}"
                yield "falling", place, text


def _describe(events: Sequence[tuple[Place, str]]) -> str:
    """One warning for all heads with the same problem."""
    ((layer, head), text), *others = events
    more = f"; also {len(others)} more head{'' if len(others) == 1 else 's'}" if others else ""
    return f"{layer}, head {head}: {text}{more}"


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
