"""What one forward in evaluation mode does not show: random outputs, training mode, decoding, code beneath weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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
from regard.health.models.loading import describe_error
from regard.health.probe.decoding import Decoder, find_decoders, why_not
from regard.health.probe.modes import preserved
from regard.health.probe.probe import Probe, main_output
from regard.health.tokens.forms import is_ids
from regard.health.tokens.text import as_batch, with_decoder_ids

Models = tuple[nn.Module, nn.Module]
Judge = Callable[..., ModelComparison]  # (batches, mode)
SHORTEST, LONGEST = 4, 64  # tokens that are decoded
SINGLE = 4  # tokens that are decoded one by one
DECODING = "Decoding with a cache"
EVALUATED = "Both were compared in evaluation mode"
MOST = 0.5  # of all weights: if more differ, the models were trained apart


def find_random(models: Models, batch: Any) -> tuple[Key, str] | None:
    """The first place whose numbers another run does not repeat, with the cause."""
    for name, model in zip("AB", models, strict=True):
        if (key := _first_random(model, batch, "evaluation")) is not None:
            return key, (
                f"{name} gives another output on each run of the same batch, in evaluation mode as well: dropout is "
                "left on (it is not told self.training), or other random numbers."
            )
    return None


def _first_random(model: nn.Module, batch: Any, mode: Mode) -> Key | None:
    return first_change(*(record(model, batch, seed=seed, mode=mode) for seed in (0, 1)))


def look_further(models: Models, batches: list[Any], found: ModelComparison, judge: Judge) -> ModelComparison:
    """Compare models that agree in one forward in training mode too, if both were given in it, and in decoding."""
    notes = list(found.notes)
    for name, look in (("Training mode", _look_at_training), (DECODING, _look_at_decoding)):
        try:
            seen = look(models, batches, found, judge)
        except Exception as error:  # what one forward told is kept
            seen = f"{name} was not compared: {describe_error(error)}."
        if isinstance(seen, ModelComparison):
            return seen
        notes += [seen] if seen else []
    return replace(found, notes=notes)


def _look_at_training(
    models: Models, batches: list[Any], found: ModelComparison, judge: Judge
) -> ModelComparison | str:
    """What differs in the modes that the models were given in, or a note on what was compared."""
    training = list(map(is_training, models))
    if not any(training):
        return f"{EVALUATED}; training mode was not (call .train() on both)."
    pairs = zip(training, models, strict=True)
    drops = [trains and _first_random(one, batches[0], "given") is not None for trains, one in pairs]
    if drops[0] != drops[1]:
        cause = f"{'AB'[drops[1]]} was given in training mode with dropout active, the other was not."
        cause = f"{cause} In evaluation mode both compute the same: call .eval()."
        return replace(found, same=False, cause=cause, where="the mode")
    if not all(training):
        return f"{'AB'[training[1]]} was given in training mode; both were compared in evaluation mode alone."
    if any(_first_random(one, batches[0], "training") is not None for one in models):
        return f"{EVALUATED}; training mode was not, because it is random without dropout as well."
    trained = judge(batches, "training")
    if trained.same:
        return f"{EVALUATED}, and in training mode without dropout."
    said = "In evaluation mode both compute the same."
    return replace(trained, where=f"in training mode, {trained.where}", notes=[*trained.notes, said])


def is_training(model: nn.Module) -> bool:
    return any(module.training for module in model.modules())


def _look_at_decoding(
    models: Models, batches: list[Any], found: ModelComparison, judge: Judge
) -> ModelComparison | str:
    """What differs in decoding with a cache, or a note on what was compared; empty where neither takes a cache."""
    ways = [None if is_function(batches[0]) else _find_decoder(model, batches[0]) for model in models]
    known = [way for way in ways if isinstance(way, tuple)]
    if len(known) < 2:
        whys = [f"{name} cannot: {way}" for name, way in zip("AB", ways, strict=True) if isinstance(way, str)]
        whys += [f"{name} takes none" for name, way in zip("AB", ways, strict=True) if way is None and known]
        return f"{DECODING} was not compared, because {whys[0]}." if whys else ""
    n = known[0][1].shape[1]
    cuts: Sequence[int] = (n // 2, n // 2 + 1, n)  # a prompt, a token, and several at once
    alone = ""
    for name, model, (decoder, ids) in zip("AB", models, known, strict=True):
        with _evaluated(model):
            if not alone and (why := why_not(Probe(model), decoder, ids, cuts)):
                cuts, alone = range(n // 2, min(n // 2 + SINGLE, n) + 1), f", one token at a time: in {name}, {why}"
    given = {id(model): way for model, way in zip(models, known, strict=True)}

    def decode(model: nn.Module) -> torch.Tensor:
        decoder, ids = given[id(model)]
        state, start, parts = None, 0, []
        for end in cuts:
            result, state = decoder.call(ids[:, start:end], start, state)
            parts.append(main_output(result))
            start = end
        return torch.cat(parts, 1)

    with preserved(models[0]), preserved(models[1]):
        decoded = judge([decode])
    if decoded.same:
        return f"{DECODING} was compared as well{alone}."
    said = "Without a cache both compute the same."
    return replace(decoded, where=f"decoding with a cache, {decoded.where}", notes=[*decoded.notes, said])


def _find_decoder(model: nn.Module, batch: Any) -> tuple[Decoder, torch.Tensor] | str | None:
    """How a model decodes the batch's text, with its ids; why that is not known; None if it takes no cache or text."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    given = with_decoder_ids(as_batch(batch, device, model), model)
    if not is_ids(given.targets) or not given.targets.shape[1] >= SHORTEST:
        return None
    given = given.cut(given.count, LONGEST)
    try:
        with _evaluated(model):
            return find_decoders(Probe(model), given)[0], given.targets
    except NothingToCheck:
        return None
    except NotApplicable as reason:
        return str(reason)


@contextlib.contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    with preserved(model), evaluation_mode(list(model.named_modules())), torch.no_grad():
        yield


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
