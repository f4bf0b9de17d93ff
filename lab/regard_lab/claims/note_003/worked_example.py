"""The three-dimensional example, recomputed."""

import torch

import regard
from regard_lab.claim import Figure, claim, conclude, listed, near

Q, K = [0.5, -0.3, 1.2], [-0.7, 0.4, 0.9]


@claim(
    statement="The 3-dimensional example: q·k = 0.61, scaled 0.35.",
    derivation=r"-0.35 - 0.12 + 1.08 = 0.61, \quad 0.61/\sqrt 3 = 0.352",
    rule="Holds if both numbers agree to half a unit of the last digit.",
)
def measure(sampler):
    q, k = (torch.tensor(x, dtype=torch.float64).reshape(1, 1, 1, 3) for x in (Q, K))
    total, scaled = (
        float(regard.attention(q, k, k, scale=scale, return_stats=("max_logit",))[1].max_logit)
        for scale in ("none", "sqrt")
    )
    products = [a * b for a, b in zip(Q, K, strict=True)]
    series = {"products": (["1", "2", "3", "sum", "sum/√3"], [*products, total, scaled])}
    return conclude(
        near("q·k", 0.61, total, 0.005),
        near("q·k/√3", 0.35, scaled, 0.005),
        alt=f"The products {listed('{:.2f}', products)}, their sum {total:.2f} and the scaled sum {scaled:.2f}.",
        figure=Figure("bars", "entry", "q_i·k_i", series),
    )
