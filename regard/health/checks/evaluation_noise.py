"""Random in evaluation: two equal forwards give different outputs, although the model is in evaluation mode."""

from regard.health.checks.finding import Finding
from regard.health.checks.rule import Rule
from regard.health.probe.library import is_library_code
from regard.health.probe.trial import Trial

RULE = Rule(
    "RG204", "random in evaluation", "two equal forwards agree", "warning", needs="token ids",
    proves="Proves that the output is random in evaluation mode; Monte Carlo dropout has it by design.",
    cause="Dropout ignores the mode.",
    fix="Pass training=self.training to F.dropout, and dropout_p=0.0 to scaled_dot_product_attention in evaluation.",
)  # fmt: skip
RULES = (RULE,)


def check(trial: Trial) -> list[Finding]:
    if not trial.noise > trial.tolerance:
        return []
    return trial.find(
        RULE, "note" if is_library_code(trial.model) else "warning", [],  # models of diffusion draw noise
        f"Two equal forwards in evaluation mode differ by {trial.noise:.2g} of the output's size.",
        f"relative difference > {trial.tolerance:g}",
        "Look for dropout that ignores the mode: F.dropout(x, p) needs training=self.training, and "
        "scaled_dot_product_attention drops whatever dropout_p it is given. Ignore this for Monte Carlo dropout.",
    )  # fmt: skip
