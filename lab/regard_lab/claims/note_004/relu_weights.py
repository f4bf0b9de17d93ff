"""relu(s)/Σrelu(s): weights where a score is positive, 0/0 where none is."""

import torch

import regard
from regard_lab.claim import Figure, below, claim, conclude, gap, near, share

KEYS = [1, 2, 4, 8]


def naive(s):
    return torch.relu(s) / torch.relu(s).sum(-1, keepdim=True)


@claim(
    statement="relu(s)/Σ relu(s) is a usable weight.",
    derivation=r"\sum_i [s_i]_+ = 0 \text{ when every } s_i \le 0: \quad P = 2^{-n} \text{ for symmetric scores}",
    rule="Core: where a score is positive the weights sum to 1. Beyond: no row may be NaN.",
)
def measure(sampler):
    s = sampler.normal(4000, 4)
    alive = (s > 0).any(-1)
    w = naive(s)
    dead = [share(naive(sampler.normal(2000, n)).isnan().any(-1)) for n in KEYS]
    series = {"measured": (KEYS, dead), "2^−n": (KEYS, [2.0**-n for n in KEYS])}
    return conclude(
        below("largest |Σw − 1| where a score is positive", 1e-6, gap(w[alive].sum(-1), 1)),
        below("largest |naive − regard.relu_norm| there", 1e-6, gap(w[alive], regard.relu_norm(s)[alive])),
        below("share of NaN rows, 4 normal scores", 1e-3, share(w.isnan().any(-1))).beyond(),
        near("the same, 2^−4", 1 / 16, share(w.isnan().any(-1)), 0.04).ours(),
        near("NaN in regard.relu_norm", 0.0, regard.relu_norm(s).isnan().sum(), 0.5).ours(),
        condition="at least one score is positive: a row without one is 0/0 (probability 2⁻ⁿ for n symmetric "
        "scores), and regard.relu_norm gives zeros there",
        remark="It is not shift-invariant, and keys with negative scores get no gradient. It is not linear attention "
        "either: the N × N scores are still formed.",
        alt="The share of rows with no positive score halves with every key.",
        figure=Figure("lines", "keys n", "share of 0/0 rows", series),
    )
