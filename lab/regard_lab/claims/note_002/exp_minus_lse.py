"""softmax = exp(z − logsumexp(z)): stable once shifted, overflowing without."""

import math

import torch

import regard
from regard_lab.claim import Figure, below, claim, conclude, gap, near

LARGEST = math.log(torch.finfo(torch.float32).max)
SIZES = [1.0, 10.0, 50.0, 80.0, 100.0, 500.0, 1000.0]


def naive(z):
    e = torch.exp(z)
    return e / e.sum(-1, keepdim=True)


def shifted(z):
    """Return softmax by the note's own function."""
    z = z - z.max(-1, keepdim=True).values
    return torch.exp(z - torch.log(torch.exp(z).sum(-1, keepdim=True)))


@claim(
    statement="softmax(z) = exp(z − logsumexp(z)), stable once shifted by the maximum, and overflowing without.",
    derivation=[
        r"\exp(z_i - \log \textstyle\sum_j e^{z_j}) = e^{z_i}/\textstyle\sum_j e^{z_j}",
        r"z_i - z_{\max} \le 0 \Rightarrow e^{z_i - z_{\max}} \le 1; \quad e^{z} = \infty \text{ in float32 for } "
        r"z > 88.7",
    ],
    rule="Holds if the identity is exact to rounding, the shifted form stays right at ±1000 and the plain one does "
    "not.",
)
def measure(sampler):
    z = sampler.normal(300, 16)
    z = z / z.abs().amax(-1, keepdim=True)  # the largest entry has size 1, in half of the rows positive
    exactly = [regard.softmax(size * z.double()) for size in SIZES]
    finite = [float(naive(size * z).isfinite().all(-1).double().mean()) for size in SIZES]
    safe = [float(shifted(size * z).isfinite().all(-1).double().mean()) for size in SIZES]
    off = [gap(shifted(size * z), w) for size, w in zip(SIZES, exactly, strict=True)]
    by_lse = torch.exp(z.double() - regard.logsumexp(z.double())[:, None])
    series = {"exp(z)/Σexp(z)": (SIZES, finite), "shifted by the maximum": (SIZES, safe)}
    return conclude(
        below("largest |exp(z − lse) − softmax|, float64", 1e-14, gap(by_lse, regard.softmax(z.double()))),
        below("largest error of the shifted form, scores to ±1000, float32", 1e-4, max(off)),
        below("rows that survive without the shift, scores to ±1000", 1.0, finite[-1]),
        near("rows that survive without the shift, scores to ±80", 1.0, finite[3], 1e-9).ours(),
        remark=f"float32's exp overflows at {LARGEST:.1f}, so without the shift rows die beyond it.",
        alt=f"Without the shift rows turn to NaN once scores pass {LARGEST:.1f}, and {finite[-1]:.0%} stay "
        f"finite at {SIZES[-1]:g}; shifted, {safe[-1]:.0%} do.",
        figure=Figure("lines", "largest score", "share of finite rows", series, log="x"),
    )
