"""Not finite: what an attention layer puts out holds NaN or infinity, so nothing in it could be measured."""

from __future__ import annotations

from collections.abc import Sequence

from regard.health.findings._finding import Finding
from regard.health.measurement.norms import NOT_FINITE

KIND = "not finite"


def find_in_layers(layers: Sequence) -> list[Finding]:
    """About layers, unlike the others: these have no readings."""
    sick = [layer for layer in layers if layer.reason == NOT_FINITE]
    if not sick:
        return []
    first = sick[0]
    which = f", there in {len(first.not_finite)} of its {first.heads} heads" if first.heads > 1 else ""
    return [
        Finding(
            KIND,
            "critical",
            tuple((layer.name, head) for layer in sick for head in layer.not_finite),
            f"NaN or infinity in the output of {len(sick)} attention layer{'' if len(sick) == 1 else 's'}, first in "
            f"{first.name or 'the model itself'}{which}.",
            "any output that is not finite, on a row that counts",
            "Look at these heads' weights in the first such layer and at its inputs; then at overflow in float16, at "
            "the loss scale and the learning rate, at rows whose keys are all masked.",
            indices=tuple(layer.index for layer in sick for _ in layer.not_finite),
        )
    ]
