"""softmax(s)_i = exp(s_i) / Σ_j exp(s_j): the Boltzmann distribution, the one with the most entropy for its mean score.

>>> import regard, torch
>>> regard.softmax(torch.tensor([0.0, 0.0]))
tensor([0.5000, 0.5000])
"""

import torch

from regard.normalizers._families import Ratio
from regard.normalizers._language import jit


def reference(scores, visible, theta):
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)


@jit
def numerator(e, s, c):
    return e


@jit
def slope_of_weight(p, inverse_z):
    return p


normalizer = Ratio(
    name="softmax",
    formula="exp(s) / Σ exp(s)",
    sums_to="1",
    sparse=False,
    use_when="the default; learn its temperature",
    paper="Boltzmann 1868; Bridle 1990",
    reference=reference,
    numerator=numerator,
    numerator_slope=numerator,
    slope_of_weight=slope_of_weight,
    exponential=True,
)
