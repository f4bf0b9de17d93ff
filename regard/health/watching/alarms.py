"""`Alarm`: one event of a monitor, and the rules that raise one.

| rule | raised | severity |
| --- | --- | --- |
| an output is NaN or infinite | at once | critical |
| logit beyond 100 | in two consecutive samples | critical |
| most heads of the model collapsed, or without gradient | in three consecutive samples | critical |
| collapsed, dying gradient, scale off, dead | in ten consecutive samples | warning |
| diffuse | in ten consecutive samples | a note while training is young, then a warning |
| logits rising, entropy falling towards the limit | by a trend over ten samples | warning |

No head is rising that was reported beyond the limit, or whose soft cap keeps its logits within it (the flag "bounded").
Each is raised once per head; heads that get the same alarm in one sample share it, and its text quotes the worst. After
the first alarm of a kind the next one waits until twice as many heads have it, so that a large model raises a few, not
hundreds.

A trend is reported if the ten samples are ordered, the last three are near the limit, and the line through them,
continued for four times their span, passes it. Healthy trainings have long steep trends at the start too, but they stop
far from the limit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

from regard.health.findings._finding import LOGIT_LIMIT
from regard.table import format_number

SAMPLES = 10  # of a trend
AHEAD = 4.0  # how far a trend is continued, in spans of the samples
SWAPS = 4  # of the 45 pairs may be out of order; 1 of 5,591 random orders has no more
ENTROPY_LIMIT = 0.05  # of the mean entropy ratio
URGENT = 2  # consecutive samples with a logit beyond the limit
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
WORSE_BELOW = ("collapsed", "dead", "falling")  # kinds whose worst head has the smallest number
WIDE = ("collapsed", "dying gradient")
CLIP = "regard.qk_clip(model, 50) after every optimizer step"
CLIP_LOWER = "a lower threshold of QK-clip"  # where one is in use
BOUND = f"regard.using(model, qk_norm=True), {CLIP}, or regard.using(model, softcap=30)"
ACTIONS = {  # what to do about each kind
    "exploding logits": f"lower the learning rate, and bound the scores with {BOUND}",
    "rising": f"lower the learning rate, or bound the scores with {BOUND}",
    "collapsed": f"restore an earlier checkpoint, lower the learning rate, and bound the scores with {BOUND}",
    "falling": f"lower the learning rate or warm up longer, and bound the scores with {BOUND}",
    "dying gradient": f"softmax is saturated: lower the learning rate, and bound the scores with {BOUND}",
    "scale off": f"if the weights of q and k have grown, use regard.using(model, qk_norm=True) or {CLIP}; else check "
    "that scores are multiplied by 1/√d exactly once",
    "dead": "check its value projection for zeros left by pruning, conversion or weight decay",
    "diffuse": "check that scores are not scaled twice; train on, or try a temperature below 1",
}
NOT_FINITE = "its output is NaN or infinite; stop, go back to the last checkpoint, lower the learning rate"

Place = tuple[str, int]  # layer label, head
Flags = Mapping[str, Mapping[Place, float]]
Event = tuple[str, str, Place, float, str]  # kind, severity, where, its number, text


@dataclass(frozen=True)
class Alarm:
    """An event: at which step, of which kind, how severe, about which heads, what was seen, and what to do about it."""

    step: int
    kind: str
    severity: str  # "critical", "warning" or "note"
    heads: tuple[Place, ...]  # (layer, head)
    text: str
    action: str = ""  # what to do; an empty string where `text` says so

    def __str__(self) -> str:
        return f"step {self.step}: {self.text}" + (f". To do: {self.action}." if self.action else "")

    def to_json(self) -> dict:
        """Returns the alarm as a line of the log holds it."""
        found = asdict(self)
        return {"step": found.pop("step"), "alarm": found.pop("kind"), **found}


class AlarmRules:
    """Follows every head over samples and raises alarms."""

    def __init__(self) -> None:
        self._numbers: dict[Place, deque] = {}
        self._streaks: dict[str, dict[Place, int]] = {}  # by kind: consecutive samples that had it
        self._wide_streaks: dict[str, int] = {}
        self._raised: set[tuple[str, str, Place]] = set()
        self._waiting: dict[tuple[str, str], list[Event]] = {}  # what the next alarm will tell
        self._head_counts: dict[tuple[str, str], int] = {}  # heads in the alarms so far, by kind and severity
        self.is_suspicious = False  # is a head over a limit that has not been reported?

    def add(self, step: int, rows: Sequence[dict], flags: Flags, is_clipped: bool = False) -> list[Alarm]:
        """Returns the new alarms after one more sample: a dict per head (see `head_rows`), and what findings say.

        is_clipped: True if QK-clip is in use, so that actions do not suggest it.
        """
        for event in self._events(step, rows, flags):
            if event[:3] not in self._raised:
                self._raised.add(event[:3])
                self._waiting.setdefault(event[:2], []).append(event)
        over = {(kind, place) for kind in ("exploding logits", *WIDE) for place in flags.get(kind, {})}
        reported = {(kind, place) for kind, severity, place in self._raised if severity != "note"}
        self.is_suspicious = bool(over - reported)
        new = []
        for (kind, severity), events in list(self._waiting.items()):
            if kind == "rising":
                events = [event for event in events if ("exploding logits", "critical", event[2]) not in self._raised]
            before = self._head_counts.get((kind, severity), 0)
            if events and len(events) >= before:
                self._head_counts[kind, severity] = before + len(events)
                del self._waiting[kind, severity]
                places = tuple(place for _, _, place, *_ in events)
                action = ACTIONS.get(kind, "").replace(CLIP, CLIP_LOWER if is_clipped else CLIP)
                new.append(Alarm(step, kind, severity, places, _describe(events), action))
        return new

    def _events(self, step: int, rows: Sequence[dict], flags: Flags) -> Iterator[Event]:
        for place in flags.get("not finite", {}):
            yield "not finite", "critical", place, 0.0, NOT_FINITE
        places = [(row["layer"], row["head"]) for row in rows]
        measured = set(places)
        for kind, describe in NUMBERS.items():
            found = flags.get(kind, {})
            wide = kind in WIDE and len(found) > MOST * len(places)
            self._wide_streaks[kind] = self._wide_streaks.get(kind, 0) + 1 if wide else 0
            severity, needed = self._judge(kind, step)
            before = self._streaks.get(kind, {})
            streaks = self._streaks[kind] = {place: count for place, count in before.items() if place not in measured}
            for place in (place for place in places if place in found) if found else ():
                streaks[place] = before.get(place, 0) + 1
                if streaks[place] >= needed:
                    text = f"{kind} in each of the last {needed} samples ({describe(found[place])})"
                    yield kind, severity, place, found[place], text
        exempt = {"falling": flags.get("positional", {}), "rising": flags.get("bounded", {})}
        for row in rows:
            place = row["layer"], row["head"]
            numbers = self._numbers.setdefault(place, deque(maxlen=SAMPLES))
            numbers.append((row["step"], row["max_logit"], row["entropy_ratio"]))
            for kind, text in find_trends(numbers):
                if place not in exempt[kind]:
                    yield kind, "warning", place, row["max_logit" if kind == "rising" else "entropy_ratio"], text

    def _judge(self, kind: str, step: int) -> tuple[str, int]:
        """Returns the severity of a kind now, and how many consecutive samples it takes."""
        if kind == "exploding logits":
            return "critical", URGENT
        if self._wide_streaks.get(kind, 0) >= WIDESPREAD:
            return "critical", WIDESPREAD
        if kind == "diffuse" and step <= YOUNG:
            return "note", SAMPLES
        return "warning", SAMPLES


def _describe(events: list[Event]) -> str:
    """Returns one sentence for all heads with the same problem, about the worst of them."""
    *_, (layer, head), _, text = max(events, key=_severity)
    more = f"; also {len(events) - 1} more head{'' if len(events) == 2 else 's'}" if len(events) > 1 else ""
    return f"{layer}, head {head}: {text}{more}"


def _severity(event: Event) -> float:
    """Returns a number that is larger for a worse head of the same kind; a scale may be off on either side."""
    kind, _, _, number, _ = event
    if kind == "scale off":
        return abs(math.log(max(number, 1e-30)))
    return -number if kind in WORSE_BELOW else number


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

    >>> from regard.health.watching.alarms import is_rising
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
