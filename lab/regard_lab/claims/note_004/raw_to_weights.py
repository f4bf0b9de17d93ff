"""Two rows of scores and the weights printed for them."""

import torch

import regard
from regard_lab.claim import Figure, claim, conclude, listed, near

SCORES = [[2.1, 0.5, -1.2, 3.0], [1.8, -0.3, 2.5, 0.1]]
CLAIMED = [[0.42, 0.08, 0.02, 0.48], [0.34, 0.04, 0.68, 0.06]]


@claim(
    statement="The scores (2.1, 0.5, −1.2, 3.0) and (1.8, −0.3, 2.5, 0.1) become (0.42, 0.08, 0.02, 0.48) and (0.34, "
    "0.04, 0.68, 0.06).",
    derivation=r"w_1/w_4 = e^{2.1 - 3.0} = 0.41, \text{ printed } 0.42/0.48 = 0.88",
    rule="Holds if every weight agrees to half a unit of its last digit.",
)
def measure(sampler):
    w = regard.softmax(torch.tensor(SCORES, dtype=torch.float64))
    flat = [(z, c, float(p)) for row in zip(SCORES, CLAIMED, w, strict=True) for z, c, p in zip(*row, strict=True)]
    rows = [listed("{:.2f}", row) for row in w]
    labels = [f"{z:g}" for row in SCORES for z in row]
    series = {"claimed": (labels, [c for _, c, _ in flat]), "measured": (labels, [p for _, _, p in flat])}
    return conclude(
        *(near(f"weight of {z:g}", c, p, 0.005) for z, c, p in flat),
        near("sum of the second row as printed", 1.0, sum(CLAIMED[1]), 0.02),
        right=f"The weights are ({rows[0]}) and ({rows[1]}); the second row as printed sums to {sum(CLAIMED[1]):.2f}.",
        alt=f"Measured weights {rows[0]} and {rows[1]} beside the claimed ones.",
        figure=Figure("bars", "score", "weight", series),
    )
