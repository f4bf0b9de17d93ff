"""Checks that run the model a few times more: one file each, discovered in this folder.

A file defines `NAME` (what is right if nothing is found), `KIND` or `KINDS`, and `check(trial) -> list[Finding]`; it
raises `NotApplicable` with a reason where it cannot judge. `run_checks` also measures the loss, the loss under each
what-if and remedy, and the ablation of heads.

>>> from regard.health import checks
>>> "sees the future" in checks.kinds()
True
"""

from __future__ import annotations

import contextlib
import importlib
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from regard.health.checks.ablation import Ablation, Ablator, ablate, describe_effect
from regard.health.findings import SEVERITIES, Finding
from regard.health.findings._finding import Heads, Layers
from regard.health.probing.probe import change_calls
from regard.health.probing.task import LossChange, LossReading
from regard.health.probing.trial import KEPT, NotApplicable, Trial
from regard.health.what_if import WhatIf, parse

__all__ = ["KEPT", "Ablation", "Checks", "LossChange", "LossReading", "kinds", "run_checks"]

# what-ifs that a finding's remedy names and that can be tried without training
REMEDIES = {
    "collapsed": ("qk_norm", "softcap=30"),
    "dying gradient": ("qk_norm", "softcap=30"),
    "exploding logits": ("qk_norm", "softcap=50"),
    "scale off": ("scale=sqrt", "qk_norm"),
    "sink-dormant": ("normalizer=softmax1",),
}
MOST_HEADS = 512  # of a finding whose heads are removed together


@dataclass
class Checks:
    """What the checks found out besides findings."""

    done: list[str] = field(default_factory=list)  # names of the checks that were made
    skipped: list[tuple[str, str]] = field(default_factory=list)  # (name, why it was not made)
    loss: LossReading | None = None
    what_if: dict[str, LossChange] = field(default_factory=dict)  # change -> its effect on the loss
    ablation: Ablation | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return dict(
            done=self.done, skipped=[list(pair) for pair in self.skipped],
            loss=None if self.loss is None else self.loss.to_json(),
            what_if={name: change.to_json() for name, change in self.what_if.items()},
            ablation=None if self.ablation is None else self.ablation.to_json(), seconds=round(self.seconds, 3),
        )  # fmt: skip


@cache
def _modules() -> list[ModuleType]:
    stems = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))
    modules = [importlib.import_module(f"{__name__}.{stem}") for stem in stems]
    return [module for module in modules if hasattr(module, "check")]


def kinds() -> list[str]:
    """The kinds of findings that only these checks make, in alphabetical order."""
    return sorted(kind for module in _modules() for kind in getattr(module, "KINDS", None) or (module.KIND,))


def passed(done: Sequence[str], found: Collection[str]) -> list[str]:
    """The names of the checks that were made (`done`) of whose kinds none is among those that were found."""
    kinds_by_name = {module.NAME: set(getattr(module, "KINDS", None) or (module.KIND,)) for module in _modules()}
    return [name for name in done if kinds_by_name.get(name, set()).isdisjoint(found)]


def run_checks(
    model: nn.Module, batches: Sequence[Any], layers: Layers, heads: Heads, found: Sequence[Finding],
    changes: Sequence[WhatIf], *, causal: bool | None = None, loss: Callable | None = None,
    ablation_seconds: float = 0.0, predictor: nn.Module | None = None,
) -> tuple[Checks, list[Finding]]:  # fmt: skip
    """Returns what the checks found out, and all findings: `found` with effects added, and new ones."""
    started = time.perf_counter()
    result, findings = Checks(), list(found)
    trial = Trial(model if predictor is None else predictor, batches, layers, heads, causal, loss, model)
    devices = [trial.device] if trial.device.type == "cuda" else []
    has_runs = trial.batches or loss is not None
    with torch.random.fork_rng(devices), trial.probe.active() if has_runs else contextlib.nullcontext():
        for module in _modules():
            try:
                new = module.check(trial)
            except NotApplicable as reason:
                result.skipped.append((module.NAME, str(reason)))
            except Exception as error:  # the model may refuse other tokens or lengths
                result.skipped.append((module.NAME, _describe(error)))
            else:
                result.done.append(module.NAME)
                findings = _merge(findings, new)
        try:
            result.loss = trial.loss_reading
            _try_changes(trial, result, changes, findings)
            if ablation_seconds > 0.0 and (trial.task is not None or trial.batches):
                ablator = Ablator(trial)
                result.ablation = ablate(trial, ablator, ablation_seconds)
                findings = [_with_effect(trial, ablator, finding) for finding in findings]
        except Exception as error:
            result.skipped.append(("loss and ablation", _describe(error)))
    findings = [_with_remedies(finding, result.what_if) for finding in findings]
    findings.sort(key=lambda finding: (SEVERITIES.index(finding.severity), -len(finding.heads), finding.kind))
    result.seconds = time.perf_counter() - started
    return result, findings


def _merge(findings: list[Finding], new: Sequence[Finding]) -> list[Finding]:
    """Both lists; of a kind that is in both, the graver finding, the first if they are alike."""
    for finding in new:
        same = [one for one in findings if one.kind == finding.kind]
        ranks = [SEVERITIES.index(one.severity) for one in same]
        if not same or min(ranks) > SEVERITIES.index(finding.severity):
            findings = [one for one in findings if one.kind != finding.kind] + [finding]
    return findings


def _try_changes(trial: Trial, result: Checks, changes: Sequence[WhatIf], findings: Sequence[Finding]) -> None:
    """Measures the loss under each what-if, and under the remedies of warnings."""
    if trial.task is None or trial.losses is None:
        return
    grave = [finding.kind for finding in findings if finding.severity != "note"]
    remedies = [parse(text) for kind in grave for text in REMEDIES.get(kind, ())]
    remedies += [parse(text) for one in findings for text in _computed(one) if one.severity != "note"]
    for change in {change.name: change for change in (*changes, *remedies)}.values():
        try:
            changed = trial.task.losses(change_calls(change))
        except (ValueError, TypeError, NotImplementedError):
            continue  # the report's what-if says why it is refused
        result.what_if[change.name] = trial.task.compare(trial.losses, changed)


def _computed(finding: Finding) -> list[str]:
    """The temperature that a remedy names with a number computed for its heads."""
    return re.findall(r"'(temperature=[0-9.]+)'", finding.remedy) if finding.kind == "diffuse" else []


def _with_remedies(finding: Finding, tried: dict[str, LossChange]) -> Finding:
    """The finding, with the effect of its remedies on the loss added to their text."""
    names = (*REMEDIES.get(finding.kind, ()), *_computed(finding))
    effects = [f"{name}: {tried[name]}" for name in names if name in tried]
    if not effects or finding.severity == "note":
        return finding
    return replace(finding, remedy=f"{finding.remedy} Tried here, without training: {'; '.join(effects)}.")


def _with_effect(trial: Trial, ablator: Ablator, finding: Finding) -> Finding:
    """The finding, with the effect of its heads added to the evidence if it is about some of the heads only."""
    layers = {layer.index: layer for layer in trial.layers}
    places = [((layers[index].name, layers[index].use), head) for index, head in finding.places if index in layers]
    total = sum(layer.heads for layer in trial.layers)
    if not places or len(places) == total or len(places) > MOST_HEADS or finding.kind in kinds():
        return finding
    return replace(finding, evidence=finding.evidence + describe_effect(ablator, places))


def _describe(error: Exception) -> str:
    first = str(error).strip().split("\n")[0]
    return f"the model raised {type(error).__name__}: {first[:200]}"
