"""`Claim`, the `Check`s that test it, and the rule from numbers to verdict.

A check holds the numbers that the claim allows, [low, high], and the measured interval: inside agrees, outside
disagrees, and an interval across an edge is an error of the experiment (`Undecided`).

    holds      every check of the claim agrees
    holds_if   the core agrees, and what lies beyond the named condition does not
    wrong      the core disagrees

Checks marked OURS compare our own derivation with the measurement, and fail the run if it is off.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard_lab.estimate import Estimate, difference, exact, exponent, mean, quantile, ratio, share
from regard_lab.figure import Figure

__all__ = [  # all that a claim's file imports
    "Estimate", "Figure", "above", "bands", "below", "claim", "conclude", "difference", "exact", "exponent", "gap",
    "listed", "mean", "near", "quantile", "ratio", "share",
]  # fmt: skip

CORE, BEYOND, OURS = "core", "beyond", "ours"
HOLDS, HOLDS_IF, WRONG = "holds", "holds_if", "wrong"


class Undecided(Exception):
    """An interval is too wide for its question, or the measurement contradicts our own derivation."""


@dataclass(frozen=True)
class Check:
    """`measured` must lie in [low, high] for the claim to be right here; `predicted` is the number it names."""

    what: str
    predicted: float
    measured: Estimate
    low: float
    high: float
    role: str = CORE

    @property
    def agrees(self) -> bool:
        """True if the interval lies inside [low, high], False if outside; raises `Undecided` otherwise."""
        if self.low <= self.measured.low and self.measured.high <= self.high:
            return True
        if self.measured.high < self.low or self.high < self.measured.low:
            return False
        raise Undecided(f"{self.what}: {self.measured} neither within nor outside [{self.low:g}, {self.high:g}]")

    @property
    def allowed(self) -> str:
        """The claim's prediction as text: "0.5 ± 0.1", "> 0.01"."""
        if self.high == math.inf:
            return f"> {self.predicted:.4g}"
        if self.low == -math.inf:
            return f"< {self.predicted:.4g}"
        half = (self.high - self.low) / 2
        return f"{self.predicted:.4g} ± {half:.2g}"

    def beyond(self) -> Check:
        """Return this check as one of what the statement covers and its condition excludes."""
        return replace(self, role=BEYOND)

    def ours(self) -> Check:
        """Return this check as one of our own derivation."""
        return replace(self, role=OURS)


Measured = Estimate | float | Tensor  # a number that was computed, not sampled, has no interval


def near(what: str, predicted: float, measured: Measured, tolerance: float) -> Check:
    """Return the check measured = predicted ± tolerance."""
    return Check(what, predicted, _estimate(measured), predicted - tolerance, predicted + tolerance)


def above(what: str, bound: float, measured: Measured) -> Check:
    """Return the check measured > bound."""
    return Check(what, bound, _estimate(measured), math.nextafter(bound, math.inf), math.inf)


def below(what: str, bound: float, measured: Measured) -> Check:
    """Return the check measured < bound."""
    return Check(what, bound, _estimate(measured), -math.inf, math.nextafter(bound, -math.inf))


def _estimate(measured: Measured) -> Estimate:
    return measured if isinstance(measured, Estimate) else exact(measured)


def gap(a: Tensor, b: Tensor | float) -> float:
    """Return the largest |a − b|."""
    return float((a - b).abs().max())


def bands(estimates: Sequence[Estimate]) -> tuple[list[float], ...]:
    """Return (low, value, high) of the estimates, as a figure of bands takes them."""
    return tuple([getattr(e, side) for e in estimates] for side in ("low", "value", "high"))


def listed(template: str, *columns: Iterable) -> str:
    """Return a text for each entry of the columns, with commas between them.

    >>> from regard_lab.claim import listed
    >>> listed("{:.1f} at d = {}", [0.25, 4.0], [16, 64])
    '0.2 at d = 16, 4.0 at d = 64'
    """
    return ", ".join(template.format(*row) for row in zip(*columns, strict=True))


@dataclass(frozen=True)
class Finding:
    """The result of a claim's `measure`; the numbers of the first check appear in tables and JSON."""

    checks: Sequence[Check]
    figure: Figure | None
    condition: str = ""
    right: str = ""
    remark: str = ""

    @property
    def verdict(self) -> str:
        """The verdict of all checks: HOLDS, HOLDS_IF or WRONG."""
        agreed: dict[str, list[bool]] = {CORE: [], BEYOND: [], OURS: []}
        for check in self.checks:
            agreed[check.role].append(check.agrees)
            if check.role == OURS and not check.agrees:
                raise Undecided(f"our own derivation is off: {check.what}: {check.allowed}, measured {check.measured}")
        if not agreed[CORE]:
            raise Undecided("no check is of the claim itself")
        if not all(agreed[CORE]):
            return WRONG
        if all(agreed[BEYOND]):
            return HOLDS
        if not self.condition:
            raise Undecided("a check beyond the condition disagrees, but no condition is named")
        return HOLDS_IF


def conclude(
    *checks: Check, figure: Figure, alt: str = "", condition: str = "", right: str = "", remark: str = ""
) -> Finding:
    """Return the finding of these checks; the numbers of the first appear in tables. `alt` is the figure in words."""
    return Finding(checks, replace(figure, alt=alt or figure.alt), condition, right, remark)


class Sampler:
    """Draws random numbers that depend on the seed and the claim's name only, not on which claims ran before."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.blake2b(f"{name} {seed}".encode(), digest_size=4).digest()  # torch's CPU generator: 32 bits
        self.generator = torch.Generator().manual_seed(int.from_bytes(digest))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return unit-normal numbers."""
        return torch.randn(shape, generator=self.generator, dtype=dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return numbers uniform in [low, high)."""
        return low + (high - low) * torch.rand(shape, generator=self.generator, dtype=dtype)

    def dots(self, d: int, blocks: int, queries: int = 32, keys: int = 32) -> Tensor:
        """Return q·k (blocks, queries, keys) for unit-normal q and k of d entries.

        Blocks are independent. Scores of a block share queries and keys, so a block counts as one sample.
        """
        return self.normal(blocks, queries, d) @ self.normal(blocks, d, keys)


NOTES = {  # the study notes that the claims come from
    "000": "Softmax and its derivative",
    "001": "Why divide by √d_k",
    "002": "Notes on softmax",
    "003": "Why the scale factor",
    "004": "Softmax in attention",
}


@dataclass(frozen=True)
class Claim:
    """One statement of the notes. `derivation` is lines of LaTeX; `rule` describes how the checks decide."""

    id: str
    note: str
    statement: str
    derivation: Sequence[str]
    rule: str
    measure: Callable[[Sampler], Finding]


def claim(
    statement: str, derivation: str | Sequence[str], rule: str, note: str = ""
) -> Callable[[Callable[[Sampler], Finding]], Claim]:
    """Make `measure(sampler)` of a file `claims/note_NNN/` the claim that is called as the file, with - for _.

    note: the numbers of all notes that make the claim, where it is more than one.
    """

    def make(measure: Callable[[Sampler], Finding]) -> Claim:
        *_, folder, file = measure.__module__.split(".")
        own, lines = note or folder.removeprefix("note_"), [derivation] if isinstance(derivation, str) else derivation
        return Claim(file.replace("_", "-"), own, statement, lines, rule, measure)

    return make
