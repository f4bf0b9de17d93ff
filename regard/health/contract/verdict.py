"""`Verdict`: what `regard.check` returns; one line per cause, as a linter prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from regard.health.checks import SEVERITIES, Finding
from regard.health.contract.diagnosis import Cause, diagnose
from regard.health.contract.run import LossReading
from regard.table import count_noun

LISTED = 6  # codes with one reason, in the line of what was not checked
SUMMARY_CAUSES, SUMMARY_TEXT = 20, 240  # causes in the JSON's summary, and characters of each text there
FAIL_ON = ("warning", "critical", "never")


class ContractError(AssertionError):
    """Raised by `raise_on`; the message is what the verdict prints."""


class Skipped(NamedTuple):
    """A rule that was not checked, and why."""

    code: str
    title: str
    reason: str
    is_absent: bool = False  # the model has nothing to check: no soft cap, no cache


def count_from(found: Iterable[Finding], severity: str) -> int:
    """How many findings are of this severity or graver; 0 for "never".

    >>> from regard.health.contract.verdict import count_from
    >>> count_from([], "warning")
    0
    """
    if severity not in FAIL_ON:
        raise ValueError(f"severity must be one of {', '.join(FAIL_ON)}, got {severity!r}")
    if severity == "never":
        return 0
    return sum(SEVERITIES.index(one.severity) <= SEVERITIES.index(severity) for one in found)


@dataclass(frozen=True, repr=False)
class Verdict:
    """The contract of attention, checked: failures, notes, what passed, and what was not checked."""

    title: str
    failures: list[Finding]  # critical and warning, gravest first
    notes: list[Finding]
    passed: list[str]  # codes
    skipped: list[Skipped]
    seconds: float
    loss: LossReading | None = None
    unmeasured: list[tuple[str, str]] = field(default_factory=list)  # (layer, reason)
    known: list[Finding] = field(default_factory=list)  # failures of the baseline, which do not count
    error: str | None = None  # why no failure does not mean that all is well

    def __bool__(self) -> bool:
        """True if nothing failed and there is no `error`."""
        return not self.failures and self.error is None

    @property
    def diagnosis(self) -> list[Cause]:
        """The failures grouped under their causes, notes as symptoms only."""
        causes = diagnose([*self.failures, *self.notes])
        return [cause for cause in causes if cause.severity != "note"]

    def raise_on(self, severity: str = "warning") -> Verdict:
        """Raises ContractError, an AssertionError, for `error` or a failure that grave; else returns itself."""
        if count_from(self.failures, severity) or (self.error is not None and severity != "never"):
            raise ContractError(str(self))
        return self

    def without(self, known: set[tuple[str, str]]) -> Verdict:
        """The verdict without the failures of a baseline, as (code, layer)."""
        old = [one for one in self.failures if (one.code, one.layer or "") in known]
        new = [one for one in self.failures if one not in old]
        return Verdict(**{**vars(self), "failures": new, "known": old})

    def summary(self) -> str:
        """One sentence of counts."""
        grave = count_from(self.failures, "critical")
        failed = f"{count_noun(len(self.failures), 'failure')}{f' ({grave} critical)' if grave else ''}"
        parts = [failed, count_noun(len(self.notes), "note"), f"{len(self.passed)} passed"]
        absent = sum(one.is_absent for one in self.skipped)
        parts += [f"{len(self.skipped) - absent} not checked"]
        parts += [f"{absent} with nothing to check"] * bool(absent)
        parts += [f"{len(self.known)} in the baseline"] * bool(self.known)
        parts = ["incomplete"] * (self.error is not None) + parts
        return f"{self.title}: {', '.join(parts)}, {self.seconds:.1f} s"

    def lines(self) -> list[str]:
        """`error` first; a line per cause, its symptoms beneath; a line of what was not checked; the summary."""
        lines = [] if self.error is None else [f"INCOMPLETE: {self.error}"]
        for cause in self.diagnosis:
            lines.append(describe(cause.finding, cause.severity))
            lines += [f"    therefore {describe_short(one)}" for one in cause.symptoms]
        if text := self.describe_skipped():
            lines.append(f"not checked: {text}")
        return [*lines, self.summary()]

    def describe_skipped(self) -> str:
        """The reasons, each with the codes that it kept from being checked; not those with nothing to check."""
        reasons: dict[str, list[str]] = {}
        for one in self.skipped:
            if one.is_absent:
                continue
            reasons.setdefault(one.reason, []).append(one.code)
        listed = sorted(reasons.items(), key=lambda item: -len(item[1]))
        return "; ".join(f"{_join_codes(codes)} ({reason})" for reason, codes in listed)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"<Verdict of {self.summary()}>"

    def to_json(self) -> dict[str, Any]:
        """Plain values: a summary of at most 20 KB first, then everything."""
        causes = self.diagnosis
        short = [
            dict(
                code=one.code, kind=one.kind, severity=one.severity, scope=one.scope, layer=one.layer,
                evidence=_cut(one.evidence), cause=_cut(one.cause), fix=_cut(one.fix),
                symptoms=[other.code for other in one.symptoms],
            )
            for one in causes[:SUMMARY_CAUSES]
        ]  # fmt: skip
        counts = dict(
            critical=count_from(self.failures, "critical"), failures=len(self.failures), notes=len(self.notes),
            passed=len(self.passed), skipped=len(self.skipped), known=len(self.known), causes=len(causes),
        )  # fmt: skip
        return dict(
            summary=dict(
                title=self.title, ok=bool(self), error=self.error, counts=counts, seconds=round(self.seconds, 3),
                diagnosis=short,
                loss=None if self.loss is None else self.loss.to_json(),
                not_checked=_cut(self.describe_skipped(), 2000),
            ),
            diagnosis=[cause.to_json() for cause in causes],
            failures=[one.to_json() for one in self.failures],
            notes=[one.to_json() for one in self.notes],
            known=[one.to_json() for one in self.known],
            passed=self.passed,
            skipped=[one._asdict() for one in self.skipped],
            unmeasured=[list(pair) for pair in self.unmeasured],
        )  # fmt: skip


def describe(one: Finding, severity: str | None = None) -> str:
    """`layers.3: RG101 sees the future (critical): what differs. Cause: … Fix: …` in one line."""
    text = f"{name_place(one)}: {one.code} {one.kind} ({severity or one.severity}): {one.evidence.strip()}"
    return " ".join(f"{text} Likely cause: {one.cause} Fix: {one.fix}".split())


def describe_short(one: Finding) -> str:
    """A symptom in one line: code, kind, place, evidence."""
    return " ".join(f"{one.code} {one.kind}, {name_place(one)}: {one.evidence.strip()}".split())


def name_place(one: Finding) -> str:
    """The first layer, and how many more; "the whole model" without one."""
    layers = list(dict.fromkeys(layer for layer, _ in one.heads))
    if one.scope == "model" or (one.layer is None and not layers):
        return "the whole model"
    first = one.layer if one.layer is not None else layers[0]
    others = len(set(layers) - {first})
    more = f" and {count_noun(others, 'more layer')}" if others else ""
    heads = f", {count_noun(len(one.heads), 'head')}" if one.scope == "heads" and one.heads else ""
    return f"{first or 'the model itself'}{more}{heads}"


def _join_codes(codes: Sequence[str]) -> str:
    more = f" and {len(codes) - LISTED} more" if len(codes) > LISTED else ""
    return ", ".join(codes[:LISTED]) + more


def _cut(text: str, length: int = SUMMARY_TEXT) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
