"""Dying gradient: the trace of ∂p/∂s is so small that nothing flows back through the softmax on most rows.

The gain is taken relative to a uniform row's, 1 − 1/n. Gradients reach q and k multiplied by it; under 1e-4 they are
below what Adam's ε or bfloat16 sums keep beside the gradients of other paths.
"""

from __future__ import annotations

from regard.health.findings._finding import finding, free_heads

KIND = "dying gradient"
GAIN = 1e-4
SHARE = 0.5


def find(heads):
    found = []
    for head in free_heads(heads):
        mean, top = head.statistics.mean("gain_ratio"), head.statistics.max("gain_ratio")
        if mean < GAIN + (1.0 - SHARE) * top:  # as it must be, and this costs nothing
            share = head.statistics["gain_ratio"].share_below(GAIN)
            if share > SHARE:
                found.append((head, share))
    severity = "critical" if any(share > 0.9 for _, share in found) else "warning"
    return finding(
        KIND,
        severity,
        found,
        f"The gradient gain is under {GAIN:g} of a uniform row's on a share of {{range}} of the rows.",
        f"gradient gain < {GAIN:g} of a uniform row's on more than {SHARE:.0%} of the rows (below what bfloat16 and "
        "Adam's ε keep)",
        "Make the rows less one-hot while training: check the 1/√d scale, add QK-norm or a soft cap, or train with a "
        "temperature above 1 that is lowered later.",
    )
