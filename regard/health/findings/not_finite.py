"""Not finite: what an attention layer puts out holds NaN or infinity, so nothing in it could be measured."""

from __future__ import annotations

from collections.abc import Sequence

from regard.health.faithful import NOT_FINITE
from regard.health.findings._finding import Finding

KIND = "not finite"


def find_in_layers(layers: Sequence) -> list[Finding]:
    """About layers, unlike the others: these have no readings."""
    sick = [layer for layer in layers if layer.reason == NOT_FINITE]
    if not sick:
        return []
    return [
        Finding(
            KIND,
            "critical",
            tuple((layer.name, head) for layer in sick for head in range(layer.heads)),
            f"NaN or infinity in the output of {len(sick)} attention layer{'' if len(sick) == 1 else 's'}, first in "
            f"{sick[0].name or 'the model itself'}.",
            "any output that is not finite, on a row that counts",
            "Look at the first such layer's weights and inputs; then at overflow in float16, at the loss scale and the "
            "learning rate, at rows whose keys are all masked.",
            indices=tuple(layer.index for layer in sick for _ in range(layer.heads)),
        )
    ]
