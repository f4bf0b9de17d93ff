"""tanh is bounded by 1, the score vᵀ tanh(·) is not: it is v that keeps it small, or does not."""

import torch

from regard_lab.claim import Figure, claim, conclude, exponent, mean, near

DIMS = [16, 64, 256]


def spread(sampler, d, v_scale, blocks=300):
    """Return the standard deviation of vᵀ tanh(W₁q + W₂k) over 16 pairs, per block; W₁q and W₂k have unit variance."""
    hidden = torch.tanh(sampler.normal(blocks, 16, d) + sampler.normal(blocks, 16, d))
    return (hidden @ (v_scale * sampler.normal(blocks, d, 1))).std((-1, -2))


@claim(
    statement="Additive attention needs no scale because tanh is bounded by 1.",
    derivation=[
        r"|v^{\top}\tanh(\cdot)| \le \|v\|_1, \text{ not } 1",
        r"\mathrm{Var}(v^{\top}\tanh(\cdot)) = d\,\mathrm{Var}(v_i)\,\mathbb{E}[\tanh^2]",
    ],
    rule="Core: with v of variance 1/d the spread must not grow with d. Beyond: it must not with unit-variance v "
    "either.",
)
def measure(sampler):
    plain = torch.stack([spread(sampler, d, 1.0) for d in DIMS])
    small = torch.stack([spread(sampler, d, d**-0.5) for d in DIMS])
    series = {"v of variance 1": (DIMS, plain.mean(-1)), "v of variance 1/d": (DIMS, small.mean(-1))}
    return conclude(
        near("exponent b of σ(score) ∝ d^b, v of variance 1/d", 0.0, exponent(DIMS, small), 0.1),
        near("exponent b of σ(score) ∝ d^b, v of variance 1", 0.0, exponent(DIMS, plain), 0.1).beyond(),
        near("the same exponent, derived", 0.5, exponent(DIMS, plain), 0.1).ours(),
        near("σ(score)/√d at d = 256, v of variance 1", 0.70, mean(plain[-1] / 16.0), 0.1).ours(),
        condition="the entries of v shrink as 1/√d, as usual initialisations make them: the scale then sits in v, "
        "not in tanh",
        alt="With unit-variance v the additive score grows as the square root of d; with v of variance 1/d it is "
        "constant.",
        figure=Figure("lines", "hidden size d", "σ of the additive score", series, log="xy"),
    )
