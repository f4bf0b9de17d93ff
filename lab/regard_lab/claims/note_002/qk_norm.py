"""Normalised q and k: a factor on a whole vector no longer matters; unequal variances inside it do."""

import torch
from torch.nn.functional import normalize as unit

import regard
from regard_lab.claim import Figure, below, claim, conclude, gap, mean, near

SIZES = [0.1, 1.0, 10.0]
GAIN = 8.0


def entropy(q, k, scale):
    return regard.attention(q, k, k, scale=scale, return_stats=("entropy",))[1].entropy.flatten()


def cosine_deviations(pairs):
    """Return the root mean square of the cosines of q and k [2, blocks, n, d], per block."""
    q, k = unit(pairs, dim=-1)
    return (q @ k.transpose(-1, -2)).flatten(1).square().mean(-1).sqrt()


@claim(
    statement="Normalising q and k removes the influence of their variance.",
    derivation=[
        r"\frac{(aq) \cdot (bk)}{\|aq\|\,\|bk\|} = \frac{q \cdot k}{\|q\|\,\|k\|} \text{ for all } a, b > 0",
        r"\text{entries of variance } \lambda_i: \quad \mathrm{Var}(\cos) \approx "
        r"\textstyle\sum \lambda_i^2/(\sum \lambda_i)^2",
        r"\text{equal } \lambda_i: \quad \mathrm{Var}(\cos) = 1/d_k",
    ],
    rule="Core: factors from 0.1 to 10 on q and on k change no row's entropy by more than 1e-4, and the cosines of "
    "equal variances have standard deviation 1/√d_k. Beyond: they keep it when the variances of the entries differ.",
)
def measure(sampler):
    q, k = sampler.normal(1, 1, 64, 64), sampler.normal(1, 1, 16, 64)
    plain = torch.stack([entropy(size * q, size * k, "sqrt") for size in SIZES])
    normed = torch.stack([entropy(unit(size * q, dim=-1), unit(size * k, dim=-1), GAIN) for size in SIZES])
    sizes_q, sizes_k = (10 ** sampler.uniform(1, 1, n, 1, low=-1.0) for n in (64, 16))  # each vector its own
    own = entropy(unit(sizes_q * q, dim=-1), unit(sizes_k * k, dim=-1), GAIN)
    uneven = torch.ones(64)
    uneven[:4] = 10.0
    pairs = sampler.normal(2, 400, 8, 64)
    even, odd = (mean(cosine_deviations(x)) for x in (pairs, pairs * uneven))
    series = {"scaled dot product": (SIZES, plain.mean(-1)), "normalised q, k": (SIZES, normed.mean(-1))}
    return conclude(
        below("largest change of entropy, q and k both from 0.1 to 10 times, normalised", 1e-4, gap(normed, normed[0])),
        below("largest change of entropy, each q and k its own factor, normalised", 1e-4, gap(own, normed[1])),
        near("std of cos(q, k), 64 entries of equal variance (1/√d_k)", 0.125, even, 0.01),
        near("the same, 4 of the 64 entries 10 times as large", 0.125, odd, 0.01).beyond(),
        condition="“variance” means one factor per vector. Unequal variances of its entries stay: with 4 of 64 entries "
        f"10 times as large the scores' standard deviation is {odd.value:.2f} instead of {even.value:.3f}, that of "
        f"{odd.value**-2:.0f} entries",
        remark="A cosine lies in [−1, 1], so a gain must be learned to be sharp at all.",
        alt=f"As q and k grow from {SIZES[0]:g} to {SIZES[-1]:g} times, the entropy of scaled dot products "
        f"falls from {plain[0].mean():.2f} to {plain[-1].mean():.2f}; with normalised q and k it stays "
        f"{normed.mean():.2f}.",
        figure=Figure("lines", "factor on q and k", "mean entropy, nats", series, log="x"),
    )
