"""Untrained or broken: the model predicts its text worse than the text's own frequencies do.

The loss of unigrams and bigrams is that of counts with each token left out of its own count, which no model that has
learned anything loses to. A model whose heads look untrained too and whose loss is that of a guess gets a note, because
every model starts like this.
"""

import math

from regard.health.checks.diffuse import untrained_heads
from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.checks.untrained_layers import is_all_random
from regard.health.probe.task import LossReading
from regard.health.probe.trial import Trial

RULE = Rule(
    "RG802", "untrained or broken", "the model predicts its text better than the text's frequencies",
    "critical", needs="a loss per token, 200 tokens or more",
    proves="Proves that the model predicts this text worse than its own frequencies; it may be untrained, "
    "broken, or the text of another kind.",
    cause="Token ids of another tokenizer, weights that were not loaded, wrong positions or norms, or a text of "
    "another kind.",
    fix="Compare with a model that works: regard.compare(model, reference, batches) names the first layer that "
    "differs.",
)  # fmt: skip
RULES = (RULE,)


def check(trial: Trial) -> list[Finding]:
    reading = trial.token_reading
    if reading is None:
        raise NotApplicable("the model has no loss on this text; pass loss=, or labels in the batches")
    if reading.unigram is None:
        raise NotApplicable(f"there are no frequencies of tokens to compare the loss with ({reading.kind})")
    if reading.tokens < LEAST_TOKENS:
        raise NotApplicable(f"{reading.tokens} tokens are too few to compare losses; {LEAST_TOKENS} are enough")
    if reading.uniform is not None and reading.unigram >= reading.uniform:
        raise NotApplicable("too little text: its own frequencies predict it no better than a uniform guess")
    if reading.low <= reading.unigram:
        return []
    guessing = FRESH * reading.unigram < reading.mean < CONFIDENT * (reading.uniform or math.inf)
    untrained = guessing and (bool(untrained_heads(trial.heads)) or is_all_random(trial.part))
    return trial.find(
        RULE, "note" if untrained else "critical", [],
        describe(reading) + (" Its heads or weights look untrained too." if untrained else ""),
        "loss of the next or masked token, 95 % interval, above that of the text's unigrams",
        "If it was trained, look for what is wrong outside the scores as well: token ids of another tokenizer, weights "
        "that were not loaded, positions, norms, the output layer; regard.compare(model, reference, batches) names the "
        "first layer that differs from a model that works. Or the text is not of the kind that it was trained on.",
    )  # fmt: skip


LEAST_TOKENS = 200
FRESH = 0.97  # of the unigrams' loss: an untrained model is not below
CONFIDENT = 1.2  # of a uniform guess's loss: an untrained model is not above, because it is sure of nothing


def describe(reading: LossReading) -> str:
    """The loss beside the frequencies, in a sentence."""
    return (
        f"The model's loss on this text is {reading.mean:.3g} nats per token; the text's own unigram frequencies reach "
        f"{reading.unigram:.3g}, its bigrams {reading.bigram:.3g}, a uniform guess {reading.uniform:.3g}."
    )
