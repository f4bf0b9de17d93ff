"""Not finite: an attention layer's output holds NaN or infinity, so the layer could not be measured."""

from regard.health.checks.finding import Finding, HeadPlace, Layers, make_finding
from regard.health.checks.rule import Rule
from regard.health.measure.norms import NOT_FINITE

RULE = Rule(
    "RG502", "not finite", "outputs are finite", "critical", needs="attention calls",
    proves="Proves that the layer's output holds NaN or infinity on this text; the fault may lie before it.",
    cause="Overflow in float16, rows whose keys are all masked, or weights that are not finite.",
    fix="Check the weights and inputs of the first such layer.",
)  # fmt: skip
RULES = (RULE,)


def find_in_layers(layers: Layers) -> list[Finding]:
    affected = [layer for layer in layers if layer.reason == NOT_FINITE]
    if not affected:
        return []
    first = affected[0]
    which = f" ({len(first.not_finite)} of its {first.heads} heads)" if first.heads > 1 else ""
    return make_finding(
        RULE,
        "critical",
        [(HeadPlace(layer.name, layer.index, head), None) for layer in affected for head in layer.not_finite],
        f"The output of {len(affected)} attention layer{'' if len(affected) == 1 else 's'} holds NaN or infinity; the "
        f"first is {first.name or 'the model itself'}{which}.",
        "any output that is not finite, in a row that is not padding",
        "Check the weights and inputs of the first such layer, then overflow in float16, the loss scale, the learning "
        "rate, and rows whose keys are all masked.",
    )
