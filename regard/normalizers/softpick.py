"""softpick(s)_i = max(exp(s_i) − 1, 0) / Σ_j |exp(s_j) − 1|: exact zeros below 0, and no sink to park weight on.

>>> import math, regard, torch
>>> regard.softpick(torch.tensor([math.log(3.0), math.log(2.0), -math.inf]))
tensor([0.6667, 0.3333, 0.0000])
"""

import torch

from regard.normalizers._families import Ratio
from regard.normalizers._language import jit, tl


def reference(scores, visible, theta):
    seen = scores > float("-inf") if visible is None else visible & (scores > float("-inf"))
    seen = seen | scores.isnan() if visible is None else seen | (scores.isnan() & visible)
    s = scores.masked_fill(~seen, 0.0)  # expm1(0) = 0: weighs nothing
    m = s.detach().amax(-1, keepdim=True).clamp_min(0.0) if s.shape[-1] else s.sum(-1, keepdim=True)
    near = s.abs() < 1.0  # exp(s) − 1 without cancellation near 0, without overflow far from it
    grown = torch.where(near, torch.expm1(s.where(near, 0.0)) * torch.exp(-m), torch.exp(s - m) - torch.exp(-m))
    z = grown.abs().sum(-1, keepdim=True)
    return torch.relu(grown) / z.masked_fill(z == 0, 1.0)


@jit
def signed(e, s, c):
    return e - c


@jit
def numerator(e, s, c):
    return tl.maximum(e - c, 0.0)


@jit
def numerator_slope(e, s, c):
    return tl.where(s > 0.0, e, 0.0)


@jit
def denominator(e, s, c):
    return tl.abs(e - c)


@jit
def denominator_slope(e, s, c):
    return tl.where(s > 0.0, e, tl.where(s < 0.0, -e, 0.0))


class Softpick(Ratio):
    def cold(self, scores, visible, theta):
        """One-hot where the maximum is above 0, nothing elsewhere."""
        return super().cold(scores, visible, theta) * (scores > 0)

    def hot(self, scores, visible, theta):
        """exp(s/τ) − 1 → s/τ: max(s, 0) / Σ|s|."""
        seen = scores > float("-inf") if visible is None else visible & (scores > float("-inf"))
        s = scores.masked_fill(~seen, 0.0)
        z = s.abs().sum(-1, keepdim=True)
        return s.clamp_min(0.0) / z.masked_fill(z == 0, 1.0)


normalizer = Softpick(
    name="softpick",
    formula="max(exp(s) − 1, 0) / Σ |exp(s) − 1|",
    sums_to="≤ 1",
    sparse=True,
    paper="Zuhri et al. 2025, arXiv 2504.20966",
    use_when="exact zeros, may attend to nothing; 0.034 nats worse",
    reference=reference,
    numerator=numerator,
    numerator_slope=numerator_slope,
    denominator=denominator,
    denominator_slope=denominator_slope,
    signed=signed,
    shift="max0",
)
