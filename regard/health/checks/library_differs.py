"""A transformers model must give what the library's own eager code gives with its configuration and weights.

What is not the library's (patched functions, registered attention, swapped modules, hooks, attributes that were set) is
named first. If there is any, a fresh process runs the same weights without it, and the first module that differs is
where it matters.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NothingToCheck, Rule
from regard.health.probe.differences import largest_change
from regard.health.probe.library import MAIN, collect, foreign_code, library_class, run_twin
from regard.health.probe.trial import Trial
from regard.health.tokens.text import TokenBatch

RULE = Rule(
    "RG240", "differs from the library", "the model gives what the library's own code gives", "critical",
    needs="a transformers model of at most 2 GiB of weights",
    proves="Proves that the model computes other outputs than transformers' own eager code with the same configuration "
    "and weights; it cannot tell whether that is meant.",
    cause="A patched function, a registered kernel, a swapped module or an attribute that was set computes otherwise.",
    fix="Mend or remove the named code, or run the model without it.",
)  # fmt: skip
RULES = (RULE,)
STARTS_A_PROCESS = True
NAMED = 3  # things that are not the library's, in a sentence
SMALL = 50_000_000  # parameters up to which a fresh model is built here, to compare its attributes and buffers
FAMILIES = (bool, int, float, str, type(None))
FREE = ("training", "layers_are_rescaled", "gradient_checkpointing", "_is_hf_initialized", "is_gradient_checkpointing")


def check(trial: Trial) -> list[Finding]:
    trial.require_repeatable()
    model = trial.model
    if library_class(model) is None:
        raise NothingToCheck("the model is not one of transformers")
    others = list(itertools.islice(itertools.chain(foreign_code(model), changed_attributes(model)), NAMED + 1))
    if not others:
        return []  # the library's code, with the attributes that it sets
    text = trial.tokens
    with handed_on(model, text) as given:
        own = collect(model, text.args, text.named)
    theirs = run_twin(model, given[0] if len(given) == 1 else text)
    amount = difference(own[MAIN], theirs[MAIN])
    if amount <= trial.rounding:
        return []
    first = next(
        (name for name in own if name in theirs and difference(own[name], theirs[name]) > trial.rounding), None
    )
    where = f" The first module that differs is {first}." if first and first != MAIN else ""
    listed = "; ".join(others[:NAMED]) + ("; and more" if len(others) > NAMED else "")
    keys = [key for key in trial.captured[1] if first and (key[0] == first or first.startswith(f"{key[0]}."))][:1]
    more: dict[str, Any] = {} if keys else {"layer": first if first != MAIN else None}
    return trial.find(
        RULE, "critical", keys,
        f"The output differs by {amount:.2g} of its size from that of transformers' own eager code with the same "
        f"configuration and weights.{where} Not the library's: {listed}.",
        f"relative change of a row > {trial.rounding:.2g}, which rounding explains",
        cause=f"Not the library's own: {others[0]}.", **more,
    )  # fmt: skip


@contextmanager
def handed_on(model: nn.Module, text: TokenBatch) -> Iterator[list[TokenBatch]]:
    """Collects what a subclass's forward hands to the library's: it may drop a mask on purpose."""
    kind: Any = library_class(model)
    own, given = kind.__dict__.get("forward"), []
    if own is None or type(model).forward is own:
        yield []
        return

    @wraps(own)
    def keep(self: nn.Module, *args: Any, **named: Any) -> Any:
        if self is model:
            places = list(signature(own).parameters)[1 : 1 + len(args)]
            given.append(replace(text, args=(), named=dict(zip(places, args, strict=True)) | named))
        return own(self, *args, **named)

    kind.forward = keep
    try:
        yield given
    finally:
        kind.forward = own


def difference(a: Tensor, b: Tensor) -> float:
    """The largest relative change of a row of two outputs."""
    a, b = (x if x.ndim >= 3 else x.reshape(1, -1, x.shape[-1] if x.ndim else 1) for x in (a, b))
    return largest_change(a, b)


def changed_attributes(model: nn.Module) -> Iterator[str]:
    """Yields attributes and buffers of modules that are not what the library sets from the configuration."""
    kind = library_class(model)
    many = sum(p.numel() for p in model.parameters())
    try:
        with torch.device("cpu" if many <= SMALL else "meta"):
            fresh = kind(copy.deepcopy(model.config))  # type: ignore[misc,operator]
    except Exception:
        return
    others = dict(fresh.named_modules())
    for name, module in model.named_modules():
        other = others.get(name)
        if other is None or type(other) is not type(module):
            continue
        for attribute, value in vars(other).items():
            mine = vars(module).get(attribute)
            plain = isinstance(value, FAMILIES) and isinstance(mine, FAMILIES) and attribute not in FREE
            if plain and mine != value and not attribute.startswith("__"):
                yield f"{name or 'the model'}.{attribute} is {mine!r}, the library sets {value!r}"
        for title in module._non_persistent_buffers_set:
            mine, value = module._buffers.get(title), other._buffers.get(title)
            if mine is None or value is None or value.is_meta or mine.shape != value.shape:
                continue
            if not torch.allclose(mine.float().cpu(), value.float(), rtol=1e-3, atol=1e-6, equal_nan=True):
                yield f"{name}.{title} holds other numbers than the library's"
