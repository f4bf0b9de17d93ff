"""Normalised q and k: their common scale no longer matters."""

import torch
from torch.nn.functional import normalize as unit

import regard
from regard.lab.claim import Claim, Finding, below, near
from regard.lab.estimate import exact, mean
from regard.lab.figure import Figure

SIZES = [0.1, 1.0, 10.0]
GAIN = 8.0


def entropy(q, k, scale):
    return regard.attention(q, k, k, scale=scale, return_stats=("entropy",))[1].entropy.flatten()


def measure(bench):
    q, k = bench.normal(1, 1, 64, 64), bench.normal(1, 1, 16, 64)
    plain = torch.stack([entropy(size * q, k, "sqrt") for size in SIZES])
    normed = torch.stack([entropy(unit(size * q, dim=-1), unit(k, dim=-1), GAIN) for size in SIZES])
    uneven = torch.ones(64)
    uneven[:4] = 10.0
    pairs = bench.normal(2, 400, 8, 64)
    cosine, cosine_uneven = (_cosines(pairs), _cosines(pairs * uneven))
    return Finding(
        [
            below(
                "largest change of entropy, |q| from 0.1 to 10, normalised",
                1e-4,
                exact((normed - normed[0]).abs().max()),
            ),
            near("std of cos(q, k), 64 equal variances (1/√d_k)", 0.125, mean(_deviation(cosine)), 0.01).ours(),
            near(
                "std of cos(q, k), 4 of 64 entries 10 times as large", 0.4, mean(_deviation(cosine_uneven)), 0.05
            ).ours(),
        ],
        remark="What goes is one common factor. Unequal variances stay: four large coordinates make the cosine of 64 "
        "behave as one of about six. And a cosine lies in [−1, 1], so a gain must be learned to be sharp at all.",
        figure=lambda: Figure(
            "lines",
            "factor on q",
            "mean entropy, nats",
            {
                "scaled dot product": (SIZES, plain.mean(-1).tolist()),
                "normalised q, k": (SIZES, normed.mean(-1).tolist()),
            },
            log_x=True,
            alt="The entropy of scaled dot products falls as q grows; with normalised q and k it is constant.",
        ),
    )


def _cosines(pairs):
    q, k = unit(pairs, dim=-1)
    return q @ k.transpose(-1, -2)


def _deviation(x):
    return x.flatten(1).square().mean(-1).sqrt()


claim = Claim(
    id="qk-norm",
    note="002",
    statement="Normalising q and k removes the influence of their variance.",
    derivation=[
        r"\frac{(cq) \cdot k}{\|cq\|\,\|k\|} = \frac{q \cdot k}{\|q\|\,\|k\|} \text{ for every } c > 0",
        r"\mathrm{Var}(\cos) = \textstyle\sum \lambda_i^2/(\sum \lambda_i)^2 \text{ for coordinate variances } "
        r"\lambda_i: 1/d_k \text{ if equal}",
    ],
    rule="Holds if a factor of 100 on q changes no row's entropy by more than 1e-4.",
    measure=measure,
)
