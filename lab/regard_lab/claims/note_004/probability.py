"""Weights are probabilities in the order of the scores, and smooth."""

import torch

import regard
from regard_lab.claim import Figure, above, below, claim, conclude, gap, near


@claim(
    statement="Weights sum to 1, are ≥ 0, keep the order of the scores, and are smooth.",
    derivation=[
        r"\sum_i e^{z_i}/Z = 1, \quad z_i < z_j \Rightarrow e^{z_i}/Z < e^{z_j}/Z",
        r"|\partial^2 w_i/\partial z_i^2| = w_i (1 - w_i) |1 - 2 w_i| \le \tfrac{1}{6\sqrt 3} = 0.096",
    ],
    rule="Holds if rows sum to 1 to rounding, no weight is negative, all orders agree and second derivatives are "
    "bounded.",
)
def measure(sampler):
    z = 3.0 * sampler.normal(500, 12).double()
    w = regard.softmax(z)
    ordered = (w.argsort(-1) == z.argsort(-1)).all(-1)
    line = torch.linspace(-6, 6, 49, dtype=torch.float64)
    moved = regard.softmax(torch.stack([line, torch.zeros_like(line), torch.ones_like(line)], -1))
    bend = (moved[2:] - 2 * moved[1:-1] + moved[:-2]).abs().max() / (line[1] - line[0]) ** 2
    series = {f"score {name}": (line, moved[:, i]) for i, name in enumerate(("moving", "0", "1"))}
    return conclude(
        below("largest |Σw − 1|", 1e-14, gap(w.sum(-1), 1)),
        above("smallest weight", 0.0, w.min()),
        near("rows of 500 whose weights have another order", 0.0, (~ordered).sum(), 0.5),
        below("largest second difference quotient along one score", 0.2, bend),
        alt=f"As one of three scores moves from {line[0]:g} to {line[-1]:g} its weight rises smoothly from "
        f"{moved[0, 0]:.3f} to {moved[-1, 0]:.3f} and the others fall.",
        figure=Figure("lines", "first score", "weight", series),
    )
