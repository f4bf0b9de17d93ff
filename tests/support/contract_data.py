"""Runs one check of the contract alone, on a model and batches."""

import importlib

import torch

from regard.health.checks.rule import NotApplicable
from regard.health.probe.trial import Trial


def run_check(name, model, batch, **options):
    """Returns the findings of the check in that file, or the reason why it was not made."""
    module = importlib.import_module(f"regard.health.checks.{name}")
    causal, loss = options.get("causal"), options.get("loss")
    batches = batch if isinstance(batch, list) else [batch]
    trial = Trial(model.eval(), batches, [], [], causal, loss)
    with torch.no_grad(), trial.probe.active():
        try:
            return module.check(trial)
        except NotApplicable as reason:
            return str(reason)


def codes(found):
    """The codes of findings that are more than notes."""
    return [] if isinstance(found, str) else [one.code for one in found if one.severity != "note"]
