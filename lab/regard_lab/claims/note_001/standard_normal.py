"""q·k/√d_k is normal only for large d_k: at d_k = 2 it is Laplace's law."""

import math

from regard_lab.claim import Figure, claim, conclude, listed, mean, near

DIMS = [2, 8, 32, 256]
BLOCKS = {2: 1500, 8: 500, 32: 300, 256: 300}
NORMAL = math.erfc(3 / math.sqrt(2))  # P(|x| > 3) = 0.0027


@claim(
    statement="q·k/√d_k follows N(0, 1).",
    derivation=[
        r"\kappa(q \cdot k) - 3 = 6/d_k \to 0 \text{ (central limit theorem)}",
        r"d_k = 2:\; q \cdot k \sim \mathrm{Laplace}(0, 1), \quad P(|q \cdot k|/\sqrt 2 > 3) = e^{-3\sqrt 2} = 0.0144",
    ],
    rule="Core: at d_k = 256 the tail beyond 3σ must be the normal one. Beyond: at d_k = 2 too.",
)
def measure(sampler):
    tails = {d: mean(((sampler.dots(d, BLOCKS[d]) / d**0.5).abs() > 3).double().mean((-1, -2))) for d in DIMS}
    laplace = math.exp(-3 * math.sqrt(2))
    series, shown = {"measured": (DIMS, tails.values())}, listed("{:.4f} at d_k {}", tails.values(), DIMS)
    return conclude(
        near("P(|q·k/√d_k| > 3), d_k = 256", NORMAL, tails[256], 0.0012),
        near("P(|q·k/√d_k| > 3), d_k = 2", NORMAL, tails[2], 0.0012).beyond(),
        near("the same at d_k = 2, Laplace: exp(−3√2)", laplace, tails[2], 0.003).ours(),
        condition="d_k is large: the excess kurtosis is 6/d_k, and the tails are heavier than normal for small d_k",
        remark="Within one row the scores share q: given q they are exactly N(0, |q|²/d_k), independent of one "
        "another.",
        alt=f"The probability beyond three standard deviations: {shown}; a normal law has {NORMAL:.4f}.",
        figure=Figure("lines", "d_k", "P(|q·k/√d_k| > 3)", series, log="xy", guides={"normal law": NORMAL}),
    )
