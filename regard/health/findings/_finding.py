"""A finding, and the one way the files here make it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SEVERITIES = ("critical", "warning", "note")
LEAST_ROWS = 16  # fewer rows, or fewer keys to choose from, and no shape of a distribution is held against a head
LEAST_KEYS = 4


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

    def to_json(self) -> dict:
        return dict(
            kind=self.kind,
            severity=self.severity,
            heads=[list(head) for head in self.heads],
            evidence=self.evidence,
            threshold=self.threshold,
            remedy=self.remedy,
            measured=list(self.measured),
        )


def finding(kind: str, severity: str, found: Sequence[tuple[object, float]], evidence: str, threshold: str, remedy: str) -> list[Finding]:
    """[Finding] about the (head, number) pairs, or [] if there are none; `evidence` may name {low}, {high} and {count}."""
    if not found:
        return []
    numbers = tuple(float(number) for _, number in found)
    told = evidence.format(low=f"{min(numbers):.3g}", high=f"{max(numbers):.3g}", count=len(numbers))
    heads = tuple((head.layer, head.head) for head, _ in found)
    return [Finding(kind, severity, heads, told, threshold, remedy, numbers)]


def can_be_judged(head) -> bool:
    """Enough rows with enough keys that the shape of the distribution says something."""
    keys = head.statistics["visible_keys"]
    return keys.count >= LEAST_ROWS and keys.mean >= LEAST_KEYS
