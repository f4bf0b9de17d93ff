"""Rows that see one key: most queries see a single key, although the layer has many, so there is nothing to weigh."""

from regard.health.checks.finding import Finding, HeadPlace, Layers, make_finding
from regard.health.checks.rule import Rule
from regard.health.measure.histogram import ROW

RULE = Rule(
    "RG115", "rows that see one key", "queries see more than one key", "warning", needs="attention calls",
    proves="Proves that the weight on one key is always 1; it cannot tell why the others are hidden.",
    cause="The mask is an identity matrix or inverted.",
    fix="Check what the mask shows: True shows a key to scaled_dot_product_attention and hides it from "
    "nn.MultiheadAttention.",
)  # fmt: skip
RULES = (RULE,)
FEW = 1.5  # visible keys on average
LONGEST = 16  # keys: a shorter text, or one that is decoded, may have one key by right


def find_in_layers(layers: Layers) -> list[Finding]:
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
        RULE, "warning", found,
        "A query sees {range} keys on average, where the layer has many: the weight on a single key is always 1.",
        f"mean visible keys < {FEW:g} in a layer with at least {LONGEST} keys",
    )  # fmt: skip
