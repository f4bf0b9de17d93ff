"""Random in evaluation: two equal forwards give different outputs, although the model is in evaluation mode."""

from regard.health.findings._finding import Finding
from regard.health.probing.trial import Trial

NAME = "two equal forwards agree"
KIND = "random in evaluation"


def check(trial: Trial) -> list[Finding]:
    if not trial.noise > trial.tolerance:
        return []
    return trial.find(
        KIND, "warning", [],
        f"Two equal forwards in evaluation mode differ by {trial.noise:.2g} of the output's size.",
        f"relative difference > {trial.tolerance:g}",
        "Look for dropout that ignores the mode: F.dropout(x, p) needs training=self.training, and "
        "scaled_dot_product_attention drops whatever dropout_p it is given. Ignore this for Monte Carlo dropout.",
    )  # fmt: skip
