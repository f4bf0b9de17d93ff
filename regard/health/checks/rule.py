"""`Rule`: what a check looks for, under a code that never changes; `NotApplicable`: why a check was not made."""

from __future__ import annotations

import re
from dataclasses import dataclass

SEVERITIES = ("critical", "warning", "note")
CODE = re.compile(r"RG[1-9]\d\d")
FAMILIES = {
    "RG1": "what a token may see",
    "RG2": "the same answer another way",
    "RG3": "statistics of heads",
    "RG4": "configuration and call",
    "RG5": "numerics",
    "RG6": "weights and gradients",
    "RG7": "attention written by hand",
    "RG8": "loss and labels",
    "RG9": "what could not be looked at",
}


class NotApplicable(Exception):
    """Says in a few words why a check was not made."""


class NothingToCheck(NotApplicable):
    """Says what the model does not have (a soft cap, a cache), so that a check is no gap in what was looked at."""


@dataclass(frozen=True)
class Rule:
    """What a check looks for.

    >>> from regard.health.checks.rule import Rule
    >>> Rule("RG1", "leak", "nothing leaks", "critical", "token ids", "a leak", "no mask", "Mask.")
    Traceback (most recent call last):
    ...
    ValueError: code must be RG and three digits, got 'RG1'
    """

    code: str  # "RG101", stable for ever
    kind: str  # of its findings: "sees the future"
    title: str  # what holds if it passes: "later tokens do not change earlier outputs"
    severity: str  # the gravest that it gives
    needs: str  # what it must be given: "token ids", "attention calls", "a configuration", "labels"
    proves: str  # what a failure proves, and what it cannot
    cause: str  # the usual cause, one sentence
    fix: str  # what to do, one sentence
    references: tuple[str, ...] = ()  # public issues and papers: "transformers#46634", "arXiv 2309.17453"
    explains: tuple[str, ...] = ()  # codes of the symptoms that follow from this cause
    what_if: tuple[str, ...] = ()  # changes of the scores that may cure it: "qk_norm"

    def __post_init__(self) -> None:
        if not CODE.fullmatch(self.code):
            raise ValueError(f"code must be RG and three digits, got {self.code!r}")
        if self.severity not in SEVERITIES:
            raise ValueError(f"{self.code}: severity must be one of {', '.join(SEVERITIES)}, got {self.severity!r}")

    @property
    def family(self) -> str:
        """What the first digit of the code stands for."""
        return FAMILIES[self.code[:3]]
