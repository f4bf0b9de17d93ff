"""softmax(−3, −1, 0, 1, 3): the printed weights sum to 2."""

import torch

import regard
from regard_lab.claim import Figure, claim, conclude, listed, near

SCORES = [-3.0, -1.0, 0.0, 1.0, 3.0]
CLAIMED = [0.012, 0.089, 0.243, 0.661, 0.995]


@claim(
    statement="softmax(−3, −1, 0, 1, 3) = (0.012, 0.089, 0.243, 0.661, 0.995).",
    derivation=[r"Z = e^{-3} + e^{-1} + 1 + e + e^{3} = 24.22", r"w_5 = 20.09/24.22 = 0.829"],
    rule="Holds if every weight agrees to half a unit of its last digit and the five sum to 1.",
)
def measure(sampler):
    w = regard.softmax(torch.tensor(SCORES, dtype=torch.float64))
    right, labels = listed("{:.3f}", w), [f"{z:g}" for z in SCORES]
    series = {"claimed": (labels, CLAIMED), "measured": (labels, w)}
    return conclude(
        *(near(f"weight of {z:g}", c, p, 0.0005) for z, c, p in reversed(list(zip(SCORES, CLAIMED, w, strict=True)))),
        near("sum of the printed weights", 1.0, sum(CLAIMED), 0.0025),
        right=f"softmax(−3, −1, 0, 1, 3) = ({right}); the printed five sum to {sum(CLAIMED):.3f} and are no weights.",
        alt=f"Claimed weights {listed('{}', CLAIMED)}; measured {right}.",
        figure=Figure("bars", "score", "weight", series),
    )
