"""Suspicious masks: padding that is visible, a causal mask shifted, inverted or transposed, a mask that hides nothing.

`Layer.anomalies` names the patterns that were seen in a layer's masks; the table below says what each means.
"""

from typing import NamedTuple

from regard.health.checks.finding import LAYERS, Finding, Layers, make_finding, places_in
from regard.health.checks.rule import Rule

PADDING = Rule(
    "RG110", "sees padding", "text queries see no padding key",
    "warning", needs="attention calls and the batch's attention_mask",
    proves="Proves that padding keys get weight; it does not measure how much the output depends on them.",
    cause="The attention_mask is not passed on to the attention call.",
    fix="Pass attention_mask on to the attention call (attn_mask, key_padding_mask).",
)  # fmt: skip
OFF = Rule(
    "RG111", "mask off by one", "the causal mask's diagonal is the last visible key",
    "warning", needs="attention calls",
    proves="Proves which keys a query sees; a model may be meant to look one token ahead.",
    cause="The triangle was built with diagonal=1 or −1.",
    fix="Build the mask with tril(), diagonal 0, or use is_causal=True.",
    explains=("RG10", "RG206", "RG211", "RG212", "RG22", "RG23", "RG24"),
)  # fmt: skip
INVERTED = Rule(
    "RG112", "mask inverted", "the mask shows the text and the past", "warning", needs="attention calls",
    proves="Proves which keys a query sees; a model that reads from right to left has it by design.",
    cause="True shows a key to scaled_dot_product_attention and hides it from nn.MultiheadAttention.",
    fix="Invert the mask, or use is_causal=True.",
    explains=("RG10", "RG206", "RG211", "RG212", "RG22", "RG23", "RG24", "RG110", "RG501"),
)  # fmt: skip
ADDED = Rule(
    "RG113", "mask hides nothing", "a float mask of 1 and 0 is not added to the scores",
    "warning", needs="attention calls",
    proves="Proves that the mask changes each score by at most 1; a bias of this form has it by design.",
    cause="A mask of 1 and 0 was passed as float, where it is added.",
    fix="Pass a bool mask, or −inf where keys must be hidden.",
    explains=("RG10", "RG206", "RG211", "RG212", "RG22", "RG23", "RG24", "RG110"),
)  # fmt: skip
CORNER = Rule(
    "RG114", "causal at the wrong end", "a causal mask is aligned with the last key",
    "warning", needs="attention calls",
    proves="Proves that the later keys are hidden from every query; it is right only if the queries belong to "
    "the first keys.",
    cause="is_causal=True is used with cached keys, which torch aligns with the first key.",
    fix="Pass no mask for one query, or torch.nn.attention.bias.causal_lower_right(queries, keys) for several.",
    explains=("RG10", "RG2", "RG3", "RG620", "RG8"),
)  # fmt: skip
RULES = (PADDING, OFF, INVERTED, ADDED, CORNER)


class Pattern(NamedTuple):
    """What a mask pattern means."""

    rule: Rule
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
    "opposite": Pattern(
        INVERTED, "warning",
        "Text queries see only keys that the batch's attention_mask marks as padding, and no text: its meaning is the "
        "opposite of the one that the call gives it.",
        "every key visible to text queries is padding",
        "Pass attention_mask == 0 where True hides a key (nn.MultiheadAttention, src_key_padding_mask), and "
        "attention_mask.bool() where True shows it (scaled_dot_product_attention).",
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
        rule, severity, *texts = pattern
        found += make_finding(rule, severity, places_in(affected), *texts, scope=LAYERS)
    return found
