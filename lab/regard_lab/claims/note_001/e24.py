"""e^24 and e^−24 to two digits."""

import math

import torch

import regard
from regard_lab.claim import Figure, claim, conclude, near


@claim(
    statement="e^24 ≈ 2.6e10 and e^−24 ≈ 3.8e−11.",
    derivation=r"e^{24} = 10^{24/\ln 10} = 10^{10.423} = 2.649 \times 10^{10}",
    rule="Holds if both agree to half a unit of the last printed digit.",
)
def measure(sampler):
    pair = regard.softmax(torch.tensor([24.0, 0.0], dtype=torch.float64))
    large = float(pair[0] / pair[1])  # the ratio of two weights 24 apart is e^24
    small = float(pair[1] / pair[0])
    series = {"claimed": (["e^24", "e^−24"], [2.6e10, 3.8e-11]), "measured": (["e^24", "e^−24"], [large, small])}
    return conclude(
        near("e^24", 2.6e10, large, 0.05e10),
        near("e^−24", 3.8e-11, small, 0.05e-11),
        near("e^24 against math.exp", math.exp(24), large, 1e-3).ours(),
        alt="Claimed and computed values of e to the 24 and e to the minus 24 coincide.",
        figure=Figure("bars", "quantity", "value", series, log="y"),
    )
