"""`run` and `run_all`: find the claims, run them and return a `Result` each.

A claim is a file in `claims/note_NNN/` that defines `measure(sampler)` under `@claim(...)`; its id is the file's name,
- for _.
"""

from __future__ import annotations

import difflib
import importlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from regard_lab.claim import HOLDS_IF, WRONG, Claim, Finding, Sampler


@dataclass(frozen=True)
class Result:
    """A claim, its finding and its verdict."""

    claim: Claim
    finding: Finding
    verdict: str
    seed: int
    seconds: float

    @property
    def measured(self) -> float:
        """The value of the first check."""
        return self.finding.checks[0].measured.value

    @property
    def condition(self) -> str:
        """The condition under which the claim holds, if it holds under one."""
        return self.finding.condition if self.verdict == HOLDS_IF else ""

    @property
    def right(self) -> str:
        """What is true instead of a wrong claim."""
        if self.verdict != WRONG:
            return ""
        missed = [check for check in self.finding.checks if not check.agrees]
        return self.finding.right or "; ".join(f"{check.what}: {check.measured}" for check in missed)

    def _repr_html_(self) -> str:
        """The claim's page in a sandboxed frame, as notebooks show it."""
        from regard.health.report.page.document import embed
        from regard_lab.page import page

        return embed(page([self], self.seed))

    def to_dict(self) -> dict:
        """Return the JSON record; `predicted`, `measured` and `interval` are those of the first check."""
        checks = [
            dict(
                what=check.what,
                role=check.role,
                predicted=_number(check.predicted),
                allowed=[_number(check.low), _number(check.high)],
                measured=_number(check.measured.value),
                interval=[_number(check.measured.low), _number(check.measured.high)],
                agrees=check.agrees,
            )
            for check in self.finding.checks
        ]
        return dict(
            id=self.claim.id,
            note=self.claim.note,
            statement=self.claim.statement,
            verdict=self.verdict,
            condition=self.condition or None,
            right=self.right or None,
            predicted=checks[0]["predicted"],
            measured=checks[0]["measured"],
            interval=checks[0]["interval"],
            rule=self.claim.rule,
            derivation=list(self.claim.derivation),
            remark=self.finding.remark or None,
            checks=checks,
            seed=self.seed,
            seconds=round(self.seconds, 3),
        )


def _number(x: float) -> float | None:
    return x if math.isfinite(x) else None


@cache
def claims() -> dict[str, Claim]:
    """Return id → claim for every file of `claims/note_NNN/`, in the order of the notes."""
    found: dict[str, Claim] = {}
    for path in sorted((Path(__file__).parent / "claims").glob("note_*/[!_]*.py")):
        claim = getattr(_import_claim(path.parent.name, path.stem), "measure", None)
        if not isinstance(claim, Claim):
            raise ValueError(f"{path.name} must define `measure(sampler)` under `@claim(…)`")
        if claim.id in found:
            raise ValueError(f"two files in claims/ are named {path.name}; claims are called by their file's name")
        found[claim.id] = claim
    return found


def _import_claim(note: str, stem: str):
    try:
        return importlib.import_module(f"regard_lab.claims.{note}.{stem}")
    except ModuleNotFoundError as missing:
        if (missing.name or "regard").split(".")[0] == "regard":
            raise
        text = f'the lab needs {missing.name}: pip install "regard[lab]"'
        raise ModuleNotFoundError(text, name=missing.name) from None


def names() -> list[str]:
    """Return the ids of all claims."""
    return list(claims())


def check_name(name: str) -> None:
    """Raise ValueError for an unknown claim, with similar names."""
    if name not in claims():
        near = difflib.get_close_matches(name.lower().replace("_", "-"), names(), n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(names())}"
        raise ValueError(f"claim {name!r} is unknown; {hint}")


def run(name: str, seed: int = 0) -> Result:
    """Test one claim.

    >>> import regard_lab as lab
    >>> lab.run("power-order").condition
    'a > 1 (the first score is the larger one)'
    """
    check_name(name)
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed must lie in [0, 2**31), got {seed}")
    start = time.perf_counter()
    claim = claims()[name]
    finding = claim.measure(Sampler(seed, name))
    return Result(claim, finding, finding.verdict, seed, time.perf_counter() - start)


def run_all(chosen: Sequence[str] = (), seed: int = 0) -> Iterator[tuple[str, Result | Exception]]:
    """Yield (id, result) of each claim; an experiment that fails yields its exception, and the others continue."""
    for name in chosen or names():
        try:
            yield name, run(name, seed)
        except Exception as failure:
            yield name, failure
