"""Unscaled attention tends to one-hot with d_k; scaled attention keeps its sharpness, from d_k ≈ 16 on."""

import torch

import regard
from regard_lab.claim import Figure, above, claim, conclude, exponent, mean, near

DIMS, KEYS = [1, 4, 16, 64, 256], 10


def sharpness(sampler, d, scale, blocks):
    """Return the mean largest weight per block of 8 queries over 10 keys."""
    return regard.softmax(scale * sampler.dots(d, blocks, 8, KEYS)).amax(-1).mean(-1)


@claim(
    statement="Unscaled, attention tends to one-hot as d_k grows; scaled, sharpness does not depend on d_k.",
    derivation=[
        r"\text{unscaled: } \sigma = \sqrt{d_k},\; 1 - w_{\max} \sim P(\text{gap} \lesssim 1) \sim 1/\sqrt{d_k}",
        r"\text{scaled, given } q:\; s_j \sim N(0, |q|^2/d_k), \quad \mathrm{Var}(|q|^2/d_k) = 2/d_k",
    ],
    rule="Core: unscaled passes 0.9 at d_k = 2048 and scaled moves by less than 0.025 from 16 on. Beyond: from d_k = "
    "1 on.",
)
def measure(sampler):
    unscaled = torch.stack([sharpness(sampler, d, 1.0, 400) for d in DIMS])
    scaled = torch.stack([sharpness(sampler, d, d**-0.5, 1500) for d in DIMS])
    wide = sharpness(sampler, 2048, 1.0, 40)
    fall = exponent(DIMS[2:], 1.0 - unscaled[2:])
    change = [mean(row - scaled[-1]) for row in scaled]
    series = {"unscaled": (DIMS, unscaled.mean(-1)), "scaled": (DIMS, scaled.mean(-1))}
    return conclude(
        above("unscaled: mean largest weight, d_k = 2048", 0.9, mean(wide)),
        near("unscaled: exponent b of 1 − w_max ∝ d_k^b, d_k ≥ 16", -0.5, fall, 0.2).ours(),
        near("scaled: largest weight, d_k = 64 minus d_k = 256", 0.0, change[3], 0.025),
        near("scaled: largest weight, d_k = 16 minus d_k = 256", 0.0, change[2], 0.025),
        near("scaled: largest weight, d_k = 1 minus d_k = 256", 0.0, change[0], 0.025).beyond(),
        condition="d_k is not small (16 or more): below that a scaled row is flatter on average, since its variance "
        "|q|²/d_k varies",
        alt=f"As d_k goes from {DIMS[0]} to {DIMS[-1]} the mean largest weight goes from "
        f"{unscaled[0].mean():.2f} to {unscaled[-1].mean():.2f} unscaled, and from {scaled[0].mean():.2f} to "
        f"{scaled[-1].mean():.2f} scaled.",
        figure=Figure("lines", "d_k", "mean largest weight of 10", series, log="x"),
    )
