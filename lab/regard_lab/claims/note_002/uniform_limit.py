"""τ → ∞ gives 1/K."""

import regard
from regard_lab.claim import Figure, below, claim, conclude, gap, near

TEMPERATURES = [1.0, 10.0, 1e2, 1e3, 1e4, 1e5, 1e6]


@claim(
    statement="τ → ∞ gives 1/K.",
    derivation=r"e^{z/\tau} \to 1, \quad w_i = \frac{1}{K}\left(1 + \frac{z_i - \bar z}{\tau}\right) + O(\tau^{-2})",
    rule="Holds if τ = 10⁶ is within 1e-5 of 1/K and the rest is first order in 1/τ.",
)
def measure(sampler):
    z = sampler.normal(8).double()
    off = [gap(regard.softmax(z, temperature=t), 1 / 8) for t in TEMPERATURES]
    first_order = gap(z, z.mean()) / 8
    predicted = [first_order / t for t in TEMPERATURES]
    series = {"measured": (TEMPERATURES, off), "|z − mean| / Kτ": (TEMPERATURES, predicted)}
    return conclude(
        below("largest |w − 1/K| at τ = 1e6", 1e-5, off[-1]),
        near("τ·|w − 1/K| at τ = 1e6 over its first order", 1.0, off[-1] * 1e6 / first_order, 1e-3).ours(),
        below("largest |w − 1/K| at τ = ∞", 1e-15, gap(regard.softmax(z, temperature=float("inf")), 1 / 8)),
        alt="The distance from uniform falls as one over the temperature.",
        figure=Figure("lines", "temperature τ", "largest |w − 1/K|", series, log="xy"),
    )
