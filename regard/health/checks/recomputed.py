"""Recomputed activations: what a checkpointed layer computes again in the backward is what the forward computed.

Dropout is on. A layer that runs again under another random state, or with a state that its first run changed, gives the
gradients of another function than the loss.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack, nullcontext

import torch
from torch import Tensor, nn

from regard.health.capture.forwards import uncaptured
from regard.health.checks.gradients import LENGTH, MOST_WEIGHTS, SEQUENCES, requiring_grad
from regard.health.checks.rule import NotApplicable, NothingToCheck, Rule
from regard.health.probe.modes import checkpointing, preserved
from regard.health.probe.probe import main_output, relative_change
from regard.health.probe.trial import Trial

RULE = Rule(
    "RG622", "recomputed otherwise", "what the backward computes again is what the forward computed", "warning",
    needs="a model that checkpoints layers in training mode",
    proves="Proves that a module's output differs between the forward and the recomputation for its gradients.",
    cause="checkpoint(preserve_rng_state=False) with dropout, or a cache or counter that the first run changed.",
    fix="Keep preserve_rng_state=True, and leave no state in a checkpointed forward.",
    references=("OLMo-core#828",),
)  # fmt: skip
RULES = (RULE,)
DIFFERS = 1e-2  # relative change of a module's output: another dropout changes more, other kernels less


def check(trial: Trial) -> list:
    if sum(p.numel() for p in trial.model.parameters()) > MOST_WEIGHTS:
        raise NotApplicable(f"the model has more than {MOST_WEIGHTS:,} parameters")
    runs = run_twice(trial)
    if not runs and hasattr(trial.model, "gradient_checkpointing_enable"):
        runs = run_twice(trial, switched=True)
    if not runs:
        raise NothingToCheck("nothing is computed again in the backward")
    changed = [(name, amount) for name, amount in runs.items() if amount > DIFFERS]
    if not changed:
        return []
    name, amount = changed[0]
    keys = [key for key in trial.captured[1] if key[0] == name or name.startswith(f"{key[0]}.")][:1]
    text = f"{name}, the first of {len(changed)} modules, differs by {amount:.2g} of its output when it is run again."
    more = {} if keys else dict(layer=name)
    return trial.find(RULE, "warning", keys, text, f"relative change of an output > {DIFFERS:g}", **more)


def run_twice(trial: Trial, switched: bool = False) -> dict[str, float]:
    """The modules that run again in the backward, in order, and how far they are from all outputs of the forward."""
    text = trial.tokens.cut(SEQUENCES, LENGTH) if trial.batches else trial.sample
    first: dict[str, list[Tensor]] = defaultdict(list)
    found: dict[str, float] = {}
    is_backward = False

    def compare(name: str, output: object) -> None:
        x = output[0] if isinstance(output, (tuple, list)) and output else output
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return
        if not is_backward:
            first[name].append(x.detach().clone())  # the next module may work in place
            return
        alike = [relative_change(before, x.detach()) for before in first[name] if before.shape == x.shape]
        found[name] = max(found.get(name, 0.0), min(alike, default=float("inf")))

    parameters = [p for p in trial.model.parameters() if p.is_floating_point() and not p.is_meta]
    with ExitStack() as stack:
        stack.enter_context(preserved(trial.model))
        stack.enter_context(checkpointing(trial.model) if switched else nullcontext())
        stack.enter_context(requiring_grad(parameters))
        stack.enter_context(torch.enable_grad())
        for module in trial.model.modules():
            module.training = not isinstance(module, nn.modules.batchnorm._NormBase)
        for name, module in trial.part.named_modules():
            hook = module.register_forward_hook(lambda module, inputs, output, name=name: compare(name, output))
            stack.callback(hook.remove)
        stack.enter_context(uncaptured())  # a layer that runs outside the model's forward is not captured
        output = main_output(trial.probe.run_model(text))
        if not output.requires_grad:
            raise NotApplicable("the model's output has no gradient: it runs under no_grad")
        is_backward = True
        torch.autograd.grad(output.float().square().sum(), parameters, allow_unused=True)
    return {name: found[name] for name in first if name in found}
