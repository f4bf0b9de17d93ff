"""`Trial`: what B computed at one place, and the explanations that were tried on it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regard.health.comparing.difference import change

EXACT = 2e-5  # relative error of what is computed again from float32 tensors
CAPS = (10.0, 15.0, 20.0, 30.0, 50.0)  # soft caps of logits in use
CLEARLY = 4.0  # times closer than A's own: below that, an explanation explains too little


@dataclass(frozen=True)
class Cause:
    """An explanation that holds.

    Attributes:
        text: a sentence.
        kinds: what was tried and holds, of one or several tensors.
        is_vague: True if it says how B's numbers follow, and not yet why; another explanation is preferred.
        left: what is left of the difference.
        reproduces: True if A's numbers, changed so, are B's; False for what is true of both and tells no more.
    """

    text: str
    kinds: frozenset[str] = frozenset()
    is_vague: bool = False
    left: float = 0.0
    reproduces: bool = True

    def with_names(self, a: str, b: str) -> str:
        """The sentence with other words for A and B."""
        said = re.sub(r"\b[AB]\b", lambda found: b if found[0] == "B" else a, self.text)
        return said[:1].upper() + said[1:]

    def mirrored(self) -> Cause:
        """The same with A and B exchanged."""
        return replace(self, text=exchange_letters(self.text))


@dataclass
class Trial:
    """Explanations of why `b` is not `a` at one place.

    Attributes:
        a, b: what A and B computed.
        budget: how far two tensors are apart by rounding.
        units: what a reshape there cuts, "heads" or "patches".
        tried: names of what was tried, in order.
        found: the explanations that reproduce b.
    """

    a: Tensor
    b: Tensor
    budget: float
    part: str = ""
    real: Tensor | None = None
    tried: list[str] = field(default_factory=list)
    found: list[Cause] = field(default_factory=list)
    units: str = "heads"
    is_lost: bool = False

    def __post_init__(self) -> None:
        self.before = change(self.a, self.b, self.part, self.real)
        lost = (
            0 if self.a.shape != self.b.shape or not torch.isfinite(self.a).all() else (~torch.isfinite(self.b)).sum()
        )
        self.is_lost = bool(lost)  # nothing can be told from such values
        if lost:
            self.found.append(Cause(f"B has {lost} values that are not finite, A has none."))

    @property
    def tolerance(self) -> float:
        return max(self.budget, EXACT)

    def explains(
        self, name: str, candidate: Tensor | Callable[[], Tensor | None] | None, sentence: str, is_vague: bool = False
    ) -> bool:
        """Try one explanation: `candidate` is what B would have computed if it holds. True if that is what it did."""
        if name not in self.tried:
            self.tried.append(name)
        if callable(candidate):
            candidate = candidate()
        if self.is_lost or candidate is None or candidate.numel() != self.b.numel():
            return False
        if self.before <= self.tolerance:
            return False  # nothing differs here
        left = change(self.b, candidate.reshape(self.b.shape), self.part, self.real)
        if not left <= self.tolerance or not left * CLEARLY <= self.before:
            return False
        self.found.append(Cause(sentence, frozenset({name}), is_vague, left))
        return True

    @property
    def best(self) -> Cause | None:
        """The first explanation that none of the others beats clearly; None if none was found."""
        if not self.found:
            return None
        least = min(one.left for one in self.found)
        near = [one for one in self.found if one.left <= max(10.0 * least, 1e-6)]
        return next((one for one in near if not one.is_vague), near[0])


def exchange_letters(sentence: str) -> str:
    """A sentence about A and B, of B and A.

    >>> from regard.health.comparing.causes.trial import exchange_letters
    >>> exchange_letters("B leaves out A's sinks.")
    "A leaves out B's sinks."
    """
    return re.sub(r"\b[AB]\b", lambda found: "BA"[found[0] == "B"], sentence)


def fit_factor(a: Tensor, b: Tensor) -> float:
    """f that brings f·a nearest to b."""
    a, b = a.double().flatten(), b.double().flatten()
    return float((a * b).sum() / a.square().sum().clamp_min(1e-300))


def name_factor(f: float, width: int | None = None, numbers: dict[str, float] | None = None) -> str:
    """` = 0.1·ln 64 + 1`, or what else a factor is known as; empty if it is none.

    >>> from regard.health.comparing.causes.trial import name_factor
    >>> name_factor(1.41589), name_factor(8.0, 64), name_factor(1.2345)
    (' = 0.1·ln 64 + 1', ' = √64', '')
    """
    known: dict[str, float] = {}
    if width:
        known |= {f"√{width}": width**0.5, f"1/√{width}": width**-0.5, f"{width}": width, f"1/{width}": 1 / width}
    known |= numbers or {}
    known |= {"ln 2": math.log(2.0), "1/ln 2 (exponentials to base 2)": 1 / math.log(2.0)}
    for s in (2, 4, 8, 16, 32, 40, 64, 128):
        m = 0.1 * math.log(s) + 1.0
        known |= {f"0.1·ln {s} + 1": m, f"(0.1·ln {s} + 1)²": m * m}
        known |= {f"1/(0.1·ln {s} + 1)": 1 / m, f"1/(0.1·ln {s} + 1)²": m**-2}
    name = next((name for name, value in known.items() if value and abs(f / value - 1.0) < 2e-4), None)
    return "" if name is None else f" = {name}"


def round_through(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to a dtype, in float64."""
    return x.to(dtype).double()
