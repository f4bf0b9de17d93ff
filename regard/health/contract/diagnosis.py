"""`diagnose`: findings grouped under their causes, so that one mistake is one entry with its symptoms beneath.

A rule names in `explains` the codes of what follows from it. A finding is a symptom of another if that rule explains it
and the layers it is about are among the cause's layers; a cause of the whole model explains every layer, and a symptom
of the whole model is explained by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from regard.health import checks
from regard.health.checks import SEVERITIES, Finding
from regard.health.checks.finding import MODEL


@dataclass(frozen=True)
class Cause:
    """What is wrong, and the findings that follow from it."""

    code: str
    kind: str
    cause: str  # one sentence
    severity: str  # the gravest of the finding and its symptoms
    scope: str  # "model", "layers" or "heads"
    layer: str | None  # the first layer concerned
    evidence: str
    fix: str
    symptoms: tuple[Finding, ...]
    finding: Finding

    def to_json(self) -> dict[str, Any]:
        """The cause as schema.json describes it; the findings themselves are listed once, under "findings"."""
        names = ("code", "kind", "cause", "severity", "scope", "layer", "evidence", "fix")
        symptoms = [dict(code=one.code, kind=one.kind, severity=one.severity, layer=one.layer) for one in self.symptoms]
        return {**{name: getattr(self, name) for name in names}, "symptoms": symptoms}


def diagnose(found: Sequence[Finding]) -> list[Cause]:
    """The causes, gravest first: a finding that no other explains, with all that follow from it."""
    above = {id(one): _find_cause(one, found) for one in found}
    groups: dict[int, list[Finding]] = {}
    for one in found:
        root = one
        while (next_one := above[id(root)]) is not None:
            root = next_one
        groups.setdefault(id(root), []).append(one)
    causes = []
    for one in found:
        if above[id(one)] is None:
            symptoms = tuple(other for other in groups[id(one)] if other is not one)
            severity = min((one, *symptoms), key=lambda each: SEVERITIES.index(each.severity)).severity
            causes.append(Cause(
                one.code, one.kind, one.cause, severity, one.scope, one.layer, one.evidence, one.fix, symptoms, one
            ))  # fmt: skip
    return sorted(causes, key=lambda cause: SEVERITIES.index(cause.severity))


def _find_cause(symptom: Finding, found: Sequence[Finding]) -> Finding | None:
    """The first finding that explains another, None if there is none; two that explain each other are two causes."""
    for one in found:
        if one is symptom or not _explains(one, symptom) or _explains(symptom, one):
            continue
        if _covers(one, symptom, found):
            return one
    return None


def _explains(one: Finding, symptom: Finding) -> bool:
    rule = checks.rules().get(one.code)
    return rule is not None and symptom.code != one.code and symptom.code.startswith(rule.explains or ("never",))


def _covers(one: Finding, symptom: Finding, found: Sequence[Finding]) -> bool:
    """True if the symptom's layers are all among those of the cause, which may be several findings of one code."""
    if MODEL in (one.scope, symptom.scope):  # what no layer is named for, any layer explains
        return True
    own = {index for other in found if other.code == one.code for index in other.indices}
    if not own or not symptom.indices:  # layers that could not be measured have no heads
        return one.layer is not None and one.layer == symptom.layer
    return set(symptom.indices) <= own
