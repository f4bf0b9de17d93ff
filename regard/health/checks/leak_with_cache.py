"""Sees the future behind a cache: several tokens after cached ones see each other's future.

`is_causal=True` with fewer queries than keys is aligned with the first key, and a mask of the new tokens alone has the
wrong width; both go unnoticed in steps of one token.
"""

import torch

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.decoding import find_decoders, is_recurrent
from regard.health.probe.texts import find_leaks
from regard.health.probe.trial import Trial
from regard.health.tokens.text import TokenBatch

RULE = Rule(
    "RG106", "sees the future with a cache", "later tokens do not change earlier outputs behind a cache",
    "critical", needs="a model that takes a cache",
    proves="Proves that tokens fed together after cached ones change the outputs of those before them.",
    cause="No mask is built for several tokens behind a cache, or it is aligned with the first key.",
    fix="Behind a cache of n keys let query i see keys 0 … n + i: a mask aligned at the lower right.",
)  # fmt: skip
RULES = (RULE,)


def check(trial: Trial) -> list[Finding]:
    trial.require_causal()
    text = trial.text
    half = text.targets.shape[1] // 2
    for decoder in find_decoders(trial.probe, text):

        def run(batch: TokenBatch, decoder=decoder) -> torch.Tensor:
            chunks = list(decoder.steps(trial.probe, batch.targets, (half, batch.targets.shape[1])))
            if is_recurrent(chunks[0][3]):
                raise NotApplicable("the cache holds a recurrent state, behind which tokens are fed one by one")
            return torch.cat([output for _, _, output, _ in chunks], 1)

        leaks = find_leaks(run, text)[1:]  # the tokens behind the cache
        worst = max(leaks, key=lambda leak: leak.amount)
        if worst.amount > trial.rounding:
            return trial.find(
                RULE, "critical", [], f"With {decoder.name} and {half} cached tokens: {worst}.",
                f"relative change of an earlier row > {trial.rounding:.2g}",
            )  # fmt: skip
    return []
