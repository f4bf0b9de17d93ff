"""After division by √d_k the variance is 1; scores are not confined to [−1, 1]."""

import math

from regard_lab.claim import Figure, above, claim, conclude, mean, near


@claim(
    statement="Dividing by √d_k brings the variance, and every subject's scale, into −1 … 1.",
    derivation=r"\mathrm{Var}(q \cdot k/\sqrt{d_k}) = 1, \quad P(|x| \le 1) = \mathrm{erf}(1/\sqrt 2) = 0.683",
    rule="Wrong if fewer than 99 % of the scaled scores lie in −1 … 1.",
)
def measure(sampler):
    scores = sampler.dots(64, 300) / 8.0
    inside = mean((scores.abs() <= 1).double().mean((-1, -2)))
    variance = mean(scores.square().mean((-1, -2)))
    bins = [0.25 * i - 3.875 for i in range(32)]
    series = {"d_k = 64": (bins, scores.histc(32, -4, 4).div(scores.numel() / 4))}
    return conclude(
        above("share of scaled scores within −1 … 1", 0.99, inside),
        near("the same, a normal law", math.erf(1 / math.sqrt(2)), inside, 0.015).ours(),
        near("variance of the scaled scores", 1.0, variance, 0.05).ours(),
        right=f"The variance becomes {variance.value:.2f}, one number, and a variance is never negative. Scores have "
        f"standard deviation 1: {100 * (1 - inside.value):.0f} % of them lie outside −1 … 1.",
        alt="The density of the scaled score is a bell that reaches well beyond −1 and 1.",
        figure=Figure("lines", "q·k/√d_k", "density", series),
    )
