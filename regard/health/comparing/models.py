"""Two models on the same batches: the first place that differs by more than rounding, and why.

B's blocks are given the inputs of A's, so that every block is judged alone; where one differs, its modules are given
theirs. A difference inside a block that its output does not show is another form of the same computation.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from regard.health.capture.interception import as_written, check_model
from regard.health.comparing.blocks import Pairing, find_blocks, pair
from regard.health.comparing.difference import SAFETY, beyond, budgets_of, change, changes_of, rounding_of
from regard.health.comparing.explain import Case, explain_place
from regard.health.comparing.record import CALL_PARTS, Key, Run, record
from regard.health.comparing.result import LayerDifference, ModelComparison, list_layers
from regard.health.measure.batches import as_batches, is_function

BATCHES = 4  # that are compared, at most
FEW = 0.25  # of all tokens: so many may take other experts by rounding
SEEDS = (1, 2)  # of the runs with rounding noise
SAME = "Both models compute the same, within rounding."


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

    def differing(self) -> list[Key]:
        """What differs of blocks' inputs and outputs and of the model's outputs; what else differs has no effect."""
        judges = {*self.pairing.blocks[0], ""}
        found = [key for key in beyond(self.changes, self.budgets) if key.module in judges]
        return [key for key in found if key.part in ("in", "out") or not key.module]


def compare_models(
    model: nn.Module, reference: nn.Module, batches: Any, tolerance: float | None = None
) -> ModelComparison:
    """Run both models on the same batches and find the first place that differs, and its cause."""
    for name, one in (("a", model), ("b", reference)):
        if not isinstance(one, nn.Module):
            raise TypeError(f"{name} must be a torch.nn.Module as the other is, got {type(one).__name__}")
        check_model(one)
    if batches is None:
        raise ValueError("batches is missing; two models are compared on batches: compare(model, reference, batches)")
    chosen = [batches] if is_function(batches) else list(itertools.islice(as_batches(batches), BATCHES))
    if not chosen:
        raise ValueError("batches is empty; there is nothing to compare")
    models = as_written(model), as_written(reference)
    notes: list[str] = []
    random = _find_random(models, chosen[0], notes)
    if random is not None:
        return random
    compared = [_run(models, batch, tolerance) for batch in chosen]
    return _judge(compared, notes)


def _run(models: tuple[nn.Module, nn.Module], batch: Any, tolerance: float | None) -> Compared:
    """Run both, and B once more on the inputs of A's blocks; with padding where that alone tells what differs."""
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
        return Compared(models, batch, (a, b), forced, pairing, size, tolerance, _gap(a, b), allowed, changes, budgets)

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


def _find_random(models: tuple[nn.Module, nn.Module], batch: Any, notes: list[str]) -> ModelComparison | None:
    """A model whose outputs are random: as it was given, or still in evaluation mode."""
    for name, model in zip("AB", models, strict=True):
        first, second = (record(model, batch, seed=seed) for seed in (0, 1))
        found = beyond(changes_of(first, second), {})
        if found:
            ends = [key for key in found if key.part.startswith("out") or key.part == "attention"]
            key = (ends or found)[0]
            cause = (
                f"{name} gives another output on each run of the same batch, in evaluation mode as well: dropout is "
                "left on (it is not told self.training), or other random numbers."
            )
            return ModelComparison(
                False, None, cause, True, _name_place(key), [], float("nan"), 0.0, tried=["two runs of each model"]
            )
    training = [any(module.training for module in one.modules()) for one in models]
    active = [mode and _is_random_as_given(one, batch) for mode, one in zip(training, models, strict=True)]
    if active[0] != active[1]:
        name = "AB"[active.index(True)]
        notes.append(f"{name} was given in training mode with dropout active, the other was not.")
        notes.append("mode")
    elif any(training):
        notes.append("Both were compared in evaluation mode." if all(training) else (
            f"{'AB'[training.index(True)]} was given in training mode; both were compared in evaluation mode."
        ))  # fmt: skip
    return None


def _is_random_as_given(model: nn.Module, batch: Any) -> bool:
    first, second = (record(model, batch, seed=seed, as_given=True) for seed in (0, 1))
    return bool(beyond(changes_of(first, second), {}))


def _judge(compared: list[Compared], notes: list[str]) -> ModelComparison:
    worst = next((one for one in compared if one.differing()), compared[0])
    output = max(one.output for one in compared)
    by_mode = "mode" in notes
    notes = [note for note in notes if note != "mode"]
    counts = [len(blocks) or None for blocks in worst.pairing.blocks]
    if counts[0] != counts[1] or (counts[0] is None and len(worst.runs[0].calls) != len(worst.runs[1].calls)):
        counts = [count or len(run.calls) for count, run in zip(counts, worst.runs, strict=True)]
    layers = _merge_layers(compared)
    rounding = max(one.allowed for one in compared)

    def result(same: bool, cause: str, named: bool, where: str = "", **more: Any) -> ModelComparison:
        first = more.pop("first", None)
        parts = [] if first is None else [part for part in first.differs if part != "block"] or list(first.differs)
        return ModelComparison(same, first, cause, named, where, layers, output, rounding, parts, notes=notes, **more)

    found = worst.differing()
    if counts[0] != counts[1]:
        cause = f"the models have {counts[0]} and {counts[1]} layers: A has {counts[0]}, B {counts[1]}"
        return result(False, f"{cause}. Nothing else is judged before the depth agrees.", True, "the number of layers")
    if not worst.runs[0].points or not worst.changes:
        raise ValueError("no place is common to both models: there is nothing to compare")
    if not found:
        if by_mode:
            return result(
                False, f"{notes[0]} In evaluation mode both compute the same: call .eval().", True, "the mode"
            )
        if any(one.output > one.allowed for one in compared):
            cause = (
                f"the outputs differ by {output:.2g} of their size, and each block alone computes the same: "
                "something is handed on beside the hidden states (a cache, a state, a buffer that is written to)."
            )
            return result(False, cause, False, "the model's output", tried=["each block alone", "the outputs"])
        return result(True, SAME, True)
    if (moved := _rearranged(worst)) is not None:
        if all(one.output <= one.allowed for one in compared):
            notes.append(f"The outputs alone were compared: {moved}.")
            return result(True, SAME, True)
        cause = f"the outputs differ by {output:.2g} of their size, and places inside cannot be compared: {moved}."
        return result(False, cause, False, "the model's output", tried=["the outputs"])
    case, key, keys = _refine(worst, found)
    if key is None and _chooses(worst, found):
        notes.append("Some tokens take other experts: their scores are tied within rounding, and no module differs.")
        return result(True, SAME, True)
    if key is None:
        key, case = found[0], replace(case, b=worst.forced, changes=worst.changes, budgets=worst.budgets)
    cause, named, tried = explain_place(case, key)
    index = worst.pairing.block_of(key)
    if index is None and key.module and key.part in CALL_PARTS:
        index = [one.module for one in worst.runs[0].calls].index(key.module)
    blocks = {worst.pairing.block_of(one) for one in keys if one.part == key.part and _role(one) == _role(key)}
    alike = sorted(block for block in blocks if block is not None)
    where = _name_place(key, index, alike, len(worst.pairing.blocks[0]))
    first = next((one for one in layers if one.index == index), None)
    return result(False, cause, named, where, first=first, tried=tried)


def _rearranged(one: Compared) -> str | None:
    """In which other arrangement B's modules are given the same tokens: each row alone, or padding on another side."""
    root = Key("in", "", 0)
    for key, other in one.pairing.places.items():
        if key.part != "in" or not key.module or key not in one.runs[0].points or other not in one.runs[1].points:
            continue
        a, b = one.runs[0].points[key], one.runs[1].points[other]
        if one.changes.get(root, 0.0) > 0.0 or a.ndim < 2 or (a.is_floating_point() and a.shape[1:] != b.shape[1:]):
            return None
        if a.shape != b.shape:
            return f"{key.module} is given {list(a.shape)} in A, {list(b.shape)} in B"
        if a.is_floating_point():
            return None
        if not torch.equal(a, b) and torch.equal(a.flatten().sort().values, b.flatten().sort().values):
            return f"{key.module} is given its tokens in another order in B, as with padding on another side"
    return None


def _refine(one: Compared, found: list[Key]) -> tuple[Case, Key | None, list[Key]]:
    """The first place inside a block that differs, with every module given A's input; and all such places."""
    changes, budgets, run = one.changes, one.budgets, one.forced
    apart = set(beyond(one.changes, one.budgets))
    agree = {(key.module, key.use) for key in one.changes if key.part == "out" and key not in apart}
    if one.pairing.same_code:
        a, b = one.models
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
    case = Case(one.models, one.runs[0], run, one.pairing, changes, budgets, one.size, one.runs[1], one.batch)
    return case, keys[0] if keys else None, keys


def _chooses(one: Compared, found: list[Key]) -> bool:
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


def _merge_layers(compared: list[Compared]) -> list[LayerDifference]:
    """The table: a row per block, or per attention call where there are no blocks; the largest of all batches."""
    rows: list[LayerDifference] = []
    for one in compared:
        names = one.pairing.blocks[0]
        wrong = set(beyond(one.changes, one.budgets))
        places: list[tuple[str, list[Key]]] = [(name, []) for name in names]
        for key in one.changes:
            at = one.pairing.block_of(key)
            if at is not None:
                places[at][1].append(key)
        if not names:
            calls = dict.fromkeys(key.module for key in one.runs[0].calls)
            places = [(name, [key for key in one.changes if key.module == name]) for name in calls]
        made = [_row(one, index, name, keys, wrong) for index, (name, keys) in enumerate(places)]
        rows = made if not rows else [_worse(*both) for both in zip(rows, made, strict=False)]
    return rows


def _row(one: Compared, index: int, name: str, keys: list[Key], wrong: set[Key]) -> LayerDifference:
    numbers: dict[str, float] = {}
    differs: list[str] = []
    for key in keys:
        part = {"attention": "output", "mask": "scores"}.get(key.part, key.part)
        if key.part == "out" and key.module == name:
            part = "block"
        elif part not in ("q", "k", "v", "scores", "output"):
            continue
        numbers[part] = max(numbers.get(part, 0.0), one.changes[key])
        if key in wrong and part not in differs:
            differs.append(part)
    call = next((key.module for key in keys if key.part == "attention"), name)
    other = next(
        (one.pairing.places[key].module for key in keys if key in one.pairing.places and key.module == call), ""
    )
    order = [part for part in ("q", "k", "v", "scores", "output", "block") if part in differs]
    return LayerDifference(index, call, other, differs=tuple(order), **numbers)


def _worse(a: LayerDifference, b: LayerDifference) -> LayerDifference:
    return max((a, b), key=lambda one: (len(one.differs), max([x for x in one.numbers if x is not None], default=0.0)))


def _role(key: Key) -> str:
    """A module's name without the number of its layer."""
    return ".".join(part for part in key.module.split(".") if not part.isdigit())


def _say_role(name: str) -> str:
    """What a module is for, where its name tells and the name of its place does not."""
    for words, role in ((("mlp", "ffn", "feed_forward", "fc1", "fc2"), "MLP"), (("norm", "ln_"), "norm")):
        if any(word in name.lower() for word in words):
            return f" ({role})"
    return ""


def _name_place(key: Key, index: int | None = None, alike: list[int] | None = None, count: int = 0) -> str:
    """`layer 3 (layers.3.self_attn), the scores`, with the other layers of which the same is true."""
    what = {
        "in": "the input of", "out": "the output of", "out 1": "the second output of", "out 2": "the third output of",
        "attention": "attention's output in", "q": "queries of", "k": "keys of", "v": "values of",
        "mask": "the mask of", "scores": "the scores of",
    }[key.part]  # fmt: skip
    name = (key.module or "the model") + _say_role(key.module)
    step = f", forward {key.use + 1}" if key.use else ""
    if index is None:
        return f"{what} {name}{step}"
    layers = alike or [index]
    several = "every layer" if count > 1 and len(layers) == count else list_layers(layers)
    return f"{several}, {what} {name}{step}"
