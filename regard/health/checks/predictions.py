"""Untrained or broken: the model predicts its text worse than frequencies do, or its classes worse than a guess.

The loss of unigrams and bigrams is that of counts with each token left out of its own count, which no model that has
learned anything loses to. A model whose heads look untrained too and whose loss is that of a guess gets a note, because
every model starts like this.
"""

import math

from regard.health.checks.diffuse import untrained_heads
from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, NothingToCheck, Rule
from regard.health.checks.untrained_layers import is_all_random
from regard.health.probe.task import LABELS, LossReading
from regard.health.probe.trial import Trial

TOKENS = Rule(
    "RG802", "untrained or broken", "the model predicts its text better than the text's frequencies",
    "critical", needs="a loss per token, 200 tokens or more",
    proves="Proves that the model predicts this text worse than its own frequencies; it may be untrained, "
    "broken, or the text of another kind.",
    cause="Token ids of another tokenizer, weights that were not loaded, wrong positions or norms, or a text of "
    "another kind.",
    fix="Compare with a model that works: regard.compare(model, reference, batches) names the first layer that "
    "differs.",
)  # fmt: skip


def check_tokens(trial: Trial, rule: Rule) -> list[Finding]:
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
        rule, "note" if untrained else "critical", [],
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


CLASSES = Rule(
    "RG805", "worse than an equal guess", "the loss is below the logarithm of the classes", "critical",
    needs="a label per row, and logits [B, classes]",
    proves="Proves that the model predicts these labels worse than a guess that takes all classes for equal.",
    cause="Labels are in another order or from another set than those of training, inputs are scaled or ordered "
    "otherwise, or weights were not loaded.",
    fix="Compare id2label with the data's labels and the inputs with those of training.",
)  # fmt: skip
SURE = 1.2  # of ln(classes): a model that was not trained is not above, because it is sure of nothing
LEAST_ROWS = 4  # rows


def check_classes(trial: Trial, rule: Rule) -> list[Finding]:
    task = trial.token_task
    if task is None or task.kind != LABELS or task.relation is None or task.relation.offset is not None:
        raise NothingToCheck("the batches have no label per row that the outputs [B, classes] predict")
    reading = trial.token_reading
    assert reading is not None and reading.uniform is not None
    if reading.sequences < LEAST_ROWS:
        raise NotApplicable(f"{reading.sequences} rows are too few; {LEAST_ROWS} are enough")
    if not reading.low > reading.uniform:
        return []
    is_sure = reading.low > SURE * reading.uniform
    return trial.find(
        rule, "critical" if is_sure else "note", [],
        f"The loss on these labels is {reading.mean:.3g} nats per row; an equal guess has {reading.uniform:.3g}.",
        "95 % interval of the loss above ln(classes)",
    )  # fmt: skip


WAYS = ((TOKENS, check_tokens), (CLASSES, check_classes))
RULES = tuple(rule for rule, _ in WAYS)


def check(trial: Trial) -> list[Finding]:
    return trial.ask_each(WAYS)
