"""What is compared: two models on the same batches, or fingerprints, files and folders that hold what a model computed.

Of two models: the first place that differs by more than rounding, and why.

B's blocks are given the inputs of A's, so that every block is judged alone; where one differs, its modules are given
theirs. A difference inside a block that its output does not show is another form of the same computation.
"""

from __future__ import annotations

import inspect
import math
import os
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.health.capture.forwards import as_written
from regard.health.capture.interception import check_model
from regard.health.comparing.compared import Compared, chooses, compare_batch, rearranged, refine
from regard.health.comparing.difference import beyond
from regard.health.comparing.explain import explain_place, say_unknown
from regard.health.comparing.fingerprint import Fingerprint
from regard.health.comparing.fingerprints import compare_fingerprints
from regard.health.comparing.record import CALL_PARTS, LOSS, Key, Mode
from regard.health.comparing.result import LayerDifference, ModelComparison, list_layers
from regard.health.comparing.take import fingerprint
from regard.health.comparing.ways import EVALUATED, find_random, is_training, look_further, separate_weights
from regard.health.measure.batches import as_batches, evaluation_mode, is_function
from regard.health.probe.task import LossReading
from regard.health.probe.trial import Trial

FILES = (".regard", ".safetensors")  # a folder holds what another program wrote
BATCHES = 4  # that are compared, at most
SAME = "Both models compute the same, within rounding."


def is_side(x: Any) -> bool:
    """True for what `compare_sides` takes, and not for a report or the path of one."""
    if isinstance(x, (nn.Module, Fingerprint)):
        return True
    return isinstance(x, (str, os.PathLike)) and (Path(x).suffix in FILES or Path(x).is_dir())


def compare_sides(a: Any, b: Any, batches: Any = None, tolerance: float | None = None) -> ModelComparison:
    """Compare models, fingerprints and dumps: two models on `batches`, else by their fingerprints."""
    if isinstance(a, nn.Module) and isinstance(b, nn.Module):
        given = batches if batches is None or is_function(batches) else list(islice(as_batches(batches), BATCHES))
        found = compare_models(a, b, given, tolerance)
        return found if found.same or is_function(given) else replace(found, losses=measure_losses((a, b), given))
    for name, one in (("a", a), ("b", b)):
        if not is_side(one):
            said = type(one).__name__ if not isinstance(one, (str, os.PathLike)) else repr(str(one))
            raise TypeError(f"{name} must be a torch.nn.Module as the other is, a Fingerprint or its file, got {said}")
    read = [one if isinstance(one, nn.Module) else read_side(one) for one in (a, b)]
    known = next(one for one in read if isinstance(one, Fingerprint))
    given = known.batches if batches is None else batches
    if any(isinstance(one, nn.Module) for one in read) and any(isinstance(x, dict) and not x for x in given):
        raise ValueError("batches is missing: the fingerprint holds no token ids, because its inputs were none")
    taken = [one if isinstance(one, Fingerprint) else fingerprint(one, _fit(one, given)) for one in read]
    return compare_fingerprints(taken[0], taken[1], tolerance)


def measure_losses(models: tuple[nn.Module, nn.Module], batches: Any) -> tuple[LossReading, LossReading] | None:
    """The losses of two models on the same batches; None where they have none, or not the same."""
    found = []
    for model in models:
        trial = Trial(model, batches, [], [], None, None)
        with evaluation_mode(list(model.named_modules())), torch.no_grad(), trial.probe.active():
            try:
                found.append(trial.loss_reading)
            except Exception:  # a model that refuses to run is compared without
                return None
    a, b = found
    return None if a is None or b is None or a.kind != b.kind else (a, b)


def _fit(model: nn.Module, batches: Any) -> Any:
    """The batches of a fingerprint as another model takes them: ids by place where it has no argument of that name."""
    accepted = inspect.signature(model.forward).parameters
    by_name = "input_ids" in accepted or any(x.kind is x.VAR_KEYWORD for x in accepted.values())
    if not isinstance(batches, list):
        return batches
    if not by_name:
        return [x["input_ids"] if isinstance(x, dict) and "input_ids" in x else x for x in batches]
    named = any(x.kind is x.VAR_KEYWORD for x in accepted.values())
    return [{k: v for k, v in x.items() if named or k in accepted} if isinstance(x, dict) else x for x in batches]


def read_side(one: Any) -> Fingerprint:
    """A fingerprint from a file, or from a folder of tensors that another program wrote."""
    if isinstance(one, Fingerprint):
        return one
    if Path(one).is_dir():
        from regard.health.comparing.dumps import read_dump

        return read_dump(one)
    return Fingerprint.load(one)


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
    chosen = [batches] if is_function(batches) else list(islice(as_batches(batches), BATCHES))
    if not chosen:
        raise ValueError("batches is empty; there is nothing to compare")
    models = as_written(model), as_written(reference)
    random = find_random(models, chosen[0])
    if random is not None:
        place, cause = random
        return ModelComparison(
            False, None, cause, True, _name_place(place), [], math.nan, 0.0, tried=["two runs of each model"]
        )

    def judge(batches: list[Any], mode: Mode = "evaluation") -> ModelComparison:
        return _judge([compare_batch(models, batch, tolerance, mode) for batch in batches])

    found = judge(chosen)
    if found.same:
        return look_further(models, chosen, found, judge)
    found = separate_weights(models, found, lambda: judge(chosen))
    return replace(found, notes=[f"{EVALUATED}.", *found.notes]) if any(map(is_training, models)) else found


def _judge(compared: list[Compared]) -> ModelComparison:
    worst = next((one for one in compared if one.differing()), compared[0])
    output = max(one.output for one in compared)
    notes: list[str] = []
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
        if any(one.output > one.allowed for one in compared):
            cause = (
                f"the outputs differ by {output:.2g} of their size, and each block alone computes the same: "
                "something is handed on beside the hidden states (a cache, a state, a buffer that is written to)."
            )
            return result(False, cause, False, "the model's output", tried=["each block alone", "the outputs"])
        return result(True, SAME, True)
    if (moved := rearranged(worst)) is not None:
        if all(one.output <= one.allowed for one in compared):
            notes.append(f"The outputs alone were compared: {moved}.")
            return result(True, SAME, True)
        cause = f"the outputs differ by {output:.2g} of their size, and places inside cannot be compared: {moved}."
        return result(False, cause, False, "the model's output", tried=["the outputs"])
    case, key, keys = refine(worst, found)
    if key is None and chooses(worst, found):
        notes.append("Some tokens take other experts: their scores are tied within rounding, and no module differs.")
        return result(True, SAME, True)
    if key is None:
        key, case = found[0], replace(case, b=worst.forced, changes=worst.changes, budgets=worst.budgets)
    found_cause, tried = explain_place(case, key)
    cause = say_unknown(case, key, tried) if found_cause is None else found_cause.text
    named, is_seen = found_cause is not None and found_cause.reproduces, found_cause is not None
    index = worst.pairing.block_of(key)
    if index is None and key.module and key.part in CALL_PARTS:
        index = [one.module for one in worst.runs[0].calls].index(key.module)
    blocks = {worst.pairing.block_of(one) for one in keys if one.part == key.part and _role(one) == _role(key)}
    alike = sorted(block for block in blocks if block is not None)
    forward = worst.runs[0].forward_of(key)
    step = f", forward {forward + 1}" if forward else f", call {key.use + 1}" if key.use else ""
    where = _name_place(key, index, alike, len(worst.pairing.blocks[0])) + step
    first = next((one for one in layers if one.index == index), None)
    return result(False, cause, named, where, first=first, tried=tried, is_seen=is_seen)


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
    calls = [key for key in keys if key.part == "attention"]
    call = next((key.module for key in [*(key for key in calls if key in wrong), *calls]), name)
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
    """`the scores of layers.3.self_attn`, with the other layers of which the same is true."""
    what = {
        "in": "the input of", "out": "the output of", "out 1": "the second output of", "out 2": "the third output of",
        "attention": "attention's output in", "q": "queries of", "k": "keys of", "v": "values of",
        "mask": "the mask of", "scores": "the scores of", LOSS: "the loss of",
    }.get(key.part, f"{key.part.removeprefix('out ')} of")  # fmt: skip
    name = (key.module or "the model") + _say_role(key.module)
    if index is None:
        return f"{what} {name}"
    layers = alike or [index]
    several = "every layer, " if count > 1 and len(layers) == count else f"{list_layers(layers)}, "
    return f"{several if len(layers) > 1 else ''}{what} {name}"
