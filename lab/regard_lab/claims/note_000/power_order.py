"""a^k > a for k > 1: true above a = 1, the other way round below."""

import regard
from regard_lab.claim import Figure, claim, conclude, exact, near


def count_broken(sampler, low, high):
    """Return how many of 4000 pairs break (a^k > a for k > 1, a^k < a for k < 1), a and a^k read off two weights."""
    log_a = sampler.uniform(4000, low=low, high=high).double()
    k = sampler.uniform(4000, low=0.2, high=3.0).double()
    pair = regard.softmax(k[:, None] * log_a[:, None] * log_a.new_tensor([1.0, 0.0]))
    plain = regard.softmax(log_a[:, None] * log_a.new_tensor([1.0, 0.0]))
    grows = pair[:, 0] / pair[:, 1] > plain[:, 0] / plain[:, 1]
    return exact((grows != (k > 1)).sum())


@claim(
    statement="For any a > 0: a^k > a when k > 1 and a^k < a when 0 < k < 1.",
    derivation=[
        r"a^k > a \iff (k - 1)\ln a > 0",
        r"\text{so for } k > 1 \text{ it needs } \ln a > 0, \text{ that is } a > 1",
    ],
    rule="Core: a > 1 must always obey. Beyond: 0 < a < 1 must obey too for the statement as written.",
)
def measure(sampler):
    over, under = count_broken(sampler, 0.05, 3.0), count_broken(sampler, -3.0, -0.05)
    powers = [0.25, 0.5, 1.0, 2.0, 3.0]
    series = {f"a = {a}": (powers, [a ** (k - 1) for k in powers]) for a in (2.0, 1.0, 0.5)}
    return conclude(
        near("pairs (a, k) of 4000 that break it, a > 1", 0.0, over, 0.5),
        near("pairs (a, k) of 4000 that break it, 0 < a < 1", 0.0, under, 0.5).beyond(),
        condition="a > 1 (the first score is the larger one)",
        remark="For 0 < a < 1 both inequalities turn round, and a = 1 stays 1. The sharpening survives: the larger "
        "weight gains either way.",
        alt="a^k divided by a against k: rising for a = 2, flat for a = 1, falling for a = 0.5.",
        figure=Figure("lines", "k", "a^k / a", series, log="y"),
    )
