"""Training = evaluation apart from dropout: with every dropout at 0, train() and eval() compute the same outputs."""

from torch import Tensor

from regard.health.checks.computes_otherwise import describe_cause
from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.measure.batches import evaluation_mode
from regard.health.probe.differences import explain_mode
from regard.health.probe.library import is_library_code
from regard.health.probe.trial import CHECKPOINTING, MODES, TRAINING, WEIGHTS, Trial

NEEDS = "token ids"
TRAINED = Rule(
    "RG220", "training differs from evaluation", "training mode without dropout computes what evaluation does",
    "critical", needs=NEEDS,
    proves="Proves that train() changes the outputs although every dropout is 0. Norms over the batch stay in "
    "evaluation mode and do not count.",
    cause="A branch on self.training has another mask, scale or kernel.",
    fix="Compute both branches with the same mask, scale and kernel.",
)  # fmt: skip
CHECKPOINTED = Rule(
    "RG221", "checkpointing changes the output", "gradient checkpointing does not change the outputs", "critical",
    needs="a transformers model that has gradient_checkpointing_enable()",
    proves="Proves that the forward under gradient checkpointing computes other outputs.",
    cause="Arguments of the layer (mask, positions, layer index) are not passed through checkpoint().",
    fix="Pass every argument of the layer through checkpoint(), by position or as keywords.",
)  # fmt: skip
ASKED = Rule(
    "RG222", "output_attentions changes the output", "asking for weights does not change the outputs", "critical",
    needs="a model whose forward takes output_attentions",
    proves="Proves that the path that returns weights computes other outputs.",
    cause="The path that returns weights has another mask, scale, soft cap or sinks.",
    fix="Make both paths agree, or return weights from the kernel that is used in training.",
)  # fmt: skip
RULES = (TRAINED, CHECKPOINTED, ASKED)


def check(trial: Trial) -> list[Finding]:
    trial.require_repeatable()
    output = trial.output_in(TRAINING)
    found = compare(trial, TRAINED, TRAINING) if trial.differs(output) and differs_by_mode(trial, output) else []
    for rule, name in ((CHECKPOINTED, CHECKPOINTING), (ASKED, WEIGHTS)):
        try:
            other = trial.output_in(name)
        except NotApplicable:
            continue  # the model has no such way
        reference = output if name == CHECKPOINTING else trial.captured[0]
        if trial.differs(other) and trial.change(reference, other) > trial.rounding:
            found += compare(trial, rule, name)
    return found


def differs_by_mode(trial: Trial, output: Tensor) -> bool:
    """True if evaluation differs from training where it has the same dropouts at 0: PhiMoE's jitter acts in both.

    Raises NotApplicable where training returns more, as the groups of queries of RF-DETR.
    """
    if output.shape != trial.captured[0].shape and is_library_code(trial.model):
        raise NotApplicable("the library's class returns another shape in training")
    with trial.mode(TRAINING), evaluation_mode(list(trial.model.named_modules())):
        return trial.change(output, trial.probe.run(trial.sample)) > trial.rounding


def compare(trial: Trial, rule: Rule, name: str) -> list[Finding]:
    """The finding about a mode that changes the output, with the first attention call that differs."""
    with trial.mode(name):
        calls = trial.probe.capture(trial.sample)[1]
    cause = explain_mode(trial.captured[1], calls, trial.rounding)
    amount = trial.change(trial.captured[0], trial.output_in(name))
    is_known = name == WEIGHTS and is_library_code(trial.model)  # its users ask for weights to look at them
    return trial.find(
        rule, "note" if is_known else "critical", [cause.key] if cause else [],
        f"The output {MODES[name]} differs from that of evaluation by {amount:.2g} of its size"
        + describe_cause(cause, calls),
        f"relative change of a row > {trial.rounding:.2g}, which rounding explains",
    )  # fmt: skip
