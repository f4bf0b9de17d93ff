"""Backends agree: a transformers model gives the same outputs under every attention implementation that it has."""

from typing import Any

from regard.health.checks.computes_otherwise import describe_cause
from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, NothingToCheck, Rule
from regard.health.probe.differences import explain_mode
from regard.health.probe.modes import implementations_of
from regard.health.probe.trial import Trial

RULE = Rule(
    "RG230", "kernels disagree", "every attention implementation gives the same outputs", "critical",
    needs="a transformers model with several attention implementations",
    proves="Proves that two attn_implementation names compute other outputs from the same weights and text, by more "
    "than rounding; eager is the reference where the model has it.",
    cause="A kernel ignores the mask, window, soft cap, scale, sinks or position bias of the model.",
    fix="Use the implementation that agrees with eager, or pass what is missing to the kernel.",
)  # fmt: skip
RULES = (RULE,)


def check(trial: Trial) -> list[Finding]:
    trial.require_repeatable()
    trial.require_rows()
    config: Any = getattr(trial.model, "config", None)
    own = config._attn_implementation if implementations_of(trial.model) else None
    outputs, reasons = {}, []
    for name in implementations_of(trial.model):
        try:
            outputs[name] = trial.output_in(name)
        except NotApplicable as reason:
            reasons.append(str(reason))
    if not outputs:
        if reasons:
            raise NotApplicable(reasons[0])
        raise NothingToCheck("the model has one attention implementation")
    wrong = [name for name, output in outputs.items() if trial.differs(output)]
    if not wrong:
        return []
    name = "eager" if "eager" in wrong else wrong[0]
    with trial.mode(name):
        calls = trial.probe.capture(trial.sample)[1]
    cause = explain_mode(trial.captured[1], calls, trial.rounding)
    amount = trial.change(trial.captured[0], outputs[name])
    agree = [one for one in outputs if one not in wrong]
    beside = f" {' and '.join(agree)} agree with {own!r}." if agree else ""
    return trial.find(
        RULE, "critical", [cause.key] if cause else [],
        f"With attn_implementation={own!r} the output differs from that of {name!r} by {amount:.2g} of its size"
        + describe_cause(cause, calls) + beside,
        f"relative change of a row > {trial.rounding:.2g}, which rounding explains",
    )  # fmt: skip
