"""Dead: the head's output does not depend on its attention weights, or nothing reads it.

Σ p_j v_j is the same for any p if all values of a sequence are equal (0, or the bias alone), and is lost if the output
projection's columns for the head are 0. Causes: pruning, a wrong slice in a weight conversion, weight decay without
gradient, a missing initialisation. No statistic of the weights shows it.
"""

from statistics import median

from regard.health.checks.finding import Finding, HeadPlace, Layers, make_finding
from regard.health.checks.rule import Rule
from regard.health.measure.heads import can_be_judged, fetch_readings
from regard.health.measure.norms import NOTHING

RULE = Rule(
    "RG304", "dead", "the output depends on the weights", "warning", needs="attention calls",
    proves="Proves that this head's weights cannot change the output on this text.",
    cause="Pruning, a wrong slice in a weight conversion, weight decay without gradient, or a missing initialisation.",
    fix="Check the value and output projections of these heads for zeros; reinitialise or remove the heads.",
)  # fmt: skip
RULES = (RULE,)
SAME = 1e-6  # difference of values over the head's largest, or over the median of those in the layer
VALUES = (
    "All values of a sequence are the same (they differ by {range}), so the weights have no effect on the output.",
    f"values of a sequence differ by at most {SAME:g} of the largest",
)
COLUMNS = (
    "The output projection's columns for these heads are 0, so the model ignores them.",
    f"all entries at most {NOTHING:g} of the layer's largest",
)


def find_in_layers(layers: Layers) -> list[Finding]:
    measured = [layer for layer in layers if layer.reading is not None]
    equal, repeated_text = _find_equal_values(measured)
    zero, zero_layer = _find_zero_columns(measured)
    return [
        *make_finding(
            RULE, "warning", equal,
            *VALUES,
            "Check the value projection of these heads for zeros left by pruning, weight conversion or weight decay; "
            "reinitialise it, or remove the heads.",
        ),
        *make_finding(
            RULE, "warning", zero,
            *COLUMNS,
            "Check the output projection for zeros left by pruning, weight conversion or weight decay; reinitialise "
            "these columns, or remove the heads.",
        ),
        *make_finding(
            RULE, "note", repeated_text,
            *VALUES,
            "Text of one repeated token does this: examine other text. Otherwise the value projection's weights are 0 "
            "and only its bias is left.",
        ),
        *make_finding(
            RULE, "note", zero_layer,
            *COLUMNS,
            "Some models start like this, with output projections of 0. Otherwise this layer's attention is off.",
        ),
    ]  # fmt: skip


def _find_equal_values(layers: Layers) -> tuple[list, list]:
    """Heads whose values are equal: (in single heads, in all heads of a layer and not 0, as repeated text does)."""
    found: tuple[list, list] = ([], [])
    suspected = []
    for layer in layers:
        usual = median(size for _, size in layer.values) if layer.values else 0.0
        heads = [head for head, (spread, size) in enumerate(layer.values) if spread <= SAME * max(size, usual)]
        suspected += [(layer, heads)] if heads else []
    readings = fetch_readings([layer.reading for layer, _ in suspected if layer.reading is not None])
    for (layer, heads), reading in zip(suspected, readings, strict=True):
        from_text = len(heads) == layer.heads and all(size > 0.0 for _, size in layer.values)
        (judged,) = can_be_judged([reading])
        places = [(HeadPlace(layer.name, layer.index, head), layer.values[head][0]) for head in heads]
        found[from_text].extend(place for place in places if judged[place[0].head])
    return found


def _find_zero_columns(layers: Layers) -> tuple[list, list]:
    """Heads that the output projection ignores: (single heads, all heads of a layer)."""
    found: tuple[list, list] = ([], [])
    for layer in layers:
        whole_layer = len(layer.unused_heads) == layer.heads
        found[whole_layer].extend((HeadPlace(layer.name, layer.index, head), 0.0) for head in layer.unused_heads)
    return found
