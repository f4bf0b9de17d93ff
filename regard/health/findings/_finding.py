"""A finding, and the one way the files here make it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SEVERITIES = ("critical", "warning", "note")
SHARP, STEADY = 0.9, 0.75  # mean largest weight, share of rows within a band about the median distance
BAND = 0.05  # of that distance, at least half a token: bins of distance are 4 % wide
CROWD = 1 / 8  # of a layer's heads, at least two


@dataclass(frozen=True)
class Finding:
    """Which heads, what was measured, which threshold it passed and whence that comes, how bad, what to do."""

    kind: str
    severity: str  # "critical", "warning" or "note"
    heads: tuple[tuple[str, int], ...]  # (layer, head)
    evidence: str
    threshold: str
    remedy: str
    measured: tuple[float, ...] = field(default=())  # per head, the number that the threshold was held against
    indices: tuple[int, ...] = field(default=())  # per head, its layer's place: one module may be several layers

    @property
    def places(self) -> list[tuple[int, int]]:
        """(index of the layer, head) of each head."""
        return [(index, head) for index, (_, head) in zip(self.indices, self.heads, strict=True)]

    def to_json(self) -> dict:
        return dict(
            kind=self.kind,
            severity=self.severity,
            heads=[list(head) for head in self.heads],
            evidence=self.evidence,
            threshold=self.threshold,
            remedy=self.remedy,
            measured=list(self.measured),
            indices=list(self.indices),
        )


def finding(
    kind: str, severity: str, found: Sequence[tuple[Any, float]], evidence: str, threshold: str, remedy: str
) -> list[Finding]:
    """[Finding] about the (head, number) pairs, or [] if there are none; `evidence` may name their {range}."""
    if not found:
        return []
    numbers = tuple(float(number) for _, number in found)
    low, high = f"{min(numbers):.3g}", f"{max(numbers):.3g}"
    told = evidence.format(range=low if low == high else f"{low} to {high}")
    heads = tuple((head.layer, head.head) for head, _ in found)
    indices = tuple(head.index for head, _ in found)
    return [Finding(kind, severity, heads, told, threshold, remedy, numbers, indices)]


def looks_at_offset(head) -> bool:
    """Does a sharp head look at one distance from the query on three rows of four? Then it is a positional head."""
    distance = head.statistics["distance"]
    middle = distance.quantile(0.5)
    band = max(0.5, BAND * middle)
    return distance.share_below(middle + band) - distance.share_below(max(middle - band, 0.0)) >= STEADY


def positional_heads(heads: Sequence) -> tuple[list, list]:
    """(those of layers where they crowd, the few that trained layers ordinarily keep: arXiv 1905.09418)."""
    sharp = [head for head in heads if head.statistics.mean("max_weight") > SHARP and head.can_be_judged]
    if not sharp:
        return [], []
    sizes = Counter(head.index for head in heads)
    layers: dict[int, list] = {}
    for head in sharp:
        if looks_at_offset(head):
            layers.setdefault(head.index, []).append(head)
    crowd: list = []
    few: list = []
    for index, found in layers.items():
        (crowd if len(found) >= max(2, sizes[index] * CROWD) else few).extend(found)
    return crowd, few


def free_heads(heads: Sequence) -> list:
    """The heads that can be judged by how sharp they are: without the few positional ones, which are sharp by trade."""
    exempt = {id(head) for head in positional_heads(heads)[1] if head.statistics.max("max_logit") <= 100.0}
    return [head for head in heads if head.can_be_judged and id(head) not in exempt]
