"""Dropout in evaluation: a layer drops weights at random although its module is in evaluation mode. About layers.

`scaled_dot_product_attention` drops with the `dropout_p` it is given, whatever mode the module is in: one that passes
its rate without asking `self.training` gives other outputs at every call, in validation and generation too.
"""

from __future__ import annotations

from collections.abc import Sequence

from regard.health.findings._finding import Finding

KIND = "dropout in evaluation"
DROPS = "drops"  # among what is odd in a layer


def find_in_layers(layers: Sequence) -> list[Finding]:
    such = [layer for layer in layers if DROPS in layer.odd]
    if not such:
        return []
    return [
        Finding(
            KIND,
            "warning",
            tuple((layer.name, head) for layer in such for head in range(layer.heads)),
            "Weights are dropped at random in evaluation mode. The numbers here are of the weights before that; later "
            "layers have inputs that it changed.",
            "any dropout_p above 0 in a call of a module that is in evaluation mode",
            "Pass dropout_p=self.p if self.training else 0.0: scaled_dot_product_attention does not know the mode. If "
            "it is meant (Monte Carlo dropout), all is well.",
            indices=tuple(layer.index for layer in such for _ in range(layer.heads)),
        )
    ]
