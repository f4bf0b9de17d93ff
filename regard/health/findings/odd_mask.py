"""Suspicious masks: padding that is visible, a causal mask shifted, inverted or transposed, a mask that hides nothing.

`Layer.anomalies` names the patterns that were seen in a layer's masks; the table below says what each means.
"""

from typing import NamedTuple

from regard.health.findings._finding import Finding, Layers, make_finding, places_in

PADDING, OFF, INVERTED, ADDED = "sees padding", "mask off by one", "mask inverted", "mask hides nothing"
CORNER = "causal at the wrong end"
KINDS = (PADDING, OFF, INVERTED, ADDED, CORNER)


class Pattern(NamedTuple):
    """What a mask pattern means."""

    kind: str
    severity: str
    evidence: str
    threshold: str
    remedy: str


PATTERNS = {
    "padding": Pattern(
        PADDING, "warning",
        "Text queries see keys that the batch's attention_mask marks as padding.",
        "any padding key visible to a text query",
        "Pass attention_mask on to the attention call (attn_mask, key_padding_mask), or use batches without padding.",
    ),
    "ahead": Pattern(
        OFF, "warning",
        "Every query sees the key after it: a model that predicts the next token can read it.",
        "query i sees exactly the keys j ≤ i + 1",
        "Build the mask with tril(), diagonal 0, or use is_causal=True. Ignore this if the model may look one token "
        "ahead.",
    ),
    "behind": Pattern(
        OFF, "note",
        "Every query sees the keys before it but not its own; the first query sees none.",
        "query i sees exactly the keys j ≤ i − 1",
        "Build the mask with tril(), diagonal 0, or use is_causal=True. Ignore this if tokens must not see themselves.",
    ),
    "after": Pattern(
        INVERTED, "warning",
        "Every query sees only the keys after it; the last query sees none: an inverted causal mask.",
        "query i sees exactly the keys j > i",
        "Use ~mask or is_causal=True: True shows a key to scaled_dot_product_attention and hides it from "
        "nn.MultiheadAttention. Ignore this if tokens may see only what follows.",
    ),
    "from": Pattern(
        INVERTED, "warning",
        "Every query sees itself and only the keys after it: a transposed causal mask.",
        "query i sees exactly the keys j ≥ i",
        "Show the lower triangle (tril()) and hide the upper one (triu(1)), or use is_causal=True. Ignore this if the "
        "model reads from right to left.",
    ),
    "added": Pattern(
        ADDED, "warning",
        "The mask is a float mask of 1 and 0 in the shape of a causal or padding mask. It is added to the scores and "
        "hides no key.",
        "an additive mask of only 1 and 0, causal or one-sided in shape",
        "Pass a bool mask (True shows a key to scaled_dot_product_attention and hides it from nn.MultiheadAttention), "
        "or −inf where keys must be hidden. Ignore this if it is meant as a bias.",
    ),
    "corner": Pattern(
        CORNER, "warning",
        "is_causal=True with fewer queries than keys: torch aligns the first ones, so query i sees only keys 0 to i.",
        "is_causal in self-attention with fewer queries than keys, the later keys not all 0",
        "After cached keys, pass no mask for one query, or torch.nn.attention.bias.causal_lower_right(queries, keys) "
        "for several. Ignore this if the queries belong to the first keys.",
    ),
    "text": Pattern(
        INVERTED, "warning",
        "The batch's attention_mask shows only one token id, as padding has, and hides the text.",
        "all visible tokens have one id, the hidden ones three or more",
        "Pass 1 - attention_mask: 1 is text, 0 is padding. These statistics are those of the padding.",
    ),
}  # fmt: skip


def find_in_layers(layers: Layers) -> list[Finding]:
    found = []
    for name, pattern in PATTERNS.items():
        affected = [layer for layer in layers if name in layer.anomalies and layer.reading is not None]
        kind, severity, *texts = pattern
        found += make_finding(kind, severity, places_in(affected), *texts)
    return found
