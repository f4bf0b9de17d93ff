"""relu(s)_i = max(s_i, 0) / Σ_j max(s_j, 0): negative scores weigh nothing; without a positive score all is zero.

>>> import regard, torch
>>> regard.relu_norm(torch.tensor([3.0, 1.0, -2.0]))
tensor([0.7500, 0.2500, 0.0000])
"""

import torch

from regard.normalizers._families import Ratio
from regard.normalizers._language import jit, tl


def reference(scores, visible, theta):
    u = torch.relu(scores)  # slope 0 at 0
    if visible is not None:
        u = u.masked_fill(~visible, 0.0)
    z = u.sum(-1, keepdim=True)
    return u / z.masked_fill(z == 0, 1.0)


@jit
def numerator(e, s, c):
    return tl.where(s <= 0.0, 0.0, s)  # a maximum would lose a NaN


@jit
def numerator_slope(e, s, c):
    return tl.where(s > 0.0, 1.0, 0.0)


@jit
def slope_of_weight(p, inverse_z):
    return tl.where(p > 0.0, inverse_z, 0.0)


normalizer = Ratio(
    name="relu",
    formula="max(s, 0) / Σ max(s, 0)",
    sums_to="1, or 0 where no score is positive",
    sparse=True,
    paper="Zhang, Titov & Sennrich 2021, arXiv 2104.07012 (rectified attention)",
    use_when="exact zeros without a threshold; 0.095 nats worse",
    reference=reference,
    numerator=numerator,
    numerator_slope=numerator_slope,
    slope_of_weight=slope_of_weight,
    shift="none",
)
