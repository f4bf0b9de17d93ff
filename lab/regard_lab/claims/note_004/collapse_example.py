"""softmax(10, 0.1, 0.1, 0.1) and what temperature does to it."""

import torch

import regard
from regard_lab.claim import Figure, above, claim, conclude, near

SCORES = torch.tensor([10.0, 0.1, 0.1, 0.1], dtype=torch.float64)
TEMPERATURES = [1.0, 2.0, 5.0, 10.0, 20.0]


@claim(
    statement="softmax(10, 0.1, 0.1, 0.1) = (0.999, 0.0003, 0.0003, 0.0003), and temperature smooths it.",
    derivation=r"w_2 = \frac{e^{-9.9}}{1 + 3e^{-9.9}} = 5.0 \times 10^{-5}, \quad w_1 = 0.99985",
    rule="Wrong if a weight differs from the printed one by more than half a unit of its last digit.",
)
def measure(sampler):
    w = regard.softmax(SCORES)
    entropies = [float(regard.statistics.of_scores(SCORES[None] / t).entropy) for t in TEMPERATURES]
    largest, other, *_ = regard.softmax(torch.stack([SCORES / t for t in TEMPERATURES])).T.tolist()
    series = {"largest": (TEMPERATURES, largest), "each other": (TEMPERATURES, other)}
    return conclude(
        near("each of the three small weights", 0.0003, w[1], 0.00005),
        near("the largest weight", 0.999, w[0], 0.0005),
        above("entropy at τ = 10 over entropy at τ = 1", 100.0, entropies[3] / entropies[0]).ours(),
        right=f"softmax(10, 0.1, 0.1, 0.1) = ({w[0]:.5f}, {w[1]:.5f}, {w[1]:.5f}, {w[1]:.5f}): the small weights are "
        "six times smaller than printed. That temperature smooths it is true: at τ = 10 the largest weight is "
        f"{regard.softmax(SCORES, temperature=10.0)[0]:.2f}.",
        alt=f"From temperature {TEMPERATURES[0]:g} to {TEMPERATURES[-1]:g} the largest weight goes from "
        f"{largest[0]:.3f} to {largest[-1]:.3f} and each other from {other[0]:.3f} to {other[-1]:.3f}.",
        figure=Figure("lines", "temperature τ", "weight", series, log="x"),
    )
