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
            found = module.check(trial)
        except NotApplicable as reason:
            return str(reason)
        left = {rule: reason for rule, reason in trial.skipped if isinstance(reason, NotApplicable)}
        raised = [reason for rule, reason in trial.skipped if isinstance(reason, Exception) and rule not in left]
        assert not raised, raised
        return found if found or len(left) < len(module.RULES) else str(next(iter(left.values())))


def codes(found):
    """The codes of findings that are more than notes."""
    return [] if isinstance(found, str) else [one.code for one in found if one.severity != "note"]
