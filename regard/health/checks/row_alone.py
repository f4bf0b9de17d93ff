"""A row alone must give what it gives in its batch."""

import torch

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.differences import alone_in_batch, largest_change
from regard.health.probe.trial import Trial

RULE = Rule(
    "RG212", "another answer in a batch", "a row alone gives what it gives in its batch", "critical",
    needs="token ids of two sequences",
    proves="Proves that the outputs for a row depend on how many rows are beside it.",
    cause="A shape, a mask or a statistic is taken from the batch: its first row, its size, or its mean.",
    fix="Take nothing from the batch axis: masks and positions per row, norms over features alone.",
)  # fmt: skip
RULES = (RULE,)


def check(trial: Trial) -> list[Finding]:
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
                RULE, "critical", [],
                f"Row {row} of a batch of {rows}, run alone, gives an output that differs by {amount:.2g} of its size.",
                f"relative change of a row > {trial.rounding:.2g}, which rounding explains",
            )  # fmt: skip
    return []
