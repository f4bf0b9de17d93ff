"""What one forward in evaluation mode does not show: random outputs, training mode, decoding, code beneath weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from regard.health.checks.rule import NotApplicable, NothingToCheck
from regard.health.comparing.causes.modules import is_same
from regard.health.comparing.difference import first_change
from regard.health.comparing.record import Key, Mode, record
from regard.health.comparing.result import ModelComparison
from regard.health.measure.batches import evaluation_mode, is_function
from regard.health.probe.decoding import find_decoders
from regard.health.probe.modes import preserved
from regard.health.probe.probe import Probe, main_output
from regard.health.tokens.forms import is_ids
from regard.health.tokens.text import as_batch

Models = tuple[nn.Module, nn.Module]
Judge = Callable[..., ModelComparison]  # (batches, mode)
SHORTEST, LONGEST = 4, 64  # tokens that are decoded
EVALUATED = "Both were compared in evaluation mode."
MOST = 0.5  # of all weights: if more differ, the models were trained apart


def find_random(models: Models, batch: Any, notes: list[str]) -> tuple[Key, str] | None:
    """The first place whose numbers another run does not repeat, with the cause; notes on the models' modes."""
    for name, model in zip("AB", models, strict=True):
        if (key := _first_random(model, batch, "evaluation")) is not None:
            return key, (
                f"{name} gives another output on each run of the same batch, in evaluation mode as well: dropout is "
                "left on (it is not told self.training), or other random numbers."
            )
    training = [is_training(one) for one in models]
    pairs = zip(training, models, strict=True)
    active = [trains and _first_random(one, batch, "given") is not None for trains, one in pairs]
    if active[0] != active[1]:
        name = "AB"[active.index(True)]
        notes.append(f"{name} was given in training mode with dropout active, the other was not.")
        notes.append("mode")
    elif any(training):
        notes.append(EVALUATED if all(training) else (
            f"{'AB'[training.index(True)]} was given in training mode; both were compared in evaluation mode."
        ))  # fmt: skip
    return None


def is_training(model: nn.Module) -> bool:
    return any(module.training for module in model.modules())


def _first_random(model: nn.Module, batch: Any, mode: Mode) -> Key | None:
    return first_change(*(record(model, batch, seed=seed, mode=mode) for seed in (0, 1)))


def look_further(models: Models, batches: list[Any], found: ModelComparison, judge: Judge) -> ModelComparison:
    """Compare models that agree in one forward in training mode too, if both were given in it, and in decoding."""
    notes = list(found.notes)
    if all(map(is_training, models)) and all(_first_random(one, batches[0], "training") is None for one in models):
        trained = judge(batches, "training")
        if not trained.same:
            said = "In evaluation mode both compute the same."
            return replace(trained, where=f"in training mode, {trained.where}", notes=[*trained.notes, said])
        notes.remove(EVALUATED)
        notes.append("Both were compared in evaluation mode, and in training mode without dropout.")
    decode = _find_decoding(models, batches[0])
    if isinstance(decode, str):
        return replace(found, notes=[*notes, decode])
    if decode is None:
        return replace(found, notes=notes)
    with preserved(models[0]), preserved(models[1]):
        decoded = judge([decode])
    if decoded.same:
        return replace(found, notes=[*notes, "Decoding with a cache was compared as well."])
    said = "Without a cache both compute the same."
    return replace(decoded, where=f"decoding with a cache, {decoded.where}", notes=[*decoded.notes, said])


def _find_decoding(models: Models, batch: Any) -> Callable[[nn.Module], Any] | str | None:
    """A function that decodes the batch's text with a model; None without a cache, a note if B alone cannot."""
    if is_function(batch):
        return None
    ways = {}
    for name, model in zip("AB", models, strict=True):
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        given = as_batch(batch, device, model)
        if not is_ids(given.targets) or not given.targets.shape[1] >= SHORTEST:
            return None
        given = given.cut(given.count, LONGEST)
        try:
            with preserved(model), evaluation_mode(list(model.named_modules())), torch.no_grad():
                ways[id(model)] = find_decoders(Probe(model), given)[0], given.targets
        except (NotApplicable, NothingToCheck) as reason:
            return None if name == "A" else f"Decoding with a cache was not compared, because B cannot: {reason}."

    def decode(model: nn.Module) -> torch.Tensor:
        decoder, ids = ways[id(model)]
        state, start, parts, middle = None, 0, [], ids.shape[1] // 2
        for end in (middle, middle + 1, ids.shape[1]):  # a prompt, a token, and several at once
            if end > start:
                result, state = decoder.call(ids[:, start:end], start, state)
                parts.append(main_output(result))
            start = end
        return torch.cat(parts, 1)

    return decode


def separate_weights(models: Models, found: ModelComparison, judge: Callable[[], ModelComparison]) -> ModelComparison:
    """Compare models that were trained apart once more with A's weights in B: what their code does otherwise."""
    own, given = (
        {name: x for name, x in one.state_dict().items() if isinstance(x, torch.Tensor)} for one in models
    )  # a module's extra state may be anything
    if own.keys() != given.keys() or any(own[name].shape != x.shape for name, x in given.items()):
        return found
    if any(x.is_meta for x in (*own.values(), *given.values())):
        return found
    differ = [name for name, x in given.items() if not is_same(own[name], x)]
    if len(differ) <= MOST * len(given):
        return found
    before = {name: x.detach().clone() for name, x in given.items()}
    try:
        models[1].load_state_dict(own, strict=False)
        code = judge()
    finally:
        models[1].load_state_dict(before, strict=False)
    said = f"{len(differ)} of {len(given)} weights differ: the models were trained apart."
    if code.same:
        return replace(found, notes=[*found.notes, f"{said} With A's weights in B both compute the same."])
    cause = f"{said} With A's weights in B: {code.cause}"
    return replace(code, cause=cause, output=found.output, notes=[*found.notes, f"Weights: {found.line}"])
