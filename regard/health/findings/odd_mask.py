"""Odd masks: text that sees padding, a causal mask one key off, masks inverted, or added as 1 and 0. About layers.

A batch says itself what is padding (`attention_mask` beside `input_ids`); a query of text to which a layer shows such a
key gives it weight. A square mask that shows query i just the keys j ≤ i + 1 is a causal one with its diagonal wrong:
a model that predicts the next token sees it. One that shows j ≤ i − 1 hides each token from itself, which some models
mean, and the first sees nothing. One that shows j > i is a causal one with True and False exchanged, one that shows
j ≥ i a causal one transposed. A mask of 1.0 and 0.0 in place of True and False is added to the scores, and hides
nothing: it is known by its shape, a causal triangle, or the same keys for every query, at one end of the text. A
batch whose `attention_mask` shows one token id alone, and hides many, shows its padding. And torch's causal order
begins at the first key: a query behind cached keys sees the oldest one alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from regard.health.findings._finding import Finding

PADDING, OFF, INVERTED, ADDED = "sees padding", "mask off by one", "mask inverted", "mask hides nothing"
CORNER = "causal at the wrong end"
KINDS = (PADDING, OFF, INVERTED, ADDED, CORNER)
TOLD = {
    "padding": (
        PADDING,
        "warning",
        "Queries of text see keys that the batch's attention_mask calls padding.",
        "any such key that the layer's mask shows to a query of text",
        "Hand attention_mask on to the attention (attn_mask, key_padding_mask), or give batches without padding.",
    ),
    "ahead": (
        OFF,
        "warning",
        "Each query sees every key up to the one after it: a model that predicts the next token sees it.",
        "query i sees key j just where j ≤ i + 1, over a whole square mask",
        "Make the mask with tril(), diagonal 0, or use is_causal=True. If it may look one token ahead, all is well.",
    ),
    "behind": (
        OFF,
        "note",
        "Each query sees the keys before it but not its own, and the first one sees none.",
        "query i sees key j just where j ≤ i − 1, over a whole square mask",
        "Make the mask with tril(), diagonal 0, or use is_causal=True. If a token is not to see itself, all is well.",
    ),
    "after": (
        INVERTED,
        "warning",
        "Each query sees just the keys after it, and the last one sees none: a causal mask, inverted.",
        "query i sees key j just where j > i, over a whole square mask",
        "True shows a key to scaled_dot_product_attention, and hides it from nn.MultiheadAttention: use ~mask, or "
        "is_causal=True. If a token is to see only what follows it, all is well.",
    ),
    "from": (
        INVERTED,
        "warning",
        "Each query sees itself and just the keys after it: a causal mask, transposed.",
        "query i sees key j just where j ≥ i, over a whole square mask",
        "A causal mask shows the lower triangle (tril()) and hides the upper one, diagonal 1 (triu(1)); or use "
        "is_causal=True. If the model reads from right to left, all is well.",
    ),
    "added": (
        ADDED,
        "warning",
        "The mask is a float one of 1 and 0, in the shape of a causal order or of padding: it is added to the scores, "
        "and every key is seen.",
        "an additive mask of 1 and 0 alone, one of them just where j ≤ i, or at one end of the keys for every query",
        "Pass it as bool (True shows a key to scaled_dot_product_attention, and hides it from nn.MultiheadAttention), "
        "or −inf where it is to hide. If it is meant as a bias, all is well.",
    ),
    "corner": (
        CORNER,
        "warning",
        "is_causal=True with fewer queries than keys: torch counts both from the first, so that query i sees keys 0 to "
        "i and none behind.",
        "is_causal with fewer queries than keys in self-attention, where the keys behind are not all 0",
        "Behind a cache queries stand at the end: give one query no mask, several "
        "torch.nn.attention.bias.causal_lower_right(queries, keys). If they belong to the first keys, all is well.",
    ),
    "text": (
        INVERTED,
        "warning",
        "The batch's attention_mask shows nothing but one token id, as padding has it, and hides the text.",
        "all shown tokens are of one id, a pad_token_id or three times in a text; the hidden ones of three or more",
        "1 is text and 0 padding there: give 1 - attention_mask. What was measured here is the padding.",
    ),
}


def find_in_layers(layers: Sequence) -> list[Finding]:
    found = []
    for odd, (kind, severity, evidence, threshold, remedy) in TOLD.items():
        such = [layer for layer in layers if odd in layer.odd and layer.reading is not None]
        if such:
            heads = tuple((layer.name, head) for layer in such for head in range(layer.heads))
            indices = tuple(layer.index for layer in such for _ in range(layer.heads))
            found.append(Finding(kind, severity, heads, evidence, threshold, remedy, indices=indices))
    return found
