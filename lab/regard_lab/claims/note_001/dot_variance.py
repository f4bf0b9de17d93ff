"""The variance of q·k grows as d_k."""

import torch

from regard_lab.claim import Figure, claim, conclude, exponent, listed, mean, near

DIMS = [4, 16, 64, 256]


@claim(
    note="001, 003",
    statement="Var(q·k) = d_k, growing linearly (independent entries of mean 0 and variance 1).",
    derivation=[
        r"\mathrm{Var}(q_i k_i) = \mathbb{E}[q_i^2]\,\mathbb{E}[k_i^2] = 1",
        r"\mathrm{Var}(q \cdot k) = \sum_{i=1}^{d_k} \mathrm{Var}(q_i k_i) = d_k",
    ],
    rule="Holds if the variance is d_k to 6 % at each d_k and grows with exponent 1 ± 0.03.",
)
def measure(sampler):
    squares = [sampler.dots(d, 1200 if d < 64 else 300, 24, 24).square().mean((-1, -2)) for d in DIMS]  # the mean is 0
    variances = [mean(square) for square in squares]
    growth = exponent(DIMS, torch.stack([square[:300] for square in squares]))
    q, k = sampler.normal(300, 24, 64) + 0.5, sampler.normal(300, 64, 24) + 0.5
    shifted = mean(((q @ k) - 16.0).square().mean((-1, -2)))
    series = {"measured": (DIMS, variances), "d_k": (DIMS, DIMS)}
    return conclude(
        near("Var(q·k) at d_k = 64", 64.0, variances[2], 3.8),
        *(near(f"Var(q·k)/d_k at d_k = {d}", 1.0, mean(s / d), 0.06) for d, s in zip(DIMS, squares, strict=True)),
        near("exponent b of Var ∝ d_k^b", 1.0, growth, 0.03),
        near("Var(q·k) at d_k = 64 with means ½ (d_k(1 + 2μ²))", 96.0, shifted, 8.0).ours(),
        remark="As the note assumes: independent entries of mean 0 and variance 1. Means μ make it d_k(1 + 2μ²).",
        alt=f"The variance of q·k follows the line d_k: {listed('{:.1f} at {}', variances, DIMS)}.",
        figure=Figure("lines", "d_k", "Var(q·k)", series, log="xy"),
    )
