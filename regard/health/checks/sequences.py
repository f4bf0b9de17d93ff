"""Rows of a batch: one changes no other, as attention over the batch axis does, and gives the same alone."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.differences import alone_in_batch, largest_change
from regard.health.probe.probe import relative_change
from regard.health.probe.trial import Trial
from regard.health.tokens.text import TokenBatch

MIXED = Rule(
    "RG201", "sequences mixed", "the sequences of a batch do not change one another",
    "critical", needs="token ids of two sequences",
    proves="Proves that one sequence's outputs depend on another sequence.",
    cause="Attention, a norm or a convolution runs over the batch axis.",
    fix="Check which axis is the batch: batch_first=True for nn.MultiheadAttention, (B, H, N, d) for "
    "scaled_dot_product_attention.",
    explains=("RG202", "RG203", "RG212", "RG213", "RG803"),
)  # fmt: skip


def check_mixed(trial: Trial, rule: Rule) -> list[Finding]:
    trial.require_repeatable()
    trial.require_sequences()
    tokens = trial.sample
    batch = tokens.ids.shape[0]
    shape = batch, tokens.ids.shape[1] if tokens.ids.ndim > 1 else 1
    if batch < 2:
        raise NotApplicable("the batches hold one sequence each")
    before = outputs_of(trial.probe.run_model(tokens), *shape)
    if not before:
        raise NotApplicable("no output has a row per sequence")
    for changed in (slice(1, None), slice(0, batch - 1)):  # a causal order over the batch shows one way alone
        where = torch.zeros(tokens.ids.shape[:2], dtype=torch.bool, device=tokens.ids.device)
        where[changed] = True
        kept = [row for row in range(batch) if not bool(where[row].any())]
        other = tokens.with_ids(tokens.exchange(tokens.ids, where))
        after = outputs_of(trial.probe.run_model(other), *shape)
        amounts = {name: relative_change(x[kept], after[name][kept]) for name, x in before.items() if name in after}
        name = max(amounts, key=lambda one: amounts[one])
        if amounts[name] > trial.tolerance:
            require_single_rows(trial)
            return report(trial, rule, kept, other, f" {name!r}" if len(before) > 1 else "", amounts[name])
    return []


def require_single_rows(trial: Trial) -> None:
    """Raises NotApplicable if the model refuses one row alone: its rows belong together, as MusicGen's codebooks."""
    try:
        trial.probe.run(trial.sample.select(torch.tensor([0], device=trial.device)))
    except Exception as error:
        raise NotApplicable("the model does not take one row alone: its rows belong together") from error


def report(trial: Trial, rule: Rule, kept: list[int], other: TokenBatch, output: str, amount: float) -> list[Finding]:
    """[Finding], with the first layer at which another sequence's tokens arrive."""
    _, calls = trial.probe.capture(other)
    keys = [
        key
        for key, one in trial.captured[1].items()
        if key in calls
        and one.output.shape == calls[key].output.shape
        and one.output.shape[0] == trial.sample.ids.shape[0]
        and relative_change(one.output[kept], calls[key].output[kept]) > trial.tolerance
    ]
    rows, length = trial.sample.ids.shape[:2]
    over = [
        key for key, one in trial.captured[1].items()
        if rows != length and (one.q.shape[0], one.q.shape[2], one.k.shape[2]) == (length, rows, rows)
    ]  # fmt: skip
    where = f" The attention of {over[0][0]} runs over the {rows} rows of the batch, not over tokens." if over else ""
    return trial.find(
        rule, "critical", (over or keys)[:1],
        f"Other tokens in one sequence of a batch change the output{output} for another by {amount:.2g} of its "
        f"size.{where}",
        f"relative change of another sequence > {trial.tolerance:g}",
        "Check which axis is the batch: nn.MultiheadAttention and nn.Transformer take (N, B, E) unless "
        "batch_first=True; scaled_dot_product_attention needs (B, H, N, d).",
    )  # fmt: skip


def outputs_of(result: Any, batch: int, length: int) -> dict[str, Tensor]:
    """The outputs with a row per sequence, by name; without those of pairs of sequences [B, B, …], as CLIP's."""
    if isinstance(result, Tensor):
        named: dict[str, Any] = {"output": result}
    elif isinstance(result, Mapping):
        named = dict(result)
    else:
        named = {str(at): x for at, x in enumerate(result)} if isinstance(result, (tuple, list)) else dict(vars(result))
    rows = {
        name: x
        for name, x in named.items()
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 and x.shape[0] == batch
    }
    return {name: x for name, x in rows.items() if tuple(x.shape[:2]) != (batch, batch) or x.shape[1] == length}


ALONE = Rule(
    "RG212", "another answer in a batch", "a row alone gives what it gives in its batch", "critical",
    needs="token ids of two sequences",
    proves="Proves that the outputs for a row depend on how many rows are beside it.",
    cause="A shape, a mask or a statistic is taken from the batch: its first row, its size, or its mean.",
    fix="Take nothing from the batch axis: masks and positions per row, norms over features alone.",
)  # fmt: skip


def check_alone(trial: Trial, rule: Rule) -> list[Finding]:
    trial.require_repeatable()
    trial.require_sequences()
    tokens, output = trial.sample, trial.captured[0]
    rows = tokens.targets.shape[0]
    if rows < 2 or output.shape[0] != rows:
        raise NotApplicable("the batches hold one sequence each")
    for row in (rows - 1, 0):
        alone = trial.probe.run(tokens.select(torch.tensor([row], device=tokens.targets.device)))
        amount = largest_change(*alone_in_batch(output, alone, row))
        if amount > trial.rounding:
            return trial.find(
                rule, "critical", [],
                f"Row {row} of a batch of {rows}, run alone, gives an output that differs by {amount:.2g} of its size.",
                f"relative change of a row > {trial.rounding:.2g}, which rounding explains",
            )  # fmt: skip
    return []


WAYS = ((MIXED, check_mixed), (ALONE, check_alone))
RULES = tuple(rule for rule, _ in WAYS)


def check(trial: Trial) -> list[Finding]:
    return trial.ask_each(WAYS)
