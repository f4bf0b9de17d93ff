"""τ = 0.1 is near one-hot and τ = 10 near uniform, for scores a few units apart."""

import torch

import regard
from regard_lab.claim import Figure, above, below, claim, conclude

SCORES = torch.tensor([[2.1, 0.5, -1.2, 3.0], [1.8, -0.3, 2.5, 0.1]], dtype=torch.float64)
TEMPERATURES = [0.1, 0.3, 1.0, 3.0, 10.0]


def largest(scores, t):
    return float(regard.softmax(scores, temperature=t).amax(-1).min())


def unevenness(scores, t):
    """Return 1 − entropy / ln n, 0 for a uniform row."""
    return float(1 - regard.statistics.of_scores(scores / t).entropy.min() / torch.tensor(4.0).log())


@claim(
    statement="τ = 0.1 is near one-hot, τ = 10 near uniform.",
    derivation=r"w_i/w_j = e^{(z_i - z_j)/\tau}: \text{ only the gap over } \tau \text{ matters}",
    rule="Core: true for the note's two rows of scores. Beyond: true whatever the size of the scores.",
)
def measure(sampler):
    series = {
        name: (TEMPERATURES, [largest(factor * SCORES[:1], t) for t in TEMPERATURES])
        for name, factor in (("the note's scores", 1.0), ("100 times as close", 0.01), ("100 times as far", 100.0))
    }
    return conclude(
        above("largest weight at τ = 0.1, the note's scores", 0.99, largest(SCORES, 0.1)),
        below("1 − entropy/ln 4 at τ = 10, the note's scores", 0.02, unevenness(SCORES, 10.0)),
        above("largest weight at τ = 0.1, scores 100 times as close", 0.99, largest(SCORES / 100, 0.1)).beyond(),
        below("1 − entropy/ln 4 at τ = 10, scores 100 times as far", 0.02, unevenness(SCORES * 100, 10.0)).beyond(),
        condition="the scores lie a few units apart: what counts is the gap over τ (≫ 1 for one-hot, ≪ 1 for uniform)",
        alt="The note's scores go from one-hot at 0.1 to near uniform at 10; closer or farther scores do not.",
        figure=Figure("lines", "temperature τ", "largest weight", series, log="x"),
    )
