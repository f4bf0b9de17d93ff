"""Rows that see no key: the mask hides every key from a query that is not padding.

Nothing can be measured in such a row. The model's output there is 0 (boolean mask), NaN (softmax of −inf alone) or the
mean of all values (finite mask such as −1e9).
"""

from regard.health.checks.finding import Finding, HeadPlace, Layers, make_finding
from regard.health.checks.rule import Rule
from regard.health.measure.histogram import ROW

RULE = Rule(
    "RG501", "rows that see no key", "every query of the text sees a key", "warning", needs="attention calls",
    proves="Proves that these rows have no key; the output there is 0, NaN or the mean of all values.",
    cause="The mask is inverted, shifted, or made for other lengths.",
    fix="Let every query see at least its own key.",
    explains=("RG502", "RG510"),
)  # fmt: skip
RULES = (RULE,)
REPORTED_BY_MASK = {"behind", "after"}  # mask patterns with one such row, which odd_mask.py reports


def find_in_layers(layers: Layers) -> list[Finding]:
    found = []
    for layer in layers:
        if layer.reading is None or not any(layer.empty_rows) or layer.anomalies & REPORTED_BY_MASK:
            continue
        seeing = layer.reading.cpu().count[ROW["visible_keys"]].tolist()
        for head, (empty, others) in enumerate(zip(layer.empty_rows, seeing, strict=True)):
            if empty:
                found.append((HeadPlace(layer.name, layer.index, head), empty / (empty + others)))
    return make_finding(
        RULE, "warning", found,
        "{percent} of the rows that are not padding see no key. No statistic counts them; the model's output there is "
        "0, NaN or, with a finite mask, the mean of all values.",
        "any row without a visible key whose query is not padding",
        "Check whether the mask is inverted (True shows a key to scaled_dot_product_attention and hides it from "
        "nn.MultiheadAttention), shifted, or made for other lengths.",
    )  # fmt: skip
