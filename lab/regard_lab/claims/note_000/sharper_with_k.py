"""Multiplying the scores by a larger k moves softmax towards one-hot, if one score is the largest."""

import torch

import regard
from regard_lab.claim import Figure, below, claim, conclude, near

SCALES = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]


def distance(x, k):
    """Return 1 − largest weight, 0 for one-hot."""
    return 1.0 - regard.softmax(k * x).amax(-1)


@claim(
    statement="The larger k, the closer softmax(k·x) is to one-hot.",
    derivation=[
        r"\frac{d w_{\max}}{dk} = w_{\max}\,(x_{\max} - \mathbb{E}_w[x]) \ge 0",
        r"\frac{dH}{dk} = -k\,\mathrm{Var}_w(x) \le 0",
        r"k \to \infty:\; w_{\max} \to 1/m \text{ for } m \text{ tied maxima}",
    ],
    rule="Core: every step in k moves closer, and k = 64 is one-hot when one score is largest. Beyond: tied maxima.",
)
def measure(sampler):
    x = sampler.normal(500, 10).double()
    x[:, 0] = x.amax(-1) + 0.5  # one clear winner
    curves = torch.stack([distance(x, k) for k in SCALES])
    away = curves[1:] > curves[:-1]
    tied = x.clone()
    tied[:, 1] = tied[:, 0]
    tied_curve = torch.stack([distance(tied, k) for k in SCALES]).mean(-1)
    series = {"one winner": (SCALES, curves.mean(-1)), "two tied winners": (SCALES, tied_curve)}
    return conclude(
        near("steps in k, of 3500, that move away from one-hot", 0.0, away.sum(), 0.5),
        below("distance 1 − max w at k = 64, one largest score", 1e-6, curves[-1].max()),
        below("distance 1 − max w at k = 64, two tied largest scores", 1e-6, tied_curve[-1]).beyond(),
        condition="k > 0 and the largest score is unique; m tied winners share 1/m each",
        alt="The distance from one-hot falls to 0 with k when one score is largest, and to one half when two are tied.",
        figure=Figure("lines", "k", "1 − largest weight", series, log="x"),
    )
