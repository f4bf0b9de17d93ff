"""softmax1(s)_i = exp(s_i) / (1 + Σ_j exp(s_j)): softmax beside a silent key of score 0: a head may say nothing.

>>> import regard, torch
>>> regard.softmax1(torch.tensor([0.0, 0.0]))
tensor([0.3333, 0.3333])
"""

import torch

from regard.normalizers._families import Ratio
from regard.normalizers._language import jit
from regard.normalizers.softmax import numerator, slope_of_weight


def reference(scores, visible, theta):
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    silent = torch.zeros_like(scores[..., :1])
    return torch.softmax(torch.cat([scores, silent], -1), -1)[..., :-1]


@jit
def rest(c):
    return c


class Softmax1(Ratio):
    def cold(self, scores, visible, theta):
        """One-hot where the maximum is above 0, nothing where it is below; at 0 the silent key shares."""
        silent = torch.zeros_like(scores[..., :1])
        if visible is not None:
            visible = torch.cat([visible, torch.ones_like(silent, dtype=torch.bool)], -1)
        return super().cold(torch.cat([scores, silent], -1), visible, theta)[..., :-1]


normalizer = Softmax1(
    name="softmax1",
    formula="exp(s) / (1 + Σ exp(s))",
    sums_to="< 1",
    sparse=False,
    paper="Miller 2023, Attention Is Off By One",
    use_when="a head may attend to nothing; costs nothing",
    reference=reference,
    numerator=numerator,
    numerator_slope=numerator,
    slope_of_weight=slope_of_weight,
    rest=rest,
    shift="max0",
    exponential=True,
)
