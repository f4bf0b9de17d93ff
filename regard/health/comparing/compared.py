"""`Compared`: two models on one batch, B's blocks on the inputs of A's, and where they differ by more than rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from regard.health.comparing.difference import (
    SAFETY,
    Pairing,
    align,
    beyond,
    budgets_of,
    change,
    changes_of,
    find_blocks,
    pair,
    rounding_of,
)
from regard.health.comparing.explain import Case
from regard.health.comparing.record import CALL_PARTS, Key, Mode, Run
from regard.health.comparing.record import record as run_model

FEW = 0.25  # of all tokens: so many may take other experts by rounding
SEEDS = (1, 2)  # of the runs with rounding noise


@dataclass
class Compared:
    """Two models on one batch: the runs, and the places that differ when each block is given the same input."""

    models: tuple[nn.Module, nn.Module]
    batch: Any
    runs: tuple[Run, Run]  # each by itself
    forced: Run  # B, its blocks given A's inputs
    pairing: Pairing
    size: float  # of the rounding noise
    tolerance: float | None
    output: float  # how far the models' outputs are apart
    allowed: float  # how far rounding may bring them
    changes: dict[Key, float]
    budgets: dict[Key, float]
    mode: Mode = "evaluation"

    def differing(self) -> list[Key]:
        """What differs of blocks' inputs and outputs and of the model's outputs; what else differs has no effect."""
        judges = {*self.pairing.blocks[0], ""}
        found = [key for key in beyond(self.changes, self.budgets) if key.module in judges]
        return [key for key in found if key.part in ("in", "out") or not key.module]


def compare_batch(
    models: tuple[nn.Module, nn.Module], batch: Any, tolerance: float | None, mode: Mode = "evaluation"
) -> Compared:
    """Run both, and B once more on the inputs of A's blocks; with padding where that alone tells what differs."""
    record = partial(run_model, mode=mode)
    a, b = (record(one, batch) for one in models)
    blocks = find_blocks(models[0], a), find_blocks(models[1], b)
    pairing = pair(a, b, blocks)
    size = rounding_of(a, b)
    force = pairing.forced(a, everywhere=False)
    forced = record(models[1], batch, force) if force.points else b
    own = Run({key: x for key, x in a.points.items() if key.part == "in" and key.module in set(blocks[0])})
    noisy = [record(models[0], batch, own, size, seed) for seed in SEEDS]

    def judge(allowed: float | None = None) -> Compared:
        budgets = budgets_of(a, noisy, size)
        if tolerance is not None:
            budgets = dict.fromkeys(budgets, tolerance)
        allowed = budgets.get(Key("out", "", 0), SAFETY * size) if allowed is None else allowed
        changes = changes_of(a, forced, pairing.places | _mask_places(pairing))
        return Compared(
            models, batch, (a, b), forced, pairing, size, tolerance, _gap(a, b), allowed, changes, budgets, mode
        )

    found = judge()
    if found.differing() or not found.output > found.allowed or tolerance is not None:
        return found
    allowed = SAFETY * max(size, *(_gap(a, record(models[0], batch, None, size, seed)) for seed in SEEDS))
    if a.real is not None and found.output > allowed:
        a.real = None  # padding has an effect on other tokens
    return judge(allowed)


def _gap(a: Run, b: Run) -> float:
    """How far the models' outputs are apart, over all forwards."""
    return max((change(x, y, real=a.real) for x, y in zip(a.outputs, b.outputs, strict=False)), default=math.nan)


def _mask_places(pairing: Pairing) -> dict[Key, Key]:
    return {
        key._replace(part=part): other._replace(part=part)
        for key, other in pairing.places.items() if key.part == "attention" for part in ("mask", "scores")
    }  # fmt: skip


def rearranged(one: Compared) -> str | None:
    """In which other arrangement B's modules are given the same tokens: each row alone, or padding on another side."""
    root = Key("in", "", 0)
    for key, other in one.pairing.places.items():
        if key.part != "in" or not key.module or key not in one.runs[0].points or other not in one.runs[1].points:
            continue
        a, b = align(one.runs[0].points[key], one.runs[1].points[other])
        if one.changes.get(root, 0.0) > 0.0 or a.ndim < 2 or (a.is_floating_point() and a.shape[1:] != b.shape[1:]):
            return None
        often = [at._replace(use=at.use + 1) in run.points for at, run in zip((key, other), one.runs, strict=True)]
        if a.numel() != b.numel() and not a.is_floating_point() and often[0] == often[1]:
            return None  # of other positions, not other tokens
        if often[0] != often[1]:
            return f"{key.module} runs another number of times in B"
        if a.shape != b.shape:
            return f"{key.module} is given {list(a.shape)} in A, {list(b.shape)} in B"
        if a.is_floating_point():
            return None
        if not torch.equal(a, b) and torch.equal(a.flatten().sort().values, b.flatten().sort().values):
            return f"{key.module} is given its tokens in another order in B, as with padding on another side"
    return None


def refine(one: Compared, found: list[Key]) -> tuple[Case, Key | None, list[Key]]:
    """The first place inside a block that differs, with every module given A's input; and all such places."""
    changes, budgets, run = one.changes, one.budgets, one.forced
    apart = set(beyond(one.changes, one.budgets))
    agree = {(key.module, key.use) for key in one.changes if key.part == "out" and key not in apart}
    if one.pairing.same_code:
        a, b = one.models
        record = partial(run_model, mode=one.mode)
        force = one.pairing.forced(one.runs[0], everywhere=True)
        run = record(b, one.batch, force)
        own = Run({key: x for key, x in one.runs[0].points.items() if key.part == "in"})
        noisy = [record(a, one.batch, own, one.size, seed) for seed in SEEDS]
        budgets = budgets_of(one.runs[0], noisy, one.size)
        if one.tolerance is not None:
            budgets = dict.fromkeys(budgets, one.tolerance)
        changes = changes_of(one.runs[0], run, one.pairing.places | _mask_places(one.pairing))
    bad = {None, *(one.pairing.block_of(key) for key in found)}
    keys = [key for key in beyond(changes, budgets) if one.pairing.block_of(key) in bad]
    keys = [key for key in keys if not _is_benign(one, key, agree, changes, budgets)]
    case = Case(one.models, one.runs[0], run, one.pairing, changes, budgets, one.size, one.runs[1], one.batch, one.mode)
    return case, keys[0] if keys else None, keys


def chooses(one: Compared, found: list[Key]) -> bool:
    """Do blocks differ in a few tokens only, and choose experts for each token? Rounding then decides ties."""
    for key in found:
        name = one.pairing.blocks[0][at] if (at := one.pairing.block_of(key)) is not None else ""
        parts = {type(module).__name__.lower() for module in one.models[0].get_submodule(name).modules()}
        if not any(word in part for part in parts for word in ("expert", "router", "moe")):
            return False
        a, b = one.runs[0].points[key], one.forced.points[one.pairing.places[key]]
        wrong = (a.double() - b.double()).norm(dim=-1) > one.budgets[key] * a.double().norm(dim=-1)
        if float(wrong.double().mean()) > FEW:
            return False
    return True


def _is_benign(
    one: Compared, key: Key, agree: set[tuple[str, int]], changes: dict[Key, float], budgets: dict[Key, float]
) -> bool:
    """Does a place differ in a way that what comes of it does not show?"""
    index = one.pairing.block_of(key)
    if index is not None:
        inside = key.module.removeprefix(one.pairing.blocks[0][index]).strip(".").split(".")
        inside = inside if key.part in CALL_PARTS else inside[:-1]
        holder = one.pairing.blocks[0][index]
        for name in inside:
            holder = f"{holder}.{name}"
            if (holder, key.use) in agree:
                return True
    if key.part in CALL_PARTS:
        last = key._replace(part="attention")
        if changes.get(last, 0.0) <= budgets.get(last, 0.0):
            return True
        if key.part in ("q", "k"):
            known = [one for one in (key._replace(part=part) for part in ("mask", "scores")) if one in changes]
            return bool(known) and all(changes[one] <= budgets[one] for one in known)
    return False
