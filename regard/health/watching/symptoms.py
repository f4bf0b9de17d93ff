"""What is wrong with single heads in one sample, and for how long it has been so.

| symptom | counts after | alone it is |
| --- | --- | --- |
| an output is NaN or infinite | one sample | critical |
| logit beyond 100 | two consecutive samples | a note; critical with a fall, see below |
| most heads of the model collapsed, or without gradient | three consecutive samples | critical |
| collapsed, dying gradient, scale off, dead | ten consecutive samples | a warning |
| diffuse | ten consecutive samples | a note while training is young, then a warning |
| logits rising, entropy falling towards the limit | a trend over ten samples, which two more confirm | a warning |

Logits beyond 100 harm only where they saturate the softmax. So they are critical where the head's entropy ratio or
gradient gain has fallen to half of what it was, where it is collapsed or without gradient, or where the loss that the
user passes in has risen; else a note, because sound trainings at high rates have passed 100 and come back. Where the
largest logit alone is measured they are a warning.

No head is rising whose soft cap keeps its logits within the limit (the flag "bounded"). A trend is there if ten samples
are ordered, the last three are near the limit, and the line through them, continued for four times their span, passes
it. Healthy trainings have long steep trends at the start too, but they stop far from the limit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from regard.health.checks.finding import LOGIT_LIMIT
from regard.health.watching.sample import WATCHED
from regard.table import format_number

SAMPLES = 10  # of a trend
CONFIRMED = 3  # consecutive samples that have the trend
AHEAD = 4.0  # how far a trend is continued, in spans of the samples
SWAPS = 4  # of the 45 pairs may be out of order; 1 of 5,591 random orders has no more
ENTROPY_LIMIT = 0.05  # of the mean entropy ratio
URGENT = 2  # consecutive samples with a logit beyond the limit
FALL = 0.5  # of the entropy ratio or gain that is left, from which on large logits do harm
WIDESPREAD, MOST = 3, 0.5  # consecutive samples, and the share of the heads, from which on a slow finding is urgent
YOUNG = 1000  # steps during which diffuse heads are a note
NUMBERS: dict[str, Callable[[float], str]] = {
    "exploding logits": lambda x: f"largest logit {format_number(x)}",
    "collapsed": lambda x: f"95th percentile of the entropy ratio {format_number(x)}",
    "dying gradient": lambda x: f"no gradient on {x:.0%} of the rows",
    "scale off": lambda x: f"logit variance {format_number(x)}",
    "dead": lambda x: f"values differ by {format_number(x)}",
    "diffuse": lambda x: f"mean entropy ratio {format_number(x)}",
}
WIDE = ("collapsed", "dying gradient", "dead")
EXEMPT = {"falling": "positional", "rising": "bounded"}

Place = tuple[str, int]  # layer label, head
NOWHERE: Place = ("", -1)  # the place of what no head has
Flags = Mapping[str, Mapping[Place, float]]


class Symptom(NamedTuple):
    """One head that has a problem: which, how severe it is, where, its number, and what was seen."""

    kind: str
    severity: str
    place: Place
    number: float
    text: str


class Symptoms:
    """Follows every head over samples."""

    def __init__(self) -> None:
        self._numbers: dict[Place, deque] = {}
        self._best: dict[Place, tuple[float, float]] = {}  # the largest entropy ratio and gain so far
        self._streaks: dict[str, dict[Place, int]] = {}  # by kind: consecutive samples that had it
        self._wide_streaks: dict[str, int] = {}

    def find(self, step: int, rows: Sequence[dict], flags: Flags, is_loss_high: bool = False) -> Iterator[Symptom]:
        """Yields the symptoms after one more sample: a dict per head (see `head_rows`), and what findings say."""
        for place, number in flags.get("not finite", {}).items():
            already = "its queries, keys or values already were, so the cause lies before it" if number > 1 else (
                "its queries, keys and values were finite, so the cause lies in the attention itself"
            )  # fmt: skip
            yield Symptom("not finite", "critical", place, number, f"its output is NaN or infinite; {already}")
        places = [(row["layer"], row["head"]) for row in rows]
        measured, fallen = set(places), self._find_fallen(rows, flags)
        unknown = {
            place for place, row in zip(places, rows, strict=True) if row["entropy_ratio"] != row["entropy_ratio"]
        }
        for kind in (rule.kind for check in WATCHED for rule in check.RULES):
            found, describe = flags.get(kind, {}), NUMBERS.get(kind, format_number)
            wide = kind in WIDE and len(found) > MOST * len(places)
            self._wide_streaks[kind] = self._wide_streaks.get(kind, 0) + 1 if wide else 0
            severity, needed = self._judge(kind, step)
            before = self._streaks.get(kind, {})
            streaks = self._streaks[kind] = {place: count for place, count in before.items() if place not in measured}
            for place in (place for place in places if place in found) if found else ():
                streaks[place] = before.get(place, 0) + 1
                if streaks[place] >= needed:
                    does_harm = kind == "exploding logits" and (place in fallen or is_loss_high)
                    if kind == "exploding logits" and place in unknown:
                        severity = "warning"
                    text = f"{kind} in each of the last {needed} samples ({describe(found[place])})"
                    yield Symptom(kind, "critical" if does_harm else severity, place, found[place], text)
        yield from self._find_trends(rows, flags)

    def _find_trends(self, rows: Sequence[dict], flags: Flags) -> Iterator[Symptom]:
        for row in rows:
            place = row["layer"], row["head"]
            numbers = self._numbers.setdefault(place, deque(maxlen=SAMPLES))
            numbers.append((row["step"], row["max_logit"], row["entropy_ratio"]))
            trends = dict(find_trends(numbers))
            for kind, exempt in EXEMPT.items():
                streaks = self._streaks.setdefault(kind, {})
                streaks[place] = streaks.get(place, 0) + 1 if kind in trends else 0
                if streaks[place] >= CONFIRMED and place not in flags.get(exempt, {}):
                    number = row["max_logit" if kind == "rising" else "entropy_ratio"]
                    yield Symptom(kind, "warning", place, number, trends[kind])

    def _find_fallen(self, rows: Sequence[dict], flags: Flags) -> set[Place]:
        """Returns the heads whose entropy ratio or gradient gain is half of what it was, or gone."""
        fallen = {place for kind in ("collapsed", "dying gradient") for place in flags.get(kind, {})}
        for row in rows:
            place, now = (row["layer"], row["head"]), (row["entropy_ratio"], row.get("gain_ratio", math.nan))
            best = self._best.get(place, now)
            if any(x < FALL * y for x, y in zip(now, best, strict=True)):
                fallen.add(place)
            self._best[place] = tuple(max(x, y) if x == x and y == y else y if x != x else x
                                      for x, y in zip(now, best, strict=True))  # type: ignore[assignment]  # fmt: skip
        return fallen

    def _judge(self, kind: str, step: int) -> tuple[str, int]:
        """Returns the severity of a kind now, and how many consecutive samples it takes."""
        if kind == "exploding logits":
            return "note", URGENT
        if self._wide_streaks.get(kind, 0) >= WIDESPREAD:
            return "critical", WIDESPREAD
        if kind == "diffuse" and step <= YOUNG:
            return "note", SAMPLES
        return "warning", SAMPLES

    def state(self) -> dict:
        """Returns what it knows as plain values."""
        return {
            "numbers": [[*place, list(map(list, numbers))] for place, numbers in self._numbers.items()],
            "best": [[*place, *best] for place, best in self._best.items()],
            "streaks": {kind: [[*place, n] for place, n in found.items()] for kind, found in self._streaks.items()},
            "wide": self._wide_streaks,
        }

    def load(self, state: Mapping) -> None:
        self._numbers = {(layer, head): deque(map(tuple, x), maxlen=SAMPLES) for layer, head, x in state["numbers"]}
        self._best = {(layer, head): (ratio, gain) for layer, head, ratio, gain in state["best"]}
        self._streaks = {kind: {(a, b): n for a, b, n in found} for kind, found in state["streaks"].items()}
        self._wide_streaks = dict(state["wide"])


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
    """True if all but a few pairs of values are in ascending order.

    >>> from regard.health.watching.symptoms import is_rising
    >>> is_rising([1, 2, 3, 5, 4, 6, 7, 8, 9, 10]), is_rising([1, 2, 9, 8, 7, 6, 5, 4, 3, 10])
    (True, False)
    """
    return sum(not a < b for a, b in combinations(values, 2)) <= SWAPS


def _recent_mean(values: Sequence[float]) -> float:
    return sum(values[-3:]) / 3


def extrapolate(steps: Sequence[float], values: Sequence[float], then: float) -> float:
    """The value at step `then` of the least-squares line through (steps, values)."""
    middle, mean = sum(steps) / len(steps), sum(values) / len(values)
    spread = sum((step - middle) ** 2 for step in steps)
    products = ((step - middle) * (value - mean) for step, value in zip(steps, values, strict=True))
    return mean + (sum(products) / spread if spread else 0.0) * (then - middle)
