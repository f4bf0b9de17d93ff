"""Rows that see no key, or one: there is nothing to weigh.

Nothing can be measured where a row sees none. The model's output there is 0 (boolean mask), NaN (softmax of −inf
alone) or the mean of all values (finite mask such as −1e9).
"""

from regard.health.checks.finding import Finding, HeadPlace, Layers, make_finding
from regard.health.checks.rule import Rule
from regard.health.measure.histogram import ROW

ONE = Rule(
    "RG115", "rows that see one key", "queries see more than one key", "warning", needs="attention calls",
    proves="Proves that the weight on one key is always 1; it cannot tell why the others are hidden.",
    cause="The mask is an identity matrix or inverted.",
    fix="Check what the mask shows: True shows a key to scaled_dot_product_attention and hides it from "
    "nn.MultiheadAttention.",
)  # fmt: skip
FEW = 1.5  # visible keys on average
LONGEST = 16  # keys: a shorter text, or one that is decoded, may have one key by right


def find_one(layers: Layers) -> list[Finding]:
    found = []
    for layer in layers:
        if layer.reading is None or layer.most_keys < LONGEST:
            continue
        reading = layer.reading.cpu()
        rows, seen = reading.count[ROW["visible_keys"]].tolist(), reading.mean[ROW["visible_keys"]].tolist()
        found += [
            (HeadPlace(layer.name, layer.index, head), keys)
            for head, (count, keys) in enumerate(zip(rows, seen, strict=True))
            if count >= LONGEST and keys < FEW
        ]
    return make_finding(
        ONE, "warning", found,
        "A query sees {range} keys on average, where the layer has many: the weight on a single key is always 1.",
        f"mean visible keys < {FEW:g} in a layer with at least {LONGEST} keys",
    )  # fmt: skip


NONE = Rule(
    "RG501", "rows that see no key", "every query of the text sees a key", "warning", needs="attention calls",
    proves="Proves that these rows have no key; the output there is 0, NaN or the mean of all values.",
    cause="The mask is inverted, shifted, or made for other lengths.",
    fix="Let every query see at least its own key.",
    explains=("RG502", "RG510"),
)  # fmt: skip
REPORTED_BY_MASK = {"behind", "after"}  # mask patterns with one such row, which odd_mask.py reports


def find_none(layers: Layers) -> list[Finding]:
    found = []
    for layer in layers:
        if layer.reading is None or not any(layer.empty_rows) or layer.anomalies & REPORTED_BY_MASK:
            continue
        seeing = layer.reading.cpu().count[ROW["visible_keys"]].tolist()
        for head, (empty, others) in enumerate(zip(layer.empty_rows, seeing, strict=True)):
            if empty:
                found.append((HeadPlace(layer.name, layer.index, head), empty / (empty + others)))
    return make_finding(
        NONE, "warning", found,
        "{percent} of the rows that are not padding see no key. No statistic counts them; the model's output there is "
        "0, NaN or, with a finite mask, the mean of all values.",
        "any row without a visible key whose query is not padding",
        "Check whether the mask is inverted (True shows a key to scaled_dot_product_attention and hides it from "
        "nn.MultiheadAttention), shifted, or made for other lengths.",
    )  # fmt: skip


RULES = (ONE, NONE)


def find_in_layers(layers: Layers) -> list[Finding]:
    return [*find_one(layers), *find_none(layers)]
