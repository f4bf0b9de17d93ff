"""Sequences mixed: one sequence of a batch changes the output of another, as attention over the batch axis does."""

from regard.health.findings._finding import Finding
from regard.health.probing.probe import relative_change
from regard.health.probing.trial import NotApplicable, Trial
from regard.health.tokens.text import exchange_tokens

NAME = "the sequences of a batch do not change one another"
KIND = "sequences mixed"


def check(trial: Trial) -> list[Finding]:
    trial.require_repeatable()
    tokens, output = trial.tokens, trial.captured[0]
    if tokens.ids.shape[0] < 2 or output.shape[0] != tokens.ids.shape[0]:
        raise NotApplicable("the batches hold one sequence each")
    others = tokens.ids.new_ones(tokens.ids.shape).bool()
    others[0] = False
    changed, calls = trial.probe.capture(tokens.with_ids(exchange_tokens(tokens.ids, others)))
    amount = relative_change(output[0], changed[0])
    if amount <= trial.tolerance:
        return []
    keys = [
        key
        for key, one in trial.captured[1].items()
        if key in calls
        and one.output.shape == calls[key].output.shape
        and relative_change(one.output[0], calls[key].output[0]) > trial.tolerance
    ]
    return trial.find(
        KIND, "critical", keys[:1],
        f"Other tokens in the second sequence of a batch change the output for the first by {amount:.2g} of its size.",
        f"relative change of another sequence > {trial.tolerance:g}",
        "Check which axis is the batch: nn.MultiheadAttention and nn.Transformer take (N, B, E) unless "
        "batch_first=True; scaled_dot_product_attention needs (B, H, N, d).",
    )  # fmt: skip
