"""The checks: one file each, discovered in this folder; `regard rule CODE` prints what each looks for.

A file defines `RULES = (Rule(...), ...)` and one function: `find(heads)` judges the measured heads,
`find_in_layers(layers)` the measured layers, `find_in_mixers(mixers)` what is not attention, `check(trial)` runs the
model again. Each returns a list of findings; `check` raises `NotApplicable` with a reason where it cannot judge.

>>> from regard.health import checks
>>> checks.rule_of("RG101").kind
'sees the future'
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from regard.health.checks.finding import Finding, HeadList, Heads, Layers, sort_findings
from regard.health.checks.rule import SEVERITIES, NotApplicable, NothingToCheck, Rule
from regard.health.mixers import MixerReading

__all__ = [
    "SEVERITIES", "Finding", "NotApplicable", "NothingToCheck", "Rule", "find_all", "kinds", "modules", "rule_of",
    "rules",
]  # fmt: skip


@cache
def modules() -> list[ModuleType]:
    """The files of checks, in the order of their first codes."""
    stems = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))
    found = [importlib.import_module(f"{__name__}.{stem}") for stem in stems]
    return sorted((module for module in found if hasattr(module, "RULES")), key=lambda module: module.RULES[0].code)


@cache
def rules() -> dict[str, Rule]:
    """Every rule by its code, in the order of codes; raises ValueError where two files have one code."""
    known: dict[str, tuple[Rule, str]] = {}
    for module in modules():
        for rule in module.RULES:
            if rule.code in known:
                raise ValueError(f"{rule.code} is in two files: {known[rule.code][1]} and {module.__name__}")
            known[rule.code] = rule, module.__name__
    return {code: known[code][0] for code in sorted(known)}


def rule_of(code: str) -> Rule:
    """The rule of a code, in any case."""
    found = rules().get(code.strip().upper())
    if found is None:
        raise ValueError(f"there is no rule {code!r}; `regard rule` lists them")
    return found


def runs_model(module: ModuleType) -> bool:
    """True for a check that runs the model again, False for one that judges what one pass measured."""
    return hasattr(module, "check")


def name_of(module: ModuleType) -> str:
    """What holds if the check finds nothing: the title of its first rule."""
    return module.RULES[0].title


def kinds(runs: bool | None = None) -> list[str]:
    """The kinds of findings in alphabetical order: of checks that run the model again (True), the others, or all."""
    chosen = [module for module in modules() if runs is None or runs_model(module) == runs]
    return sorted({rule.kind for module in chosen for rule in module.RULES})


def passed(done: Sequence[str], found: Collection[str]) -> list[str]:
    """The names of the checks that were made (`done`) of whose kinds none is among those that were found."""
    return [name for name in done if kinds_of([name]).isdisjoint(found)]


def kinds_of(done: Collection[str]) -> set[str]:
    """The kinds of findings of the checks of these names."""
    return {rule.kind for module in modules() if name_of(module) in done for rule in module.RULES}


def find_all(heads: Heads, layers: Layers = (), mixers: Sequence[MixerReading] = ()) -> list[Finding]:
    """Every finding about the measured heads, the layers and other mixers, most severe first."""
    found: list[Finding] = []
    heads = HeadList(heads)
    for module in modules():
        if hasattr(module, "find_in_layers"):
            found += module.find_in_layers(layers)
        elif hasattr(module, "find_in_mixers"):
            found += module.find_in_mixers(mixers)
        elif hasattr(module, "find") and heads:
            found += module.find(heads)
    return sort_findings(found)
