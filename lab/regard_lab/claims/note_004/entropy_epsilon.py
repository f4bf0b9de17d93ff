"""−Σ w·log(w + 1e−12): the entropy, minus at most n·1e−12, except in float16."""

import torch

import regard
from regard_lab.claim import Figure, above, below, claim, conclude, gap, near

SHARPNESS = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0]


def with_epsilon(w):
    """Return the entropy by the note's attention_entropy."""
    return -(w * torch.log(w + 1e-12)).sum(-1)


@claim(
    statement="−Σ w·log(w + 1e−12) is the entropy: high when uniform, low when focused.",
    derivation=r"-\sum w \log(w + \varepsilon) = H - \sum w \log(1 + \varepsilon/w) \ge H - n\varepsilon",
    rule="Core: within n·1e-12 of the entropy, ln n when uniform, 0 when one-hot. Beyond: finite in float16.",
)
def measure(sampler):
    z = sampler.normal(64).double()
    rows = torch.stack([k * z for k in SHARPNESS])
    w = regard.softmax(rows)
    truth = regard.statistics.of_scores(rows).entropy
    uniform, focused = torch.full((64,), 1 / 64), torch.eye(64)[0]
    half = with_epsilon(regard.softmax(rows[-1:].half()))
    series = {"with ε": (SHARPNESS, with_epsilon(w)), "regard.statistics": (SHARPNESS, truth)}
    ends = f"from {truth[0]:.2f} nats for flat rows to {truth[-1]:.2f} for sharp ones"
    return conclude(
        below("largest |with ε − entropy|, 64 keys, float64", 1e-10, gap(with_epsilon(w), truth)),
        near("uniform over 64 keys, nats (ln 64)", 4.1589, with_epsilon(uniform), 1e-3),
        below("one-hot, nats", 1e-6, with_epsilon(focused).abs()),
        above("finite in float16, a row with zero weights (1: yes)", 0.5, half.isfinite().double().mean()).beyond(),
        condition="not in float16, where 1e−12 is 0 and a zero weight gives 0·log 0 = NaN; elsewhere it is low by at "
        "most n·1e−12",
        alt=f"The entropy with and without epsilon coincide, {ends}.",
        figure=Figure("lines", "factor on the scores", "entropy, nats", series, log="x"),
    )
