"""Sparsemax has exact zeros; entmax runs from softmax to sparsemax."""

from itertools import pairwise

import regard
from regard_lab.claim import Figure, above, below, claim, conclude, gap, mean, near

ALPHAS = [1.0, 1.1, 1.25, 1.5, 1.75, 2.0]


def mean_support(weights):
    return float((weights > 0).double().sum(-1).mean())


@claim(
    statement="Sparsemax gives exact zeros; entmax runs from softmax (α = 1) to sparsemax (α = 2).",
    derivation=[
        r"\mathrm{entmax}_\alpha(z)_i = [(\alpha - 1) z_i - \tau]_+^{1/(\alpha - 1)}",
        r"\alpha = 2:\; [z_i - \tau]_+; \qquad \alpha \to 1:\; (1 + (\alpha - 1) x)^{1/(\alpha - 1)} \to e^x",
    ],
    rule="Holds if most weights of a normal row are exactly 0, both ends of α are met, and the support shrinks with α.",
)
def measure(sampler):
    z = sampler.normal(1000, 16).double()
    zeros = (regard.sparsemax(z) == 0).double().mean(-1)
    flat = z / (z.amax(-1, keepdim=True) - z.amin(-1, keepdim=True)) / 20  # Σ(z − min z) < 1
    kept = [mean_support(regard.entmax(z, alpha)) for alpha in ALPHAS]
    sparsest = {"sparsemax": mean_support(regard.sparsemax(z))}
    series, ends = {"entmax": (ALPHAS, kept)}, f"from {kept[0]:.1f} at α = {ALPHAS[0]:g} to {kept[-1]:.1f}"
    return conclude(
        above("mean share of exact zeros, 16 normal scores", 0.5, mean(zeros)),
        below("largest |entmax(α = 1) − softmax|", 1e-14, gap(regard.entmax(z, 1.0), regard.softmax(z))),
        below("largest |entmax(α = 1.001) − softmax|", 1e-2, gap(regard.entmax(z, 1.001), regard.softmax(z))),
        below("largest |entmax(α = 2) − sparsemax|", 1e-12, gap(regard.entmax(z, 2.0), regard.sparsemax(z))),
        below("steps in α at which the support grows", 0.5, sum(b > a for a, b in pairwise(kept))),
        near("zeros in rows with Σ(z − min z) < 1", 0.0, (regard.sparsemax(flat) == 0).sum(), 0.5).ours(),
        remark="Zeros are not forced: a row with Σ(z − min z) < 1 keeps every weight positive.",
        alt=f"The mean support falls {ends}, sparsemax's, at α = {ALPHAS[-1]:g}.",
        figure=Figure("lines", "α", "weights above 0, of 16", series, guides=sparsest),
    )
