"""Rows that see no key: queries that are no padding, and from which the mask hides everything. About layers.

A mask that is inverted, shifted or made for other lengths has such rows. Nothing can be measured in them: under a mask
of True and False torch's output there is 0, an eager softmax of −inf gives NaN, and under a finite mask (−1e9) the
scores drown, so that the output is the mean of all values, the hidden ones included.
"""

from __future__ import annotations

from collections.abc import Sequence

from regard.health.findings._finding import Finding
from regard.health.readings.histogram import ROW

KIND = "rows that see no key"
TOLD = {"behind", "after"}  # odd masks that leave one such row, and are findings of their own


def find_in_layers(layers: Sequence) -> list[Finding]:
    found = [
        (layer, head, blind / (blind + seeing))
        for layer in layers
        if layer.reading is not None and any(layer.blind) and not layer.odd & TOLD
        for head, (blind, seeing) in enumerate(
            zip(layer.blind, layer.reading.cpu().count[ROW["visible_keys"]].tolist(), strict=True)
        )
        if blind
    ]
    if not found:
        return []
    shares = tuple(share for _, _, share in found)
    low, high = (f"{100 * share:.3g} %" for share in (min(shares), max(shares)))
    return [
        Finding(
            KIND,
            "warning",
            tuple((layer.name, head) for layer, head, _ in found),
            f"{low if low == high else f'{low} to {high}'} of the rows that are no padding see no key. They are left "
            "out of every number here; what the model gets there is 0, NaN or, from a finite mask, a mean of what the "
            "mask hides.",
            "any row that sees no key, where its query is no padding",
            "Look at the mask: is it inverted (True shows a key to scaled_dot_product_attention, and hides it from "
            "nn.MultiheadAttention), shifted, or made for other lengths?",
            shares,
            tuple(layer.index for layer, _, _ in found),
        )
    ]
