"""Inputs ignored: other rows, tokens or images leave the output as it is."""

import copy
from typing import Any

import torch
from torch import Tensor

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.probe import main_output, relative_change
from regard.health.probe.trial import Trial
from regard.health.tokens.text import TokenBatch

RULE = Rule(
    "RG806", "inputs ignored", "the output depends on the input", "critical", needs="two rows that differ",
    proves="Proves that rows with other inputs have one output.",
    cause="The mask hides everything, the pooled row is a constant one, or an input is not passed on.",
    fix="Follow one row from the embedding to the output: print where two rows become equal.",
)  # fmt: skip
RULES = (RULE,)
LEAST = 1e-6  # relative change between two rows
LEAST_DOUBLE, MOST_WEIGHTS = 1e-12, 50_000_000  # of a copy in float64, which tells a small change from rounding


def depends_in_double(trial: Trial, batch: TokenBatch) -> bool:
    """True if the two rows differ in float64, or the second has a gradient at its own image or sound there.

    New weights of many layers shrink what is in an image below any rounding, and not to 0.
    """
    if sum(p.numel() for p in trial.model.parameters()) > MOST_WEIGHTS:
        return False
    given: list[Tensor] = []

    def widen(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        x = x.double()
        if x.ndim > 2:
            given.append(x.requires_grad_())
        return x

    try:
        model, wide = copy.deepcopy(trial.model).double(), batch.map(widen)
        with torch.enable_grad():
            output = main_output(model(*wide.args, **wide.named))
            grads = torch.autograd.grad(output[1].sum(), given, allow_unused=True) if output.requires_grad else ()
    except Exception:  # a dtype that the user's code fixes
        return False
    return relative_change(output[0], output[1]) > LEAST_DOUBLE or any(x is not None and x[1].any() for x in grads)


def check(trial: Trial) -> list[Finding]:
    for batch in trial.inputs:
        given = [x for x in (*batch.args, *batch.named.values()) if isinstance(x, Tensor) and x.ndim > 1]
        if batch.count < 2 or not given or torch.equal(given[0][0], given[0][1]):
            continue
        output = main_output(trial.probe.run_model(batch))
        if output.ndim < 2 or output.shape[0] != batch.count or output[0].numel() < 2:
            continue
        if not bool(torch.isfinite(output[:2]).all()):
            raise NotApplicable("the output is not finite")
        amount = relative_change(output[0], output[1])
        if amount > LEAST or depends_in_double(trial, batch):
            return []
        return trial.find(
            RULE, "critical", [],
            f"Two rows with other inputs have outputs that differ by {amount:.2g} of their size.",
            f"relative change < {LEAST:g}",
        )  # fmt: skip
    raise NotApplicable("the batches hold no two rows that differ")
