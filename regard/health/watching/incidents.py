"""Incidents of a training: one for each cause, which opens, gathers its heads and symptoms, and resolves.

| cause | symptoms |
| --- | --- |
| scores too large | logits rising, exploding, or jumped (× 8 from a step to the next); variance above 1/√d's |
| | entropy falling; collapsed; no gradient |
| scores too small | diffuse; variance below 1/√d's |
| | from one step to the next its scale is another (larger: scores too large) |
| values lost | dead, or the norm of the values fell to a third from a step to the next |
| sees the future | queries see later keys, which were hidden in all steps before |
| weights overwritten | a matrix moved by 30 % in one step, 8 times as far as any in 32 steps before |
| steps too large | weights move by 3 % in each of three steps, three times as far as ever before |
| no gradient | the gradient's norm, where it is passed in, is 0 in three steps |
| same batch again | the same batch three times in a row, or twice as often as ever before |
| not finite | an output, or the loss, is NaN or infinite |
| loss jumped, attention with it | the loss left its band, and logits or norms of q and k moved |
| loss jumped, attention as before | the loss left its band, and attention did not move: look at the data |
| loss rising | the mean of the loss rises slowly, and attention did not move |

A cause has one open incident at a time for each group of layers (those whose names differ in numbers alone). A symptom
that joins one, a graver state and twice as many heads are updates, not incidents. A jump of the loss that large scores
explain becomes theirs; what large scores, lost values or the loss show within 32 steps after one of the last four
belongs to that. An incident resolves after three samples without any of its symptoms; it reopens if they return.
A loss that keeps a new level for 64 steps is settled, not resolved, until it is back at the old one or jumps again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from regard.health.checks import dead, diffuse, gradients, large_logits, leak, not_finite
from regard.health.checks.finding import LOGIT_LIMIT
from regard.health.watching.sample import WATCHED
from regard.health.watching.symptoms import Flags, Place, Symptom, Symptoms

CALM = 3  # samples without a symptom after which an incident resolves
RECOVERED = 0.8  # of the limit: a head whose largest logit is below rises no more
CLIP = "regard.qk_clip(model, 50) after every optimizer step"
CLIP_LOWER = "a lower threshold of QK-clip"  # where one is in use
BOUND = f"regard.using(model, qk_norm=True), {CLIP}, or regard.using(model, softcap=30)"
LARGE, SMALL, DEAD, NOT_FINITE = "scores too large", "scores too small", "values lost", "not finite"
MOVED, DATA = "loss jumped, attention with it", "loss jumped, attention as before"
RISING, STILL = "loss rising", "no gradient"
FUTURE, OVERWRITTEN, STEPS, AGAIN = leak.RULE.kind, "weights overwritten", "steps too large", "same batch again"
ROOTS, FOLLOWS = (FUTURE, OVERWRITTEN, STEPS, AGAIN), 32  # what has consequences, and for how many steps
LOSSES = (MOVED, DATA, RISING)  # what the loss alone shows
CAUSES = {
    "rising": LARGE, "exploding logits": LARGE, "falling": LARGE, "collapsed": LARGE, "dying gradient": LARGE,
    "scale off": LARGE, "dead": DEAD, "diffuse": SMALL, "not finite": NOT_FINITE, "loss": MOVED,
    "jumped": LARGE, "values fell": DEAD, "loss rising": RISING,
    "scale changed": LARGE, "later keys": FUTURE, "overwritten": OVERWRITTEN, "steps too large": STEPS,
    "same batch": AGAIN,
}  # fmt: skip
ACTIONS = {
    LARGE: f"lower the learning rate, check that scores are multiplied by 1/√d once, and bound them with {BOUND}",
    SMALL: "check that scores are not scaled twice; train on, or try a temperature below 1",
    DEAD: "check its value projection for zeros left by pruning, conversion or weight decay",
    NOT_FINITE: "stop, go back to the last checkpoint, and lower the learning rate",
    MOVED: "go back to a checkpoint from before, lower the learning rate or warm up longer, and clip gradients",
    RISING: "lower the learning rate; if it is as before, look at the data that have come since",
    FUTURE: "stop: losses since then are measured with the answer in sight; look for what dropped the causal mask",
    OVERWRITTEN: "look for what wrote them besides the optimizer: a checkpoint that was loaded in part or in another "
    "layout, an initialisation, an edit; go back to a checkpoint from before",
    STEPS: "lower the learning rate, and look at its schedule and at the optimizer's state",
    STILL: "look at the loss scale in float16, at frozen weights and at labels that are all ignored",
    AGAIN: "look at the data loader: its iterator does not move on",
    DATA: "look at the batches of these steps: shuffled or binary data, a new source, labels out of step",
}
CODES = {
    LARGE: large_logits.EXPLODING.code, SMALL: diffuse.RULE.code, DEAD: dead.RULE.code,
    NOT_FINITE: not_finite.RULE.code, FUTURE: leak.RULE.code,
    STILL: gradients.MISSING.code,
}  # fmt: skip
RULES = {rule.kind: rule for check in WATCHED for rule in check.RULES}
ORDER = ("note", "warning", "critical")
SUSPICIOUS = ("exploding logits", "collapsed", "dying gradient", "dead")  # a head that has one draws samples closer
WORSE_BELOW = ("collapsed", "dead", "falling", "values fell")  # kinds whose worst head has the smallest number
BY_URGENCY = (
    "later keys", "not finite", "overwritten", "same batch", "steps too large", "scale changed", "exploding logits",
    "jumped", "rising", "collapsed", "dying gradient", "falling", "scale off", "loss",
)  # fmt: skip


@dataclass
class Incident:
    """One problem of a training, from the step at which it opened to the one at which it resolved."""

    cause: str
    severity: str  # the gravest so far: "critical", "warning" or "note"
    opened: int
    group: str  # of layers: "layers.*.self_attn"
    code: str  # of the contract's rule: `regard rule RG301`; "" for what only the loss shows
    text: str = ""  # what is the case now
    action: str = ""
    heads: tuple[Place, ...] = ()  # (layer, head), all so far
    resolved: int | None = None
    settled: int | None = None  # the step at which its number had kept a new level
    reopened: list[int] = field(default_factory=list)
    symptoms: list[str] = field(default_factory=list)  # kinds, in the order in which they appeared

    def __str__(self) -> str:
        until = "" if self.resolved is None else f", resolved at step {self.resolved}"
        todo = f". To do: {self.action}." if self.action and self.resolved is None else ""
        return f"step {self.opened}{until}: {self.cause}: {self.text}{todo}"

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers of its heads."""
        return tuple(dict.fromkeys(layer for layer, _ in self.heads))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Alarm:
    """A change of an incident: at which step it opened, reopened, became graver or wider, and what was seen."""

    step: int
    kind: str  # the symptom that changed it
    severity: str
    heads: tuple[Place, ...]  # (layer, head), the new ones
    text: str
    action: str = ""
    cause: str = ""
    event: str = "opened"  # or "updated", "reopened", "settled", "resolved"
    code: str = ""

    def __str__(self) -> str:
        return f"step {self.step}: {self.text}" + (f". To do: {self.action}." if self.action else "")

    def to_json(self) -> dict:
        """Returns the alarm as a line of the log holds it."""
        found = asdict(self)
        return {"step": found.pop("step"), "alarm": found.pop("kind"), **found}


class Incidents:
    """Turns the symptoms of samples into incidents."""

    def __init__(self) -> None:
        self.all: list[Incident] = []
        self.symptoms = Symptoms()
        self.is_lost = False  # is the loss, or the output, not finite now?
        self.is_suspicious = False  # is a head over a limit that no incident tells of?
        self._calm: dict[int, int] = {}  # by place in `all`: samples without a symptom
        self._told: dict[int, int] = {}  # by place in `all`: heads at the last event
        self._action: dict[str, str] = {}

    def add(
        self, step: int, rows: Sequence[dict], flags: Flags, is_clipped: bool = False, is_loss_high: bool = False
    ) -> list[Alarm]:
        """Returns what changed after one more sample: a dict per head (see `head_rows`), and what findings say.

        is_clipped: True if QK-clip is in use, so that actions do not suggest it. is_loss_high: has the loss risen?
        """
        found = list(self.symptoms.find(step, rows, flags, is_loss_high))
        alarms = self.tell(step, found, is_clipped)
        alarms += self._resolve(step, rows, flags, found)
        over = {place for kind in SUSPICIOUS for place in flags.get(kind, {})}
        known = {place for one in self.all if one.resolved is None for place in one.heads}
        self.is_suspicious = bool(over - known)
        return alarms

    def tell(self, step: int, found: Iterable[Symptom], is_clipped: bool = False) -> list[Alarm]:
        """Opens, reopens and updates incidents; returns what changed."""
        by: dict[tuple[str, str], list[Symptom]] = {}
        for symptom in found:
            by.setdefault((cause_of(symptom), group_of(symptom.place[0])), []).append(symptom)
        alarms = [self._tell_one(step, cause, group, some, is_clipped) for (cause, group), some in by.items()]
        return [alarm for alarm in alarms if alarm is not None]

    def _tell_one(self, step: int, cause: str, group: str, some: list[Symptom], is_clipped: bool) -> Alarm | None:
        at = next((at for at, one in enumerate(self.all) if _is_same(one, cause, group, step)), None)
        event = "updated"
        if at is None:
            at, event = len(self.all), "opened"
            code = CODES.get(cause, RULES[cause].code if cause in RULES else "")
            self.all.append(Incident(cause, "note", step, group, code))
        one = self.all[at]
        if one.cause in ROOTS:
            cause = one.cause
        if (one.cause, one.group) != (cause, group):  # what is known now names it better
            one.cause, one.group, one.code = cause, group or one.group, CODES.get(cause, one.code)
        if one.resolved is not None or one.settled is not None:
            one.resolved, one.settled, event = None, None, "reopened"
            one.reopened.append(step)
        self._calm[at] = 0
        new = tuple(dict.fromkeys(s.place for s in some if s.place not in one.heads and s.place[1] >= 0))
        severity = max((s.severity for s in some), key=ORDER.index)
        is_graver = ORDER.index(severity) > ORDER.index(one.severity)
        one.heads += new
        one.symptoms += [kind for kind in dict.fromkeys(s.kind for s in some) if kind not in one.symptoms]
        one.severity = severity if is_graver else one.severity
        one.action = (ACTIONS[cause] if cause in ACTIONS else RULES[cause].fix.rstrip(".")).replace(
            CLIP, CLIP_LOWER if is_clipped else CLIP
        )
        worst = _worst(some)
        one.text = _describe(worst, some)
        if event == "updated" and not is_graver and len(one.heads) < 2 * self._told.get(at, 1):
            return None
        self._told[at] = max(len(one.heads), 1)
        code = RULES[worst.kind].code if worst.kind in RULES else one.code
        heads = new if event == "updated" and new else one.heads
        return Alarm(step, worst.kind, one.severity, heads, one.text, one.action, cause, event, code)

    def _resolve(self, step: int, rows: Sequence[dict], flags: Flags, found: list[Symptom]) -> list[Alarm]:
        """Resolves incidents none of whose heads has had a symptom for some samples."""
        tops = {(row["layer"], row["head"]): row["max_logit"] for row in rows}
        alarms = []
        for at, one in enumerate(self.all):
            if one.resolved is not None or one.cause in LOSSES or (one.cause == NOT_FINITE and self.is_lost):
                continue  # the loss resolves those
            has = any(place in flags.get(kind, {}) for kind in one.symptoms for place in one.heads)
            has |= any((cause_of(s), group_of(s.place[0])) == (one.cause, one.group) for s in found)
            if one.cause == LARGE and "rising" in one.symptoms:
                has |= any(tops.get(place, -math.inf) > RECOVERED * LOGIT_LIMIT for place in one.heads)
            self._calm[at] = 0 if has else self._calm.get(at, 0) + 1
            if self._calm[at] >= CALM:
                top = max((tops[place] for place in one.heads if place in tops), default=math.nan)
                text = f"below {LOGIT_LIMIT:g} since step {step} (largest logit {top:.3g})" if one.cause == LARGE else (
                    f"no longer seen since step {step}"
                )  # fmt: skip
                alarms.append(self.close(one, step, text))
        return alarms

    def close(self, one: Incident, step: int, text: str, event: str = "resolved") -> Alarm:
        """Resolves one incident, or notes that it has settled; returns the event."""
        setattr(one, event, step)
        one.text = text
        return Alarm(step, one.symptoms[0], "note", one.heads, f"{one.cause}: {text}", "", one.cause, event, one.code)

    def find_open(self, *causes: str) -> list[Incident]:
        """Returns the incidents that are open and have not settled, of these causes or of all."""
        unsettled = [one for one in self.all if one.resolved is None and one.settled is None]
        return [one for one in unsettled if not causes or one.cause in causes]

    def state(self) -> dict[str, Any]:
        """Returns what it knows as plain values."""
        all_ = [one.to_json() for one in self.all]
        return {"all": all_, "symptoms": self.symptoms.state(), "calm": self._calm, "told": self._told}

    def load(self, state: Mapping[str, Any]) -> None:
        self.all = [Incident(**{**one, "heads": tuple(map(tuple, one["heads"]))}) for one in state["all"]]
        self.symptoms.load(state["symptoms"])
        self._calm = {int(at): n for at, n in state["calm"].items()}
        self._told = {int(at): n for at, n in state["told"].items()}


def group_of(label: str) -> str:
    """Returns the group of a layer: its name with * in the place of numbers.

    >>> from regard.health.watching.incidents import group_of
    >>> group_of("decoder.layers.10.self_attn#2")
    'decoder.layers.*.self_attn'
    """
    return re.sub(r"\d+", "*", label.partition("#")[0])


def _is_same(one: Incident, cause: str, group: str, step: int) -> bool:
    """True if a symptom belongs to an incident: its cause and group, or what the loss alone had shown of it."""
    if cause == one.cause:
        return one.group == group or not one.group or not group
    if one.cause in ROOTS and cause in (LARGE, DEAD, *LOSSES):
        return one.resolved is None and step <= one.opened + FOLLOWS
    if cause in LOSSES:
        return one.cause in LOSSES
    return cause in (LARGE, STEPS) and one.cause == MOVED and one.resolved is None


def cause_of(symptom: Symptom) -> str:
    """Returns the cause that a symptom shows."""
    if symptom.kind in ("scale off", "scale changed") and symptom.number < 1.0:
        return SMALL
    if symptom.kind == "loss":
        return MOVED if symptom.number else DATA
    return CAUSES.get(symptom.kind, symptom.kind)  # a check that has no row in the table is its own cause


def _worst(some: list[Symptom]) -> Symptom:
    kind = min((s.kind for s in some), key=lambda kind: BY_URGENCY.index(kind) if kind in BY_URGENCY else 9)
    return max((s for s in some if s.kind == kind), key=_badness)


def _badness(symptom: Symptom) -> float:
    """Returns a number that is larger for a worse head of the same kind; a scale may be off on either side."""
    if symptom.kind == "scale off":
        return abs(math.log(max(symptom.number, 1e-30)))
    return -symptom.number if symptom.kind in WORSE_BELOW else symptom.number


def _describe(worst: Symptom, some: list[Symptom]) -> str:
    """Returns one sentence about the worst head, and how many others have the same cause."""
    layer, head = worst.place
    if head < 0:
        layers = len({s.place[0] for s in some}) - 1
        return worst.text + (f"; also {layers} more layer{'' if layers == 1 else 's'}" if layers else "")
    others = len({s.place for s in some} - {worst.place})
    more = f"; also {others} more head{'' if others == 1 else 's'}" if others else ""
    return f"{layer}, head {head}: {worst.text}{more}"
