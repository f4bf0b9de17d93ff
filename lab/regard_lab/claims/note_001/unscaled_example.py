"""softmax(−24, −10, 0, 10, 24) is one-hot to six digits."""

import torch

import regard
from regard_lab.claim import Figure, claim, conclude, near

SCORES, CLAIMED = [-24.0, -10.0, 0.0, 10.0, 24.0], [0.0, 0.0, 0.0, 0.0, 1.0]


@claim(
    statement="softmax(−24, −10, 0, 10, 24) ≈ (0, 0, 0, 0, 1).",
    derivation=r"w_5 = 1/(1 + e^{-14} + e^{-24} + \dots) = 1 - 8.3 \times 10^{-7}",
    rule="Holds if every weight agrees to three digits.",
)
def measure(sampler):
    w = regard.softmax(torch.tensor(SCORES, dtype=torch.float64))
    labels = [f"{z:g}" for z in SCORES]
    series = {"claimed": (labels, CLAIMED), "measured": (labels, w)}
    return conclude(
        *(near(f"weight of {z:g}", c, p, 0.0005) for z, c, p in reversed(list(zip(SCORES, CLAIMED, w, strict=True)))),
        alt="All weight sits on the score 24, claimed and measured alike.",
        figure=Figure("bars", "score", "weight", series),
    )
