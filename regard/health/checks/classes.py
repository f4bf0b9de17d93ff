"""A classifier must be better than an equal guess: a loss above the logarithm of the classes is worse than none."""

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, NothingToCheck, Rule
from regard.health.probe.task import LABELS
from regard.health.probe.trial import Trial

RULE = Rule(
    "RG805", "worse than an equal guess", "the loss is below the logarithm of the classes", "critical",
    needs="a label per row, and logits [B, classes]",
    proves="Proves that the model predicts these labels worse than a guess that takes all classes for equal.",
    cause="Labels are in another order or from another set than those of training, inputs are scaled or ordered "
    "otherwise, or weights were not loaded.",
    fix="Compare id2label with the data's labels and the inputs with those of training.",
)  # fmt: skip
RULES = (RULE,)
SURE = 1.2  # of ln(classes): a model that was not trained is not above, because it is sure of nothing
LEAST = 4  # rows


def check(trial: Trial) -> list[Finding]:
    task = trial.token_task
    if task is None or task.kind != LABELS or task.relation is None or task.relation.offset is not None:
        raise NothingToCheck("the batches have no label per row that the outputs [B, classes] predict")
    reading = trial.token_reading
    assert reading is not None and reading.uniform is not None
    if reading.sequences < LEAST:
        raise NotApplicable(f"{reading.sequences} rows are too few; {LEAST} are enough")
    if not reading.low > reading.uniform:
        return []
    is_sure = reading.low > SURE * reading.uniform
    return trial.find(
        RULE, "critical" if is_sure else "note", [],
        f"The loss on these labels is {reading.mean:.3g} nats per row; an equal guess has {reading.uniform:.3g}.",
        "95 % interval of the loss above ln(classes)",
    )  # fmt: skip
