"""What a monitor warns of: heads that are ill in sample after sample, and heads on their way there.

Ill is what the findings call so, *exploding logits*, *collapsed*, *dying gradient*, *scale off* and *dead* (by its
values), in each of the last ten samples: one odd batch is no illness. On its way is a head whose last ten samples are
in order but for a few pairs, whose last three have come to a quarter of the largest logit that is allowed, or to twice
the smallest entropy ratio, and whose line, followed four times its span ahead, passes the limit. Sound trainings begin
with long, steep ways too; they stop before that.

>>> from regard.health.watching.trends import ordered
>>> ordered([1, 2, 3, 5, 4, 6, 7, 8, 9, 10]), ordered([1, 2, 9, 8, 7, 6, 5, 4, 3, 10])
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
AHEAD = 4.0  # times the span of the samples
SWAPS = 4  # pairs of the 45 out of order: of samples that only scatter, one order in 5 591 has no more
ENTROPY_LIMIT = 0.05  # of the mean over rows
ILL = {
    exploding_logits: "its largest logit is {:.3g}",
    collapsed: "the 95th percentile of its entropy ratio is {:.2g}",
    dying_gradient: "no gradient passes a share {:.2g} of its rows",
    scale_off: "its logits' variance is {:.3g}",
    dead: "its values differ by {:.2g} from key to key",
}

Place = tuple[str, int]  # layer and head


class Trends:
    """The last samples of every head; each thing is told once of each head."""

    def __init__(self) -> None:
        self._numbers: dict[Place, deque] = {}
        self._ill: dict[tuple[str, Place], int] = {}  # in how many samples on end
        self._told: set[tuple[str, Place]] = set()

    def add(
        self,
        rows: Iterable[dict],
        heads: Sequence[HeadReading],
        labels: Mapping[int, str],
        layers: Sequence[Layer] = (),
    ) -> list[str]:
        """What there is to tell after one more sample: its rows, its heads and their layers, whose labels these are."""
        new: dict[str, list[tuple[Place, str]]] = {}
        silent = self._told | {("falling", (labels[head.index], head.head)) for head in positional_heads(heads)[1]}
        for kind, place, what in chain(self._illnesses(heads, layers, labels), self._ways(rows)):
            if (kind, place) not in silent:
                self._told.add((kind, place))
                new.setdefault(kind, []).append((place, what))
        return [_text(found) for found in new.values()]

    def _illnesses(
        self, heads: Sequence[HeadReading], layers: Sequence[Layer], labels: Mapping[int, str]
    ) -> Iterator[tuple[str, Place, str]]:
        for module, words in ILL.items() if heads else ():
            kind: str = module.KIND
            found: dict[tuple[int, int], float] = {}
            for finding in module.find(heads) if hasattr(module, "find") else module.find_in_layers(layers):
                if finding.severity != "note":
                    found |= dict(zip(finding.places, finding.measured, strict=True))
            for head in heads:
                number = found.get((head.index, head.head))
                key = kind, (labels[head.index], head.head)
                self._ill[key] = 0 if number is None else self._ill.get(key, 0) + 1
                if number is not None and self._ill[key] >= SAMPLES:
                    yield *key, f"{kind} in each of the last {SAMPLES} samples; {words.format(number)}"

    def _ways(self, rows: Iterable[dict]) -> Iterator[tuple[str, Place, str]]:
        for row in rows:
            place = row["layer"], row["head"]
            numbers = self._numbers.setdefault(place, deque(maxlen=SAMPLES))
            numbers.append((row["step"], row["max_logit"], row["entropy_ratio"]))
            if len(numbers) < SAMPLES:
                continue
            steps, tops, means = zip(*numbers, strict=True)
            then = steps[-1] + AHEAD * (steps[-1] - steps[0])
            top, mean = extended(steps, tops, then), extended(steps, means, then)
            by = f"by step {then:.0f}"
            if ordered(tops) and _late(tops) > LOGIT_LIMIT / 4 and top > LOGIT_LIMIT:
                yield "rising", place, f"its largest logit is {tops[-1]:.3g} and on its way to {top:.3g} {by}"
            if ordered(means[::-1]) and _late(means) < 2 * ENTROPY_LIMIT and mean < ENTROPY_LIMIT:
                yield (
                    "falling",
                    place,
                    f"its entropy ratio is {means[-1]:.3g} and on its way to {max(mean, 0):.2g} {by}",
                )


def _text(found: Sequence[tuple[Place, str]]) -> str:
    """One warning about all heads that have come to the same."""
    ((layer, head), what), *others = found
    more = f" ({len(others)} more head{'' if len(others) == 1 else 's'} likewise)" if others else ""
    return f"{layer}, head {head}: {what}{more}"


def ordered(values: Sequence[float]) -> bool:
    """Do they rise, but for a few pairs?"""
    return sum(not a < b for a, b in combinations(values, 2)) <= SWAPS


def _late(values: Sequence[float]) -> float:
    return sum(values[-3:]) / 3


def extended(steps: Sequence[float], values: Sequence[float], then: float) -> float:
    """The least-squares line through (steps, values), at `then`."""
    middle, mean = sum(steps) / len(steps), sum(values) / len(values)
    spread = sum((step - middle) ** 2 for step in steps)
    products = ((step - middle) * (value - mean) for step, value in zip(steps, values, strict=True))
    return mean + (sum(products) / spread if spread else 0.0) * (then - middle)
