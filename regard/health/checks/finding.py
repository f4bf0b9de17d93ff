"""`Finding`, the function that makes one, and what several findings ask: positional heads, logit variance by layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from regard.health.checks.rule import SEVERITIES, Rule
from regard.table import format_number

if TYPE_CHECKING:  # at run time these modules import this one
    from regard.health.measure.heads import HeadReading
    from regard.health.measure.recorder import Layer

Head: TypeAlias = "HeadReading"
Heads: TypeAlias = "Sequence[HeadReading]"
Layers: TypeAlias = "Sequence[Layer]"

MODEL, LAYERS, HEADS = "model", "layers", "heads"  # scopes of a finding
SHARP = 0.9  # mean largest weight of a positional head, at least
STEADY = 0.75  # fraction of its rows near the median distance, at least
BAND = 0.05  # "near": within this fraction of the median distance, or half a token (distance bins are 4 % wide)
CROWD = 1 / 8  # fraction of a layer's heads from which on a pattern is not an exception; at least two heads
LOGIT_LIMIT = 100.0  # where QK-clip (Kimi K2) steps in
LARGE_SCALE = 1.5  # scale · √d above which a scale is suspected too large; below the inverse, too small
NORM_RATIO = 1.1  # measured over predicted variance, up to which norms alone explain it
BIAS_FACTOR = 16.0  # over the bound of `is_from_bias`: with an outlying first key, causal rows see ln n times more


class HeadList(list):
    """Heads, with the answers that `once` keeps for them."""

    def __init__(self, heads: Iterable[Head] = ()) -> None:
        super().__init__(heads)
        self.answers: dict[tuple, Any] = {}


def once(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of heads, which several findings call, compute its answer once for each `HeadList`."""

    @wraps(ask)
    def answer(heads: Heads, *arguments: Any) -> Any:
        if not isinstance(heads, HeadList):
            return ask(heads, *arguments)
        key = ask, *arguments
        if key not in heads.answers:
            heads.answers[key] = ask(heads, *arguments)
        return heads.answers[key]

    return answer


@dataclass(frozen=True)
class Finding:
    """A problem: the heads that have it, the evidence, the threshold and its source, the severity, the remedy."""

    kind: str
    severity: str  # "critical", "warning" or "note"
    heads: tuple[tuple[str, int], ...]  # (layer, head); empty if the finding is about the model and no head is known
    evidence: str
    threshold: str
    remedy: str  # what to do, in full
    measured: tuple[float, ...] = ()  # per head, the number compared with the threshold
    indices: tuple[int, ...] = ()  # per head, the index of its layer: one module may be several layers
    code: str = ""  # of its rule: "RG101"
    cause: str = ""  # one sentence
    fix: str = ""  # one sentence
    scope: str = HEADS  # "model", "layers" or "heads"
    layer: str | None = None  # the first layer concerned
    references: tuple[str, ...] = ()
    what_if: tuple[str, ...] = ()  # changes of the scores that may cure it

    @property
    def places(self) -> list[tuple[int, int]]:
        """(layer index, head) of each head."""
        return [(index, head) for index, (_, head) in zip(self.indices, self.heads, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """The finding as schema.json describes it."""
        lists: dict[str, list] = dict(heads=[list(head) for head in self.heads])
        lists |= dict(measured=[x if math.isfinite(x) else None for x in self.measured])
        lists |= dict(indices=list(self.indices), references=list(self.references), what_if=list(self.what_if))
        return {**vars(self), **lists}


def sort_findings(found: Iterable[Finding]) -> list[Finding]:
    """The gravest first, then those of most heads."""
    return sorted(found, key=lambda one: (SEVERITIES.index(one.severity), -len(one.heads), one.kind))


class HeadPlace(NamedTuple):
    """Where a head is: its layer's name and index, and its number."""

    layer: str
    index: int  # type: ignore[assignment]  # a tuple's method has this name
    head: int


def places_in(layers: Iterable[Layer]) -> list[tuple[HeadPlace, None]]:
    """Every head of these layers, with no number, as `make_finding` takes them."""
    return [(HeadPlace(layer.name, layer.index, head), None) for layer in layers for head in range(layer.heads)]


def make_finding(
    rule: Rule, severity: str, found: Sequence[tuple[Head | HeadPlace, float | None]], evidence: str,
    threshold: str = "", remedy: str = "", **more: Any,
) -> list[Finding]:  # fmt: skip
    """[Finding] about the (head, number) pairs, or [] if there are none.

    In `evidence`, "{range}" stands for the smallest to the largest number, "{percent}" for the same in per cent. `more`
    are fields of `Finding`: `cause`, `fix`, `references` and `what_if` are the rule's unless given.
    """
    if not found:
        return []
    numbers = tuple(float(number) for _, number in found if number is not None)
    if numbers:
        evidence = evidence.replace("{range}", _range(numbers))
        evidence = evidence.replace("{percent}", _range([100.0 * number for number in numbers]) + " %")
    heads = tuple((head.layer, head.head) for head, _ in found)
    indices = tuple(head.index for head, _ in found)
    more = dict(layer=heads[0][0]) | more
    return [fill_finding(rule, severity, heads, evidence, threshold, remedy, measured=numbers, indices=indices, **more)]


def fill_finding(
    rule: Rule, severity: str, heads: tuple[tuple[str, int], ...], evidence: str, threshold: str = "", remedy: str = "",
    **more: Any,
) -> Finding:  # fmt: skip
    """A finding with what its rule says where nothing else is given; the remedy is the fix if it is empty."""
    known: dict[str, Any] = dict(
        code=rule.code, cause=rule.cause, fix=rule.fix, references=rule.references, what_if=rule.what_if
    )
    known |= more
    return Finding(rule.kind, severity, heads, evidence, threshold or rule.proves, remedy or known["fix"], **known)


def _range(numbers: Sequence[float]) -> str:
    low, high = format_number(min(numbers)), format_number(max(numbers))
    return low if low == high else f"{low} to {high}"


def has_fixed_distance(head: Head) -> bool:
    """True if three rows of four look at one distance from the query."""
    distance = head.statistics["distance"]
    middle = distance.quantile(0.5)
    band = max(0.5, BAND * middle)
    return distance.share_below(middle + band) - distance.share_below(max(middle - band, 0.0)) >= STEADY


@once
def positional_heads(heads: Heads) -> tuple[list[Head], list[Head]]:
    """Sharp heads of one fixed distance: (those in layers with many, the few that trained layers usually have).

    The few are ordinary: arXiv 1905.09418.
    """
    sharp = [head for head in heads if head.can_be_judged and head.statistics.mean("max_weight") > SHARP]
    positional = [head for head in sharp if has_fixed_distance(head)]
    sizes, counts = Counter(head.index for head in heads), Counter(head.index for head in positional)
    crowded = {index for index, count in counts.items() if count >= max(2, sizes[index] * CROWD)}
    many = [head for head in positional if head.index in crowded]
    return many, [head for head in positional if head.index not in crowded]


@once
def exclude_positional(heads: Heads) -> HeadList:
    """The heads that can be judged by their sharpness: without positional heads whose logits stay under 100.

    They are sharp by design. With this rule a published family of models has no false alarm.
    """
    positional = [head for group in positional_heads(heads) for head in group]
    exempt = {id(head) for head in positional if head.statistics.max("max_logit") <= LOGIT_LIMIT}
    return HeadList(head for head in heads if head.can_be_judged and id(head) not in exempt)


@once
def group_by_layer(heads: Heads) -> list[HeadList]:
    """The heads that can be judged, one list per layer."""
    layers: dict[int, HeadList] = {}
    for head in heads:
        if head.can_be_judged:
            if head.index not in layers:
                layers[head.index] = HeadList()
            layers[head.index].append(head)
    return list(layers.values())


@once
def median_of(members: Heads, name: str) -> float:
    """The median over heads of a statistic's mean."""
    return median(head.statistics.mean(name) for head in members)


@once
def variances(members: Heads) -> tuple[float, float]:
    """(measured, predicted) logit variance; a what-if has no norms, so both are the measured one."""
    measured = median_of(members, "logit_variance")
    known = [head.predicted_variance for head in members if not math.isnan(head.predicted_variance)]
    return measured, median(known) if known else measured


def is_from_norms(members: Heads, ratio: float = NORM_RATIO) -> bool:
    """True if q and k of these norms, in unrelated directions, would have the layer's variance."""
    measured, predicted = variances(members)
    return measured < ratio * predicted * mean_key_share(members) and not math.isnan(members[0].predicted_variance)


def mean_key_share(members: Heads) -> float:
    """E(1 − 1/n), because n keys vary less than many."""
    gain, gain_ratio = median_of(members, "gradient_gain"), median_of(members, "gain_ratio")
    return min(gain / gain_ratio, 1.0) if gain_ratio > 0.0 else 1.0


def is_from_bias(members: Heads) -> bool:
    """True if the variance exceeds what q·k can have: Var(q·k) ≤ E‖q‖²·E‖k − k̄‖², which is d times the prediction."""
    measured, predicted = variances(members)
    return measured > BIAS_FACTOR * members[0].head_dim * predicted
