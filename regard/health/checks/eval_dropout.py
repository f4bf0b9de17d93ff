"""Dropout in evaluation: a layer drops weights at random although its module is in evaluation mode.

`scaled_dot_product_attention` applies the `dropout_p` it is given in any mode, so a module that passes its rate without
checking `self.training` gives different outputs at every call.
"""

from regard.health.checks.finding import Finding, Layers, make_finding, places_in
from regard.health.checks.rule import Rule

RULE = Rule(
    "RG205", "dropout in evaluation", "no weight is dropped in evaluation mode", "warning", needs="attention calls",
    proves="Proves that a call drops weights although its module is in evaluation mode; Monte Carlo dropout has it by "
    "design.",
    cause="scaled_dot_product_attention applies dropout_p in any mode.",
    fix="Pass dropout_p=self.p if self.training else 0.0.",
    explains=("RG204",),
)  # fmt: skip
RULES = (RULE,)
DROPS = "drops"  # the entry of `Layer.anomalies` that the recorder sets


def find_in_layers(layers: Layers) -> list[Finding]:
    return make_finding(
        RULE, "warning", places_in(layer for layer in layers if DROPS in layer.anomalies),
        "Weights are dropped at random in evaluation mode. The statistics describe the weights before dropout; the "
        "inputs of later layers are affected by it.",
        "dropout_p > 0 in a call of a module in evaluation mode",
        "Pass dropout_p=self.p if self.training else 0.0, because scaled_dot_product_attention does not know the mode. "
        "Ignore this for Monte Carlo dropout.",
    )  # fmt: skip
