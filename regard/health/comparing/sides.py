"""The two sides of a comparison: models, fingerprints, or files and folders that hold what a model computed."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.health.comparing.fingerprint import Fingerprint
from regard.health.comparing.fingerprints import compare_fingerprints
from regard.health.comparing.models import BATCHES, compare_models
from regard.health.comparing.result import ModelComparison
from regard.health.comparing.take import fingerprint
from regard.health.measure.batches import as_batches, evaluation_mode, is_function
from regard.health.probe.task import LossReading
from regard.health.probe.trial import Trial

FILES = (".regard", ".safetensors")


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
