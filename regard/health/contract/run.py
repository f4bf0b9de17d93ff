"""`run_checks`: runs the model again for every check, for the loss under changes, and without each head."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import regard
from regard.health import checks
from regard.health.checks import SEVERITIES, Finding, NotApplicable, NothingToCheck, Rule
from regard.health.checks.finding import Heads, Layers, sort_findings
from regard.health.contract.ablation import Ablation, Ablator, ablate, describe_effect
from regard.health.contract.rounding import RoundingEffect, measure_rounding
from regard.health.probe.differences import largest_change
from regard.health.probe.modes import preserved
from regard.health.probe.probe import change_calls
from regard.health.probe.task import LossChange, LossReading
from regard.health.probe.trial import Trial
from regard.health.progress import Budget
from regard.health.what_if import WhatIf, parse

LOSS = "loss"  # stands for a code where the loss, which is no rule, was not measured
MOST_HEADS = 512  # of a finding whose heads are removed together


SECONDS = 60.0  # after which no further check begins
PLACES = tuple(f"{Path(module.__file__ or '').parent}/" for module in (torch, regard))
MODULES = f"{PLACES[0]}nn/modules/"
REFUSALS = (ValueError, TypeError, RuntimeError)  # what an attention call raises if it is given the wrong shapes


@dataclass
class Checks:
    """What the checks found out besides findings."""

    done: list[str] = field(default_factory=list)  # names of the checks that were made
    skipped: list[tuple[str, str]] = field(default_factory=list)  # (name, why it was not made)
    loss: LossReading | None = None
    what_if: dict[str, LossChange] = field(default_factory=dict)  # change -> its effect on the loss
    rounding: dict[str, RoundingEffect] = field(default_factory=dict)  # what-if -> its effect on each head
    ablation: Ablation | None = None
    seconds: float = 0.0
    made: list[str] = field(default_factory=list)  # codes of the checks that were made
    reasons: list[tuple[str, str]] = field(default_factory=list)  # (code, why it was not made)
    absent: set[str] = field(default_factory=set)  # codes that the model has nothing for
    is_stopped: bool = False  # by Ctrl-C
    error: str | None = None  # why the findings are not to be trusted

    def skip(self, rules: Sequence[Rule], reason: str, *, is_absent: bool = False) -> None:
        """Notes why these rules were not checked; `is_absent`: there is nothing to check, which is no gap."""
        self.reasons += [(rule.code, reason) for rule in rules]
        if is_absent:
            self.absent |= {rule.code for rule in rules}
        else:
            self.skipped.append((rules[0].title, reason))

    def to_json(self) -> dict[str, Any]:
        return dict(
            done=self.done, skipped=[list(pair) for pair in self.skipped],
            loss=None if self.loss is None else self.loss.to_json(),
            what_if={name: change.to_json() for name, change in self.what_if.items()},
            rounding={name: effect.to_json() for name, effect in self.rounding.items()},
            ablation=None if self.ablation is None else self.ablation.to_json(), seconds=round(self.seconds, 3),
        )  # fmt: skip


def run_checks(
    model: nn.Module, batches: Sequence[Any], layers: Layers, heads: Heads, found: Sequence[Finding],
    changes: Sequence[WhatIf] = (), *, causal: bool | None = None, loss: Callable | None = None,
    ablation_seconds: float = 0.0, predictor: nn.Module | None = None, tokenizer: Any = None,
    chosen: Collection[str] | None = None, seconds: float = SECONDS, patience: float = 1.0,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Checks, list[Finding]]:  # fmt: skip
    """Returns what the checks found out, and all findings: `found` with effects added, and new ones.

    Checks begin with those that may find the gravest, and end with those that start a process, until `seconds` of our
    own have passed (see `Budget`), or Ctrl-C; `chosen` are codes (None: all); `progress(code, number, total)` is called
    before each.
    """
    started, budget = time.perf_counter(), Budget(seconds, patience)
    result, findings = Checks(), list(found)
    trial = Trial(
        model if predictor is None else predictor, batches, layers, heads, causal, loss, model, tokenizer
    )  # fmt: skip
    devices = [trial.device] if trial.device.type == "cuda" else []
    has_runs = batches or loss is not None
    wanted = [
        module for module in filter(checks.runs_model, checks.modules())
        if chosen is None or any(rule.code in chosen for rule in module.RULES)
    ]  # fmt: skip
    wanted.sort(key=_order)  # time may run out
    number = 0
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices))
            stack.enter_context(preserved(trial.model))
            if has_runs:
                stack.enter_context(trial.probe.active())
                trial.probe.is_over = lambda: budget.is_spent
            for number, module in enumerate(wanted):
                if progress is not None:
                    progress(module.RULES[0].code, number, len(wanted))
                if budget.is_spent:
                    result.skip(module.RULES, f"out of time: {seconds:g} s had passed")
                    continue
                findings = _check(module, trial, result, findings, chosen)
            if has_runs:
                trial.probe.is_over = None
            number = len(wanted)
            for rule, why in dict.fromkeys(trial.skipped):
                is_raised = isinstance(why, Exception) and not isinstance(why, NotApplicable)
                reason = describe_raised(why) if is_raised else str(why)
                result.skip((rule,), reason, is_absent=isinstance(why, NothingToCheck))
            if progress is not None and ablation_seconds > 0.0:
                progress("trying changes, and the loss without each head", number, number)
            try:
                if chosen is None or any(code.startswith("RG8") for code in chosen):
                    result.loss = trial.loss_reading
                _try_changes(trial, result, changes, findings)
                if ablation_seconds > 0.0 and (trial.task is not None or trial.batches):
                    ablator = Ablator(trial)
                    result.ablation = ablate(trial, ablator, ablation_seconds)
                    findings = [_with_effect(trial, ablator, finding) for finding in findings]
            except Exception as error:
                result.skipped.append(("loss and ablation", describe_raised(error)))
                result.reasons.append((LOSS, describe_raised(error)))
    except KeyboardInterrupt:
        result.is_stopped = True
        for module in wanted[number:]:
            result.skip(module.RULES, "stopped by Ctrl-C")
    result.error = None if result.is_stopped else _find_change(trial)
    findings = [_with_remedies(finding, result.what_if) for finding in findings]
    result.seconds = time.perf_counter() - started
    return result, sort_findings(findings)


def _order(module: Any) -> tuple[bool, int]:
    return getattr(module, "STARTS_A_PROCESS", False), min(SEVERITIES.index(rule.severity) for rule in module.RULES)


def _check(
    module: Any, trial: Trial, result: Checks, findings: list[Finding], chosen: Collection[str] | None
) -> list[Finding]:
    """Makes one check; returns the findings with its own."""
    modes = [(part, part.training) for part in trial.model.modules()]
    try:
        new = module.check(trial)
    except NotApplicable as reason:
        result.skip(module.RULES, str(reason), is_absent=isinstance(reason, NothingToCheck))
    except Exception as error:  # the model may refuse other tokens or lengths
        result.skip(module.RULES, describe_raised(error))
    else:
        result.done.append(checks.name_of(module))
        made = {one.code for one in new} if trial.is_stopped else {rule.code for rule in module.RULES}
        result.made += sorted(made)
        left = [rule for rule in module.RULES if rule.code not in made]
        if left:  # a check that goes on without a part proves nothing by passing
            result.skip(left, "out of time: the check was not finished")
        findings = _merge(findings, [one for one in new if chosen is None or one.code in chosen])
    for part, training in modes:
        part.training = training
    return findings


def _find_change(trial: Trial) -> str | None:
    """Says that the model gives other outputs after the checks than before, if it does and is not random."""
    if not {"captured", "noise", "tolerance", "rounding"} <= vars(trial).keys() or trial.noise > trial.tolerance:
        return None
    try:
        with preserved(trial.model):
            amount = largest_change(trial.captured[0], trial.probe.run(trial.sample))
    except Exception as error:
        return f"after the checks {describe_raised(error)}"
    if amount <= trial.rounding:
        return None
    return (
        f"running the model changed it: after the checks its outputs differ by {amount:.2g} of their size. It keeps "
        "something outside its modules' attributes; load it anew"
    )


def describe_raised(error: Exception) -> str:
    """An error, and who raised it: the model, with the line of the user's code or library, or regard itself."""
    first = str(error).strip().split("\n")[0]
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    place = next((at for at in reversed(frames) if not at[0].startswith((*PLACES, "<"))), None)
    who, file = "the model raised", "" if not frames else frames[-1][0]
    if file.startswith(PLACES[1]) and not (isinstance(error, REFUSALS) and _is_in_model(frames)):
        who, place = "regard failed; please report that it raised", frames[-1]
    where = "" if place is None else f" ({Path(place[0]).name}, line {place[1]})"
    return f"{who} {type(error).__name__}: {first[:200]}{where}"


def _is_in_model(frames: Sequence[tuple[str, int]]) -> bool:
    """True if the error went through a forward: regard computed a call with what the model gave it."""
    return any(not file.startswith((*PLACES, "<")) or file.startswith(MODULES) for file, _ in frames)


def _merge(findings: list[Finding], new: Sequence[Finding]) -> list[Finding]:
    """Both lists; of a kind that is in both, the graver finding, the first if they are alike."""
    for finding in new:
        same = [one for one in findings if one.kind == finding.kind]
        ranks = [SEVERITIES.index(one.severity) for one in same]
        if not same or min(ranks) > SEVERITIES.index(finding.severity):
            findings = [one for one in findings if one.kind != finding.kind] + [finding]
    return findings


def _try_changes(trial: Trial, result: Checks, changes: Sequence[WhatIf], findings: Sequence[Finding]) -> None:
    """Measures the loss under each what-if, and under the remedies of warnings, and what roundings do to heads."""
    if trial.task is not None and trial.losses is not None:
        _measure_losses(trial, result, changes, findings)
    if trial.batches:
        roundings = [change for change in changes if change.roundings]
        result.rounding = {one.name: measure_rounding(trial, one, result.what_if.get(one.name)) for one in roundings}


def _measure_losses(trial: Trial, result: Checks, changes: Sequence[WhatIf], findings: Sequence[Finding]) -> None:
    assert trial.task is not None and trial.losses is not None
    remedies = [parse(text) for one in findings if one.severity != "note" for text in one.what_if]
    for change in {change.name: change for change in (*changes, *remedies)}.values():
        try:
            changed = trial.task.losses(change_calls(change))
        except (ValueError, TypeError, NotImplementedError):
            continue  # the report's what-if says why it is refused
        result.what_if[change.name] = trial.task.compare(trial.losses, changed)


def _with_remedies(finding: Finding, tried: dict[str, LossChange]) -> Finding:
    """The finding, with the effect of its remedies on the loss added to their text."""
    effects = [f"{name}: {tried[name]}" for name in finding.what_if if name in tried]
    if not effects or finding.severity == "note":
        return finding
    return replace(finding, remedy=f"{finding.remedy} Tried here, without training: {'; '.join(effects)}.")


def _with_effect(trial: Trial, ablator: Ablator, finding: Finding) -> Finding:
    """The finding, with the effect of its heads added to the evidence if it is about some of the heads only."""
    layers = {layer.index: layer for layer in trial.layers}
    places = [((layers[index].name, layers[index].use), head) for index, head in finding.places if index in layers]
    total = sum(layer.heads for layer in trial.layers)
    if not places or len(places) == total or len(places) > MOST_HEADS or finding.kind in checks.kinds(runs=True):
        return finding
    return replace(finding, evidence=finding.evidence + describe_effect(ablator, places))
