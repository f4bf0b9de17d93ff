"""τ → 0⁺ gives the argmax, shared between ties."""

import torch

import regard
from regard_lab.claim import Figure, below, claim, conclude, gap

TEMPERATURES = [1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01]


@claim(
    statement="τ → 0⁺ gives the one-hot argmax, shared equally between ties.",
    derivation=r"w_i = \frac{e^{(z_i - z_{\max})/\tau}}{m + \sum_{z_j < z_{\max}} e^{(z_j - z_{\max})/\tau}} \to "
    r"\frac{1}{m} \text{ or } 0",
    rule="Holds if τ = 0.01 is within 1e-12 of the limit, with and without ties.",
)
def measure(sampler):
    z = sampler.normal(8).double()
    z[0] = z.max() + 0.5
    tied = z.clone()
    tied[3] = tied[0]
    one, half = torch.zeros(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    one[0], half[0], half[3] = 1.0, 0.5, 0.5
    off = [gap(regard.softmax(z, temperature=t), one) for t in TEMPERATURES]
    off_tied = [gap(regard.softmax(tied, temperature=t), half) for t in TEMPERATURES]
    drawn = {"one maximum": off, "two tied": off_tied}
    series = {name: (TEMPERATURES, [max(x, 1e-18) for x in each]) for name, each in drawn.items()}
    return conclude(
        below("distance from one-hot at τ = 0.01", 1e-12, off[-1]),
        below("distance from (½, ½) on two tied maxima at τ = 0.01", 1e-12, off_tied[-1]),
        below("distance at τ = 0, the limit itself", 1e-300, gap(regard.softmax(tied, temperature=0), half)),
        alt="The distance from the shared one-hot falls exponentially as the temperature goes to 0.",
        figure=Figure("lines", "temperature τ", "distance from the limit", series, log="xy"),
    )
