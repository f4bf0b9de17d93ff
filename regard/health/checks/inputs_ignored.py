"""Inputs ignored: other rows, tokens or images, or another text for the encoder, leave the output as it is."""

import copy
from typing import Any

import torch
from torch import Tensor

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, NothingToCheck, Rule
from regard.health.probe.probe import main_output, relative_change
from regard.health.probe.trial import Trial
from regard.health.tokens.text import TokenBatch

INPUTS = Rule(
    "RG806", "inputs ignored", "the output depends on the input", "critical", needs="two rows that differ",
    proves="Proves that rows with other inputs have one output.",
    cause="The mask hides everything, the pooled row is a constant one, or an input is not passed on.",
    fix="Follow one row from the embedding to the output: print where two rows become equal.",
)  # fmt: skip
LEAST_ROWS = 1e-6  # relative change between two rows
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


def check_inputs(trial: Trial, rule: Rule) -> list[Finding]:
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
        if amount > LEAST_ROWS or depends_in_double(trial, batch):
            return []
        return trial.find(
            rule, "critical", [],
            f"Two rows with other inputs have outputs that differ by {amount:.2g} of their size.",
            f"relative change < {LEAST_ROWS:g}",
        )  # fmt: skip
    raise NotApplicable("the batches hold no two rows that differ")


ENCODER = Rule(
    "RG801", "encoder ignored", "the decoder depends on the encoder's text",
    "critical", needs="token ids of an encoder and a decoder",
    proves="Proves that another text for the encoder does not change the decoder's output.",
    cause="Cross-attention takes keys and values from the decoder, or the encoder's output is masked away.",
    fix="Give cross-attention the encoder's output as keys and values.",
)  # fmt: skip
LEAST = 1e-4  # relative change of the output


def check_encoder(trial: Trial, rule: Rule) -> list[Finding]:
    tokens = trial.tokens
    if not tokens.has_decoder:
        raise NothingToCheck("the model has no decoder that reads an encoder")
    trial.require_repeatable()
    everywhere = torch.ones_like(tokens.ids, dtype=torch.bool)
    changed = trial.probe.run(tokens.with_ids(tokens.exchange(tokens.ids, everywhere)))
    amount = relative_change(trial.captured[0], changed)
    if amount > LEAST:
        return []
    cross = [key for key, one in trial.captured[1].items() if one.call.is_cross(key[0])]
    return trial.find(
        rule, "critical", cross,
        f"Another text for the encoder changes the decoder's output by {amount:.2g} of its size: it does not read it.",
        f"relative change < {LEAST:g}",
        "Check that cross-attention takes keys and values from the encoder's output (not from the decoder), that this "
        "output is not 0 or masked away, and that the cross-attention weights were loaded.",
    )  # fmt: skip


WAYS = ((ENCODER, check_encoder), (INPUTS, check_inputs))
RULES = tuple(rule for rule, _ in WAYS)


def check(trial: Trial) -> list[Finding]:
    return trial.ask_each(WAYS)
